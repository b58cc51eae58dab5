"""Which of the codings of a record is used, decided from counts alone.

No trial compression: the crossovers were measured once on real training steps (docs/format.md names them), and
integer arithmetic makes every implementation and every number of threads decide alike.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from weightsync.codec.difference import Difference, Sparse

STREAMS = 6
"""Stream slots of a record; which mean what is up to its mode."""

GROUP_CHANGES = 4096
"""Consecutive chunks of equal mode and word size join one record until it holds this many changes (dense: words)."""

GROUP_WORDS = 1 << 30
"""A record never holds more words than this, so that positions fit 32 bits with room."""

GROUP_SEGMENTS = 1 << 16
"""A record never holds more segments than this."""


class Mode(IntEnum):
    """How one record is coded; the number is the `mode` byte of the format."""

    GAP16 = 1
    """Gaps between changes as two byte planes, for fewer than 1 change in 400 words."""
    GAP8 = 2
    """Gaps as bytes with an escape, up to 1 change in 5."""
    BITMAP = 3
    """A bit for each word, up to 4 in 5."""
    DENSE = 4
    """A byte for each word, differences that do not fit in a list: above 4 in 5, mostly small differences."""
    PLANES = 5
    """Byte planes of the differences: above 4 in 5, wide differences."""
    FULL = 6
    """Byte planes of the words themselves; needs no base."""
    CLASSES = 7
    """Positions as ranks inside magnitude classes of the old value. Reserved: `requires: classes`."""


GAPS = (Mode.GAP16, Mode.GAP8)
"""The modes that list positions."""


def choose(change: Difference) -> Mode:
    """The mode for the differences of one chunk."""
    n, k = change.n, change.k
    if isinstance(change, Sparse):
        return choose_gaps(n, k)
    if k * 5 <= n * 4:
        return Mode.BITMAP
    width = change.diff.dtype.itemsize
    if width == 1:
        return Mode.PLANES
    # a zigzag of 254 or less is a wrapped difference of -127..127: shifted by 127, below 255
    small = np.count_nonzero((change.diff + change.diff.dtype.type(127)) < 255)
    return Mode.DENSE if (n - small) * 8 <= n else Mode.PLANES


def choose_gaps(n: int, k: int) -> Mode:
    """Which of the two gap modes suits k changes among n words: the bytes' escapes cost more above a mean gap of 400."""
    return Mode.GAP16 if k * 400 < n else Mode.GAP8


def largest(mode: Mode, chunk: int) -> tuple[int, int]:
    """The most words and the most changes that grouping puts into a record, of chunks of up to `chunk` words.

    Readers refuse more: it is what bounds the memory that a hostile record can ask for.
    """
    if mode in GAPS:
        return GROUP_WORDS, GROUP_CHANGES + chunk // 5
    words = (GROUP_CHANGES if counts_words(mode) else 5 * GROUP_CHANGES) + chunk
    return words, words


def reversible(mode: Mode) -> bool:
    """Whether a record of this mode also leads back."""
    return mode not in (Mode.FULL, Mode.CLASSES)


def counts_words(mode: Mode) -> bool:
    """Whether a group in this mode fills up by words rather than by changes."""
    return mode in (Mode.DENSE, Mode.PLANES, Mode.FULL)
