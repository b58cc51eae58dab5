"""Moving records of mapped weights from one side of an edge to the other, journaled or plain.

A record is decoded, its old words are saved, the new ones stored, and every chunk it touches is digested while it is
in the cache. A record whose digests come out wrong is put back before the error is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.bundle import Version
from weightsync.checkpoint import Checkpoint
from weightsync.codec import Mode, Sparse, undo_bytes
from weightsync.codec.difference import Difference, Words, negated
from weightsync.delta.journal import Journal, Slot
from weightsync.delta.merge import split
from weightsync.delta.reader import Delta
from weightsync.digests import Progress, chunk_digest, silent
from weightsync.errors import DigestMismatch
from weightsync.parallel import Workers


@dataclass(frozen=True, slots=True)
class Walk:
    """One edge over one mapped checkpoint: from `start` to `goal`, along `delta`, backwards if `reverse`."""

    checkpoint: Checkpoint
    delta: Delta
    reverse: bool
    start: Version
    goal: Version

    def slot_bytes(self) -> int:
        """Room that the old words of the largest record need."""
        columns = (self.delta.records[name].tolist() for name in ("mode", "width", "n", "k"))
        return max((undo_bytes(Mode(mode), width, n, k) for mode, width, n, k in zip(*columns, strict=True)), default=0)

    def indices(self, record: int) -> npt.NDArray[np.int64]:
        """The chunk indices that a record touches."""
        segments = self.delta.segments[self.delta.span(record)]
        indices: npt.NDArray[np.int64] = self.checkpoint.schema.chunk_starts[segments["tensor"]] + segments["chunk"]
        return indices


def drive(
    walk: Walk, want: int, workers: Workers, *, journal: Journal | None = None, progress: Progress = silent
) -> None:
    """Bring every record to its goal side (`want` 1) or back to its start side (0).

    Without a journal all records are taken to be on the other side. Raises `DigestMismatch` or `FormatError`; the
    record that caused it is then as it was, others may be on either side.
    """

    def step(record: int) -> None:
        if journal is None:
            _move(walk, record, want, None)
        else:
            with journal.slot() as slot:
                _move(walk, record, want, slot)
                journal.done[record] = want
                slot.clear()
        progress(int(walk.delta.records["n"][record]) * int(walk.delta.records["width"][record]))

    todo = range(len(walk.delta)) if journal is None else np.flatnonzero(journal.done != want).tolist()
    workers.run(step, todo)


def restore(walk: Walk, journal: Journal) -> None:
    """After a kill: write the old words of every record that was in flight back, and clear the slots."""
    for slot in journal.slots:
        if not slot.head[0]:
            continue
        record, want = int(slot.head[0]) - 1, int(slot.head[1])
        if record >= len(walk.delta):
            raise DigestMismatch(f"{journal.path}: names record {record}, the edge has {len(walk.delta)}")
        if journal.done[record] != want:
            _put_back(_parts(walk, record, walk.delta.decode(record)), slot)
        slot.clear()


def _move(walk: Walk, record: int, want: int, slot: Slot | None) -> None:
    change = walk.delta.decode(record)
    absolute = int(walk.delta.records["mode"][record]) == Mode.FULL
    if not absolute and bool(want) == walk.reverse:
        change = negated(change)
    parts = list(_parts(walk, record, change))
    if slot is not None:
        _take(parts, slot)
        slot.save(record, want)
    try:
        for words, part in parts:
            if absolute:
                words[:] = part.diff
            elif isinstance(part, Sparse):
                words[part.at] += part.diff
            else:
                words += part.diff
        side = walk.goal if want else walk.start
        for index in walk.indices(record).tolist():
            _prove(walk.checkpoint, index, side)
    except BaseException:
        if slot is not None:
            _put_back(parts, slot)
            slot.clear()
        raise


def _prove(checkpoint: Checkpoint, index: int, side: Version) -> None:
    tensor, chunk = checkpoint.schema.locate(index)
    if (chunk_digest(checkpoint.chunk(tensor, chunk)) != side.digests[index]).any():
        name = checkpoint.schema.name(tensor)
        raise DigestMismatch(f"tensor {name!r}, chunk {chunk}: wrong digest after it was written")


def _parts(walk: Walk, record: int, change: Difference) -> Iterator[tuple[Words, Difference]]:
    span = walk.delta.span(record)
    width = int(walk.delta.records["width"][record])
    segments = walk.delta.segments[span]
    for segment, part in zip(segments, split(change, walk.delta.lengths[span]), strict=True):
        if part is not None:
            yield walk.checkpoint.words(int(segment["tensor"]), int(segment["chunk"]), width), part


def _take(parts: list[tuple[Words, Difference]], slot: Slot) -> None:
    at = 0
    for words, part in parts:
        old = words[part.at] if isinstance(part, Sparse) else words
        slot.room[at : at + old.nbytes].view(old.dtype)[:] = old
        at += old.nbytes


def _put_back(parts: Iterable[tuple[Words, Difference]], slot: Slot) -> None:
    at = 0
    for words, part in parts:
        size = part.k if isinstance(part, Sparse) else part.n
        saved = slot.room[at : at + size * words.itemsize].view(words.dtype)
        if isinstance(part, Sparse):
            words[part.at] = saved
        else:
            words[:] = saved
        at += saved.nbytes
