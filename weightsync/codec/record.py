"""One record: the differences of its segments as compressed streams, and back.

A record knows words, not tensors: its segments lie end to end and positions count from the first. Every stream is
zstd level 1 (higher levels gain nothing on these streams and cost speed), or stored when that is not smaller. Each
stream's raw length is bounded by the record's counts and checked before anything is decompressed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from weightsync.codec import streams as st
from weightsync.codec.difference import Dense, Difference, Sparse, Words
from weightsync.codec.modes import STREAMS, Mode
from weightsync.errors import FormatError, Unsupported

LEVEL = 1
MAX_WINDOW = 8 << 20  # what a hostile frame may make the decompressor allocate
SKIPS = {Mode.GAP8: 255, Mode.GAP16: 65535}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A coded record: `n` words, `k` changed, and for each of the six stream slots its coded bytes and raw length."""

    mode: Mode
    width: int
    n: int
    k: int
    coded: tuple[bytes, ...]
    raw: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Length of all coded streams."""
        return sum(map(len, self.coded))


class _Coders(threading.local):
    """zstd contexts are not safe to share between threads and dear to make."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=False, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)


_coders = _Coders()


def encode(mode: Mode, width: int, parts: Sequence[Difference]) -> Encoded:
    """Code the differences of consecutive segments, all of one mode and of words of `width` bytes.

    For `Mode.FULL` a part is a `Dense` whose differences are the words themselves.
    """
    n, k = sum(part.n for part in parts), sum(part.k for part in parts)
    slots: list[st.Bytes] = [np.empty(0, np.uint8)] * STREAMS
    stored: frozenset[int] = frozenset()
    if mode in SKIPS:
        starts = np.cumsum([0] + [part.n for part in parts[:-1]])
        sparse = [part for part in parts if isinstance(part, Sparse)]
        at = np.concatenate([part.at + np.int64(start) for part, start in zip(sparse, starts, strict=True)])
        tokens = st.gaps(at, SKIPS[mode])
        slots[0] = tokens.astype(np.uint8)
        if mode == Mode.GAP16:
            slots[1] = (tokens >> 8).astype(np.uint8)
        slots[2:6] = st.values(np.concatenate([part.diff for part in sparse]))
        stored = frozenset({2})
    else:
        dense = [part.diff for part in parts if isinstance(part, Dense)]
        diff = dense[0] if len(dense) == 1 else np.concatenate(dense)
        if mode == Mode.BITMAP:
            changed = diff != 0
            slots[0] = st.bits(changed)
            slots[2:6] = st.values(diff[changed])
            stored = frozenset({2})
        elif mode == Mode.DENSE:
            short = st.zigzag(diff)
            escaped = short >= 255
            slots[5] = st.planes(short[escaped])
            slots[0] = np.minimum(short, short.dtype.type(255)).astype(np.uint8)
        else:
            flat = st.planes(st.zigzag(diff) if mode == Mode.PLANES else diff)
            slots[:width] = list(flat.reshape(width, -1))
    raw = tuple(len(slot) for slot in slots)
    coded = tuple(_compress(slot, i in stored) for i, slot in enumerate(slots))
    return Encoded(mode, width, n, k, coded, raw)


def largest_raw(mode: Mode, width: int, n: Any, k: Any) -> tuple[Any, ...]:
    """The most bytes that each stream of a record with these counts (or columns of counts) can have uncompressed."""
    none = 0 * n
    values = (-(-k // 8), k + k // 255, k, k * width)
    if mode in SKIPS:
        tokens = k + n // SKIPS[mode]
        return (tokens, tokens if mode == Mode.GAP16 else none, *values)
    if mode == Mode.BITMAP:
        return (-(-n // 8), none, *values)
    if mode == Mode.DENSE:
        return (n, none, none, none, none, n * width)
    return (*[n] * width, *[none] * (STREAMS - width))


def undo_bytes(mode: Mode, width: int, n: int, k: int) -> int:
    """Bytes of the old words that a record overwrites."""
    return (k if mode in SKIPS else n) * width


def decode(mode: Mode, width: int, n: int, k: int, coded: Sequence[memoryview], raw: Sequence[int]) -> Difference:
    """The differences of a whole record from untrusted streams; counts must have been checked against the segments.

    Sparse modes give a `Sparse`, all others a `Dense`. Raises `FormatError`.
    """
    limits = largest_raw(mode, width, n, k)
    for i, (data, size, limit) in enumerate(zip(coded, raw, limits, strict=True)):
        if size > limit or len(data) > size:
            raise FormatError(f"stream {i} claims {size} bytes from {len(data)}, at most {limit} are possible")
    parts = [_decompress(data, size) for data, size in zip(coded, raw, strict=True)]
    if mode in SKIPS:
        return _decode_gaps(mode, width, n, k, parts)
    if mode == Mode.BITMAP:
        _expect(parts[0], -(-n // 8))
        changed = st.unbits(parts[0], n)
        if int(np.count_nonzero(changed)) != k:
            raise FormatError("bitmap: the number of changes differs from the one stated")
        diff: Words = np.zeros(n, f"<u{width}")
        diff[changed] = _unvalues(parts, k, width)
        return Dense(diff, k)
    if mode == Mode.CLASSES:
        raise Unsupported("this record needs the feature 'classes'; use a newer version of weightsync")
    if mode == Mode.DENSE:
        diff = _decode_dense(width, n, parts)
    else:
        for part in parts[:width]:
            _expect(part, n)
        diff = st.unplanes(parts[:width], width)
        if mode == Mode.FULL:
            return Dense(diff, n)
        diff = st.unzigzag(diff)
    whole = Dense(diff, int(np.count_nonzero(diff)))
    if whole.k != k:
        raise FormatError("dense record: the number of changes differs from the one stated")
    return whole


def _decode_gaps(mode: Mode, width: int, n: int, k: int, parts: Sequence[st.Bytes]) -> Sparse:
    tokens = parts[0].astype(np.int64)
    if mode == Mode.GAP16:
        _expect(parts[1], len(parts[0]))
        tokens |= parts[1].astype(np.int64) << 8
    at = st.ungap(tokens, SKIPS[mode], k, n).astype(np.uint32)
    return Sparse(n, at, _unvalues(parts, k, width))


def _unvalues(parts: Sequence[st.Bytes], k: int, width: int) -> Words:
    _expect(parts[2], -(-k // 8))
    return st.unvalues(list(parts[2:6]), k, width)


def _decode_dense(width: int, n: int, parts: Sequence[st.Bytes]) -> Words:
    _expect(parts[0], n)
    short: Words = parts[0].astype(f"<u{width}")
    escaped = np.flatnonzero(parts[0] == 255)
    if len(escaped) * width != len(parts[5]):
        raise FormatError("dense record: the number of escapes differs from the one stated")
    if len(escaped):
        short[escaped] = st.unplanes(list(parts[5].reshape(width, -1)), width)
    return st.unzigzag(short)


def _expect(part: st.Bytes, length: int) -> None:
    if len(part) != length:
        raise FormatError(f"a stream has {len(part)} bytes, expected {length}")


def _compress(stream: st.Bytes, store: bool) -> bytes:
    if store or len(stream) < 32:
        return stream.tobytes()
    coded = _coders.compressor.compress(stream.data)
    return coded if len(coded) < len(stream) else stream.tobytes()


def _decompress(data: memoryview, size: int) -> st.Bytes:
    if len(data) == size:
        return np.frombuffer(data, np.uint8)
    try:
        if zstandard.get_frame_parameters(data).content_size != zstandard.CONTENTSIZE_UNKNOWN:
            raise FormatError("a compressed stream claims a size of its own")  # the library would allocate that much
        out = _coders.decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise FormatError(f"a compressed stream is damaged: {e}") from e
    _expect(np.frombuffer(out, np.uint8), size)
    return np.frombuffer(out, np.uint8)
