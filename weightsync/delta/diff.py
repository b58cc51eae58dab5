"""Making an edge from two checkpoints, or from one and nothing, in one pass over their mapped bytes.

Two stages run on the same threads: the first compares chunks (and digests them while they are at hand), the second
codes groups of chunks into records. Results are drawn in order and a bounded number is in flight, so that the output
does not depend on the number of threads and memory does not depend on the size of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from weightsync.checkpoint import Checkpoint
from weightsync.codec import Dense, Difference, Mode, Sparse, choose, compare
from weightsync.codec.difference import Words
from weightsync.delta.grouping import Piece, write_pieces
from weightsync.delta.writer import DeltaWriter
from weightsync.digests import DIGEST_BYTES, Digests, Progress, batches, chunk_digest, silent
from weightsync.dtypes import NON_FINITE
from weightsync.errors import SchemaMismatch, SourceChanged
from weightsync.parallel import Workers


class ParentChanged(SourceChanged):
    """The directory given as the base does not hold the version it should; another copy of that version will do."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What a pass over the checkpoints found: digests of both (of `new` twice without a base), and counts of words.

    `non_finite` counts the words among `changed` whose new value is infinite or NaN; their bytes are kept exactly.
    """

    old: Digests
    new: Digests
    changed: int
    non_finite: int
    records: int


@dataclass(frozen=True, slots=True)
class _Batch:
    pieces: list[Piece]
    non_finite: int


def write_delta(
    old: Checkpoint,
    new: Checkpoint,
    writer: DeltaWriter,
    workers: Workers,
    *,
    expected: Digests | None = None,
    progress: Progress = silent,
) -> Scan:
    """Append the records that lead from `old` to `new`.

    With `expected`, every chunk of `old` is checked as it is read, and `ParentChanged` names the tensor that is not
    what its manifest says. Raises `SchemaMismatch` when the tensors differ in name, type or shape.
    """
    schema = new.schema
    if old.schema != schema:
        raise SchemaMismatch("the checkpoints hold different tensors: " + "; ".join(old.schema.differences(schema)))
    before, after = (np.empty((schema.chunks, DIGEST_BYTES), np.uint8) for _ in range(2))

    def scan(run: range) -> _Batch:
        pieces, non_finite = [], 0
        for index in run:
            tensor, chunk = schema.locate(index)
            theirs, ours = old.chunk(tensor, chunk), new.chunk(tensor, chunk)
            before[index], after[index] = chunk_digest(theirs), chunk_digest(ours)
            if expected is not None and (before[index] != expected[index]).any():
                raise ParentChanged(f"{old.root}: tensor {schema.name(tensor)!r} is not what its manifest says")
            if (before[index] != after[index]).any():
                words = new.words(tensor, chunk)
                change = compare(old.words(tensor, chunk), words)
                if change is None:
                    raise SourceChanged(f"{new.root}: tensor {schema.name(tensor)!r} changed while it was read")
                pieces.append(Piece(tensor, chunk, words.itemsize, choose(change), change))
                non_finite += _non_finite(schema.dtype(tensor), words, change)
            progress(theirs.nbytes + ours.nbytes)
        return _Batch(pieces, non_finite)

    return _write(scan, batches(schema), writer, workers, before, after)


def write_full(checkpoint: Checkpoint, writer: DeltaWriter, workers: Workers, *, progress: Progress = silent) -> Scan:
    """Append the records that make `checkpoint` from nothing."""
    schema = checkpoint.schema
    after = np.empty((schema.chunks, DIGEST_BYTES), np.uint8)

    def scan(run: range) -> _Batch:
        pieces, non_finite = [], 0
        for index in run:
            tensor, chunk = schema.locate(index)
            after[index] = chunk_digest(checkpoint.chunk(tensor, chunk))
            words = checkpoint.words(tensor, chunk)
            change = Dense(words, len(words))
            pieces.append(Piece(tensor, chunk, words.itemsize, Mode.FULL, change))
            non_finite += _non_finite(schema.dtype(tensor), words, change)
            progress(words.nbytes)
        return _Batch(pieces, non_finite)

    return _write(scan, batches(schema), writer, workers, after, after)


def _write(
    scan: Callable[[range], _Batch],
    runs: Iterator[range],
    writer: DeltaWriter,
    workers: Workers,
    before: Digests,
    after: Digests,
) -> Scan:
    changed = non_finite = 0

    def pieces() -> Iterator[Piece]:
        nonlocal changed, non_finite
        for batch in workers.map(scan, runs):
            non_finite += batch.non_finite
            changed += sum(piece.change.k for piece in batch.pieces)
            yield from batch.pieces

    records = write_pieces(pieces(), writer, workers)
    return Scan(before, after, changed, non_finite, records)


def _non_finite(dtype: str, words: Words, change: Difference) -> int:
    """How many of the changed words are now infinite or NaN."""
    if dtype not in NON_FINITE:
        return 0
    mask, infinity = NON_FINITE[dtype]
    if isinstance(change, Sparse):
        words = words[change.at[change.at % 2 == 1] if dtype == "F64" else change.at]
    else:
        changed = np.ones(len(words), bool) if change.diff is words else change.diff != 0
        if dtype == "F64":
            changed[::2] = False
        words = words[changed]
    return int(np.count_nonzero((words & words.dtype.type(mask)) >= infinity))
