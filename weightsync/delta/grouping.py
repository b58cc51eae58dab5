"""Which chunks share a record, and getting records written in order by several threads.

Consecutive changed chunks of equal mode and word size join until the record is worth its framing; the two gap modes
count as one here, and the group's own counts decide between them. The rule looks at counts only, so that every
publisher of the same change writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weightsync.codec import GROUP_CHANGES, GROUP_WORDS, Difference, Encoded, Mode, encode
from weightsync.codec.modes import GAPS, GROUP_SEGMENTS, choose_gaps, counts_words
from weightsync.delta.writer import DeltaWriter
from weightsync.parallel import Workers


@dataclass(frozen=True, slots=True)
class Piece:
    """What happened to one chunk: where it is, the width of its words in bytes, and how they changed."""

    tensor: int
    chunk: int
    width: int
    mode: Mode
    change: Difference


def grouped(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """The pieces, in order, as the records that hold them."""
    group: list[Piece] = []
    weight = words = 0
    for piece in pieces:
        alike = group and (_family(group[0].mode), group[0].width) == (_family(piece.mode), piece.width)
        if group and not (alike and words + piece.change.n <= GROUP_WORDS and len(group) < GROUP_SEGMENTS):
            yield group
            group, weight, words = [], 0, 0
        group.append(piece)
        words += piece.change.n
        weight += piece.change.n if counts_words(piece.mode) else piece.change.k
        if weight >= GROUP_CHANGES:
            yield group
            group, weight, words = [], 0, 0
    if group:
        yield group


def write_pieces(pieces: Iterable[Piece], writer: DeltaWriter, workers: Workers) -> int:
    """Code the pieces and append their records; returns the number of records."""
    records = 0
    for record, segments in workers.map(_encode, grouped(pieces)):
        writer.add(record, segments)
        records += 1
    return records


def _family(mode: Mode) -> Mode:
    return Mode.GAP8 if mode in GAPS else mode


def _encode(group: list[Piece]) -> tuple[Encoded, list[tuple[int, int]]]:
    mode, changes = group[0].mode, [piece.change for piece in group]
    if mode in GAPS:
        mode = choose_gaps(sum(change.n for change in changes), sum(change.k for change in changes))
    record = encode(mode, group[0].width, changes)
    return record, [(piece.tensor, piece.chunk) for piece in group]
