"""Folding consecutive edges into one, without the weights.

Wrapped differences add up, so several deltas over the same chunk give the one delta that a direct comparison would
have given, byte for byte. Edges may be walked backwards, which makes a merge across siblings possible. Every input is
streamed: one record of each is in memory at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from weightsync.bundle import Version
from weightsync.codec import Dense, Difference, Sparse, choose, summed
from weightsync.codec.difference import negated
from weightsync.delta.grouping import Piece, write_pieces
from weightsync.delta.reader import Delta
from weightsync.delta.writer import DeltaWriter
from weightsync.errors import FormatError, SchemaMismatch, Unsupported
from weightsync.parallel import Workers
from weightsync.schema import Schema


@dataclass(frozen=True, slots=True)
class Hop:
    """One edge of a chain: its records, and whether they are walked from target to base."""

    delta: Delta
    reverse: bool = False


@dataclass(frozen=True, slots=True)
class Merged:
    """Counts of a merge: words that differ between its ends, and records written."""

    changed: int
    records: int


def write_merged(hops: Sequence[Hop], base: Version, target: Version, writer: DeltaWriter, workers: Workers) -> Merged:
    """Append the records that lead from `base`, where the first hop starts, to `target`, where the last one ends.

    Raises `FormatError` when the outcome does not touch exactly the chunks in which the two versions differ: an input is
    then not what it claims to be. More cannot be told without the weights; who applies the result proves every chunk.
    """
    if base.schema != target.schema:
        raise SchemaMismatch("the first and the last version hold different tensors; only a Full edge leads there")
    for hop in hops:
        if hop.delta.full:
            raise Unsupported("a Full edge cannot be merged: it starts from nothing")
        if hop.reverse and not hop.delta.reversible:
            raise Unsupported("an edge that is not reversible cannot be walked backwards")
    different = (base.digests != target.digests).any(axis=1)
    schema, changed = base.schema, 0

    def pieces() -> Iterator[Piece]:
        nonlocal changed
        streams = [_pieces(hop, schema) for hop in hops]
        merged = heapq.merge(*streams, key=lambda found: found[0])
        last = 0
        for piece_index, piece in workers.map(_add, _by_chunk(merged, schema)):
            if piece is None:
                continue
            if different[last:piece_index].any() or not different[piece_index]:
                raise _mismatch(schema, piece_index)
            last = piece_index + 1
            changed += piece.change.k
            yield piece
        if different[last:].any():
            raise _mismatch(schema, last)

    records = write_pieces(pieces(), writer, workers)
    return Merged(changed, records)


def _mismatch(schema: Schema, index: int) -> FormatError:
    name = schema.name(schema.locate(index)[0])
    return FormatError(f"near tensor {name!r}: the deltas do not lead from the first version to the last")


def _pieces(hop: Hop, schema: Schema) -> Iterator[tuple[int, Difference]]:
    """The hop's chunk indices and how each chunk changes, in order."""
    delta = hop.delta
    for record in range(len(delta)):
        span = delta.span(record)
        change = delta.decode(record)
        for segment, part in zip(delta.segments[span], split(change, delta.lengths[span]), strict=True):
            index = int(schema.chunk_starts[segment["tensor"]]) + int(segment["chunk"])
            if part is not None:
                yield index, negated(part) if hop.reverse else part


def split(change: Difference, lengths: npt.NDArray[np.int64]) -> Iterator[Difference | None]:
    """A record's change as the changes of its segments, whose lengths are given in words; None where nothing changes."""
    ends = np.cumsum(lengths)
    if isinstance(change, Dense):
        for start, stop in zip((ends - lengths).tolist(), ends.tolist(), strict=True):
            yield Dense(change.diff[start:stop], int(np.count_nonzero(change.diff[start:stop])))
        return
    cuts = np.searchsorted(change.at, ends).tolist()
    first = 0
    for start, length, cut in zip((ends - lengths).tolist(), lengths.tolist(), cuts, strict=True):
        at = change.at[first:cut] - np.uint32(start)
        yield Sparse(length, at, change.diff[first:cut]) if cut > first else None
        first = cut


@dataclass(frozen=True, slots=True)
class _Sum:
    index: int
    tensor: int
    chunk: int
    width: int
    changes: list[Difference]


def _by_chunk(found: Iterable[tuple[int, Difference]], schema: Schema) -> Iterator[_Sum]:
    for index, same in groupby(found, key=lambda entry: entry[0]):
        tensor, chunk = schema.locate(index)
        changes = [change for _, change in same]
        widths = {width_of(change) for change in changes}
        if len(widths) > 1:
            raise Unsupported(f"tensor {schema.name(tensor)!r}: the deltas see words of different sizes; diff the ends")
        yield _Sum(index, tensor, chunk, widths.pop(), changes)


def width_of(change: Difference) -> int:
    """Bytes of a word."""
    return change.diff.dtype.itemsize


def _add(work: _Sum) -> tuple[int, Piece | None]:
    total = summed(work.changes)
    if total is None:
        return work.index, None
    return work.index, Piece(work.tensor, work.chunk, work.width, choose(total), total)
