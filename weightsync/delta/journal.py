"""The undo journal of an apply: what makes a kill at any instant harmless.

There is no redo log: the verified delta is the redo. Before the first store of a record its old words go to an undo
slot whose valid flag is written last; then come the stores, the check of the digests, the record's done byte, and the
flag is cleared. Whoever opens the journal after a kill writes valid slots back and knows for every record on which
side it is. The file is mapped, so what was stored survives the process (not a power cut: the page cache may not).

File: a 4,096-byte JSON header; a done byte for each record (0: as before the apply, 1: as after it), padded to 4,096;
then for each slot a 64-byte head (u64 record + 1 or 0, u64 wanted done byte) and room for the largest record's words.
"""

from __future__ import annotations

import mmap
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weightsync import canonical
from weightsync.errors import FormatError, TargetError
from weightsync.files import FOLDER, JOURNAL, TEMPORARY, need_room, sync_folder, writing
from weightsync.manifest import End

FORMAT = "weightsync.journal/1"
PAGE = 4096
HEAD = 64


@dataclass(frozen=True, slots=True)
class Intent:
    """What an apply set out to do: walk the edge `edge` (sha256), backwards if `reverse`, from `start` to `goal`."""

    edge: str
    reverse: bool
    start: End
    goal: End


@dataclass(frozen=True, slots=True)
class Slot:
    """One undo slot: `head` is (record + 1 or 0, wanted done byte), `room` its bytes."""

    head: npt.NDArray[np.uint64]
    room: npt.NDArray[np.uint8]

    def save(self, record: int, want: int) -> None:
        """Declare the words already copied into `room` valid; from here on the record's words may be stored."""
        self.head[1] = want
        self.head[0] = record + 1

    def clear(self) -> None:
        """The record is whole again, on one side or the other."""
        self.head[0] = 0


class Journal:
    """The open journal of one directory. `done` (R,) holds each record's side: 0 as at the start, 1 as at the goal."""

    def __init__(
        self, path: Path, mapped: mmap.mmap, intent: Intent, records: int, slots: int, slot_bytes: int
    ) -> None:
        self.path, self.intent, self._map = path, intent, mapped
        self.done = np.frombuffer(mapped, np.uint8, records, PAGE)
        self.slots: list[Slot] = []
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        at = PAGE + _padded(records)
        for _ in range(slots):
            head = np.frombuffer(mapped, np.uint64, 2, at)
            slot = Slot(head, np.frombuffer(mapped, np.uint8, slot_bytes, at + HEAD))
            self.slots.append(slot)
            self._free.put(slot)
            at += HEAD + _padded(slot_bytes)

    @classmethod
    def create(cls, target: Path, intent: Intent, *, records: int, slots: int, slot_bytes: int) -> Journal:
        """Begin a journal in `target`; its whole size is allocated, so that no later store can fail for want of room."""
        folder = target / FOLDER
        if folder.is_symlink():
            raise TargetError(f"{folder}: is a symbolic link; remove it")
        path = folder / JOURNAL
        size = PAGE + _padded(records) + slots * (HEAD + _padded(slot_bytes))
        need_room(target, size, "the undo journal")
        document = {
            "edge": intent.edge,
            "format": FORMAT,
            "goal": {"manifest": intent.goal.manifest, "weights": intent.goal.weights},
            "records": records,
            "reverse": intent.reverse,
            "slot_bytes": slot_bytes,
            "slots": slots,
            "start": {"manifest": intent.start.manifest, "weights": intent.start.weights},
        }
        temporary = path.with_name(f"{TEMPORARY}{JOURNAL}")
        with writing(path, size):
            folder.mkdir(exist_ok=True)
            temporary.unlink(missing_ok=True)  # of a call that was killed here; we hold the directory's lock
            try:
                with temporary.open("xb") as file:
                    os.posix_fallocate(file.fileno(), 0, size)
                    file.write(canonical.dumps(document).ljust(PAGE))
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            sync_folder(folder)
        journal = cls.open(target)
        if journal is None:
            raise TargetError(f"{path}: vanished as it was made")
        return journal

    @classmethod
    def open(cls, target: Path) -> Journal | None:
        """The journal that an interrupted apply left in `target`, if there is one. Raises `FormatError`."""
        path = target / FOLDER / JOURNAL
        if not path.exists():
            return None
        with writing(path), path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if size < PAGE:
                raise FormatError(f"{path}: {size} bytes are no journal; verify the directory, then remove this file")
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_WRITE)
        document = canonical.loads(mapped[:PAGE].rstrip(), str(path))
        try:
            if document["format"] != FORMAT:
                raise FormatError(f"{path}: has format {document['format']!r}, this version reads {FORMAT!r}")
            ends = [End(document[end]["weights"], document[end]["manifest"]) for end in ("start", "goal")]
            intent = Intent(document["edge"], document["reverse"], *ends)
            shape = [int(document[key]) for key in ("records", "slots", "slot_bytes")]
            texts = [intent.edge, *(text for end in ends for text in (end.weights, end.manifest))]
            if not all(isinstance(text, str) for text in texts) or not isinstance(intent.reverse, bool):
                raise TypeError("a digest or the direction")
        except (KeyError, TypeError, ValueError) as e:
            raise FormatError(f"{path}: lacks a field or has a wrong one: {e!r}") from e
        if min(shape) < 0 or size < PAGE + _padded(shape[0]) + shape[1] * (HEAD + _padded(shape[2])):
            raise FormatError(f"{path}: is shorter than its header says; verify the directory, then remove this file")
        return cls(path, mapped, intent, *shape)

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """A free slot for one record; the block must leave the record whole, on one side or the other."""
        slot = self._free.get()
        try:
            yield slot
        finally:
            self._free.put(slot)

    def remove(self) -> None:
        """The apply is complete, or undone: forget it."""
        with writing(self.path):
            self.path.unlink()
            sync_folder(self.path.parent)
        discard_folder(self.path.parent.parent)


def discard_folder(target: Path) -> None:
    """Remove the library's own folder from `target`, with temporaries of killed calls, once nothing else is in it."""
    folder = target / FOLDER
    if folder.is_symlink():
        return
    for path in folder.glob(f"{TEMPORARY}*"):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # not there, or still needed
        folder.rmdir()


def _padded(size: int) -> int:
    return -(-size // PAGE) * PAGE
