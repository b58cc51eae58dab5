"""The byte streams a record is made of, before compression: gaps, signs, magnitudes, planes.

Each writer has its reader beside it. Readers take untrusted bytes and raise `FormatError` rather than return
something out of range.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.codec.difference import Words
from weightsync.errors import FormatError

Bytes = npt.NDArray[np.uint8]


def gaps(at: npt.NDArray[Any], skip: int) -> npt.NDArray[np.int64]:
    """Tokens (<= skip) for ascending positions: the words between two changes; `skip` itself means "skip so many"."""
    whole = at.astype(np.int64)
    steps = whole.copy()
    steps[1:] -= whole[:-1] + 1
    skips = steps // skip
    if not skips.any():
        return steps
    ends = np.cumsum(skips + 1)
    tokens = np.full(int(ends[-1]), skip, np.int64)
    tokens[ends - 1] = steps - skips * skip
    return tokens


def ungap(tokens: npt.NDArray[np.int64], skip: int, count: int, limit: int) -> npt.NDArray[np.int64]:
    """The `count` positions, all below `limit`, that `gaps` coded."""
    if len(tokens) == count:
        if count and tokens.max() >= skip:
            raise FormatError("gap stream: fewer positions than stated")
        at = np.cumsum(tokens + 1) - 1
    else:
        change = tokens != skip
        if int(np.count_nonzero(change)) != count:
            raise FormatError("gap stream: the number of positions differs from the one stated")
        if not len(tokens) or not change[-1]:
            raise FormatError("gap stream ends in a skip")
        at = (np.cumsum(tokens + change) - 1)[change]
    if count and at[-1] >= limit:
        raise FormatError(f"gap stream: position {int(at[-1])} is beyond the record's {limit} words")
    return at


def planes(words: Words) -> Bytes:
    """The bytes of `words` by significance: all low bytes, then the next."""
    width = words.dtype.itemsize
    little = np.ascontiguousarray(words, words.dtype.newbyteorder("<"))
    return little.view(np.uint8).reshape(-1, width).T.ravel() if width > 1 else little.view(np.uint8).ravel()


def unplanes(parts: list[Bytes], width: int) -> Words:
    """Words of `width` bytes from their planes, lowest first."""
    if width == 1:
        return parts[0]
    out = np.empty((len(parts[0]), width), np.uint8)
    for i, part in enumerate(parts):
        out[:, i] = part
    words: Words = out.view(f"<u{width}").ravel()
    return words


def zigzag(diff: Words) -> Words:
    """Wrapped differences with the sign moved to the lowest bit, so that small ones of either sign are small."""
    kind = diff.dtype.type
    sign = diff >> kind(8 * diff.dtype.itemsize - 1)
    words: Words = (diff << kind(1)) ^ np.negative(sign)
    return words


def unzigzag(words: Words) -> Words:
    """The inverse of `zigzag`."""
    kind = words.dtype.type
    diff: Words = (words >> kind(1)) ^ np.negative(words & kind(1))
    return diff


def values(diff: Words) -> list[Bytes]:
    """Signs, exception gaps, exception magnitudes and escapes of non-zero differences, most of which are +1 or -1.

    An exception has a magnitude of 2 or more; its magnitude is stored less 2 as a byte, 255 for those of 257 and
    more, which follow whole, in byte planes, as escapes.
    """
    kind = diff.dtype.type
    sign = diff >> kind(8 * diff.dtype.itemsize - 1)
    size = np.where(sign != 0, np.negative(diff), diff)
    at = np.flatnonzero(size != 1)
    size = size[at]
    escaped = size >= 257 if diff.dtype.itemsize > 1 else np.zeros(len(size), bool)
    short = (size - kind(2)).astype(np.uint8)
    short[escaped] = 255
    return [
        bits(sign != 0),
        gaps(at, 255).astype(np.uint8),
        short,
        planes(size[escaped]),
    ]


def unvalues(parts: list[Bytes], count: int, width: int) -> Words:
    """The `count` differences that `values` coded into its four streams, none of them zero."""
    signs, skips, short, escapes = parts
    kind: Any = np.dtype(f"<u{width}").type
    diff: Words = np.ones(count, f"<u{width}")
    if len(short):
        at = ungap(skips.astype(np.int64), 255, len(short), count)
        size = short.astype(diff.dtype) + kind(2)
        if width > 1:
            escaped = np.flatnonzero(short == 255)
            if len(escaped) * width != len(escapes):
                raise FormatError("value streams: the number of escapes differs from the one stated")
            whole = unplanes(list(escapes.reshape(width, -1)), width)
            if not whole.all():
                raise FormatError("value streams: an escaped difference is zero")
            size[escaped] = whole
        elif len(escapes) or (short > 126).any():
            raise FormatError("value streams: a magnitude does not fit a byte")
        diff[at] = size
    elif len(skips) or len(escapes):
        raise FormatError("value streams: exceptions without magnitudes")
    sign = unbits(signs, count)
    np.negative(diff, out=diff, where=sign)
    return diff


def bits(mask: npt.NDArray[np.bool_]) -> Bytes:
    """A bit for each entry, lowest bit first."""
    return np.packbits(mask, bitorder="little")


def unbits(stream: Bytes, count: int) -> npt.NDArray[np.bool_]:
    """`count` booleans; the unused bits of the last byte must be zero."""
    if count % 8 and stream[-1] >> (count % 8):
        raise FormatError("bit stream: the padding is not zero")
    return np.unpackbits(stream, count=count, bitorder="little").view(bool)
