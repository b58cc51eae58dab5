"""Hostile streams: whatever is done to a record, reading it gives a difference within its words or an error of the format."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import zstandard
from factories import KINDS, random_step, random_words
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.codec import Encoded, Mode, Sparse, compare, decode, encode
from weightsync.errors import FormatError, Unsupported

WIDTHS = (1, 2, 4)


@st.composite
def records(draw: st.DrawFn) -> Encoded:
    """A valid record of any mode that has a base."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = random_words(rng, draw(st.integers(1, 40) | st.integers(1, 3000)), draw(st.sampled_from(WIDTHS)))
    density = draw(st.sampled_from([1e-9, 0.002, 0.05, 0.19, 0.21, 0.5, 0.9, 1]))
    change = compare(old, random_step(rng, old, density, draw(st.sampled_from(KINDS))))
    assert change is not None
    modes = [Mode.GAP16, Mode.GAP8] if isinstance(change, Sparse) else [Mode.BITMAP, Mode.DENSE, Mode.PLANES]
    return encode(draw(st.sampled_from(modes)), old.itemsize, [change])


def frame(data: bytes, **options: Any) -> bytes:
    """A zstd frame with unusual parameters."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, **options)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data)


def mutated(draw: st.DrawFn, record: Encoded) -> tuple[Mode, int, int, list[bytes], list[int]]:
    """A record's parts after one hostile change."""
    mode, n, k, coded, raw = record.mode, record.n, record.k, list(record.coded), list(record.raw)
    slot = draw(st.sampled_from([i for i, data in enumerate(coded) if data]))
    data, size, other = coded[slot], raw[slot], draw(st.integers(0, 5))
    match draw(st.integers(0, 10)):
        case 0:
            flipped = bytearray(data)
            for at in draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=4)):
                flipped[at] ^= 1 << draw(st.integers(0, 7))
            coded[slot] = bytes(flipped)
        case 1:
            coded[slot] = data[: draw(st.integers(0, len(data) - 1))]
        case 2:
            coded[slot] = data + draw(st.binary(min_size=1, max_size=9))
        case 3:
            coded[slot], coded[other], raw[slot], raw[other] = coded[other], coded[slot], raw[other], raw[slot]
        case 4:
            raw[slot] = max(0, size + draw(st.sampled_from([-size, -1, 1, 8, 2**32 - 1 - size])))
        case 5:
            n = max(1, n + draw(st.sampled_from([-n // 2, -1, 1, 7])))
        case 6:
            k = max(1, min(n, k + draw(st.sampled_from([-k // 2, -1, 1, 7]))))
        case 7:
            mode = draw(st.sampled_from(list(Mode)))
        case 8:
            filler = bytes([draw(st.integers(0, 255))])
            length = draw(st.sampled_from([0, size, size + 1, size * 1000]))
            options = {"write_content_size": draw(st.booleans()), "write_checksum": draw(st.booleans())}
            coded[slot] = frame(filler * length, window_log=draw(st.sampled_from([10, 20, 27])), **options)
        case 9:
            extra = draw(st.sampled_from([frame(b"x"), b"\x50\x2a\x4d\x18\x04\0\0\0abcd", b"\0"]))
            coded[slot] = data + extra if draw(st.booleans()) else extra + data
        case _:
            coded[slot] = draw(st.binary(max_size=40))
            raw[slot] = draw(st.one_of(st.just(size), st.integers(0, 100)))
    return mode, n, k, coded, raw


def check_hostile(width: int, mode: Mode, n: int, k: int, coded: list[bytes], raw: list[int]) -> None:
    """Decode; hold the outcome, if there is one, to what a `Difference` promises."""
    try:
        change = decode(mode, width, n, k, [memoryview(data) for data in coded], raw)
    except (FormatError, Unsupported):
        return
    assert (change.n, change.diff.dtype) == (n, np.dtype(f"<u{width}"))
    if isinstance(change, Sparse):
        assert len(change.at) == len(change.diff) == k
        assert change.at.dtype == np.uint32
        assert int(change.at[-1]) < n
        assert (np.diff(change.at.astype(np.int64)) > 0).all()
        assert change.diff.all()
    elif mode != Mode.FULL:
        assert change.k == k == np.count_nonzero(change.diff)


@settings(max_examples=2000, deadline=None)
@given(st.data())
def test_mutated_records_are_refused_or_harmless(data: st.DataObject) -> None:
    """Bits flipped, streams cut, lengthened, swapped, replaced by strange frames, counts and modes changed."""
    record = data.draw(records())
    check_hostile(record.width, *mutated(data.draw, record))


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(list(Mode)),
    st.sampled_from(WIDTHS),
    st.integers(1, 40),
    st.integers(1, 40),
    st.lists(st.binary(max_size=50), min_size=6, max_size=6),
)
def test_stored_streams_are_refused_or_harmless(mode: Mode, width: int, n: int, k: int, coded: list[bytes]) -> None:
    """Streams that were never written by `encode`, stored, so that every reader sees them."""
    check_hostile(width, mode, n, min(n, k), coded, [len(data) for data in coded])


@pytest.mark.parametrize(
    ("mode", "width", "n", "k", "coded"),
    [
        (Mode.GAP8, 1, 300, 1, [b"\xff", b"", b"\0"]),  # a skip in place of a position
        (Mode.GAP8, 1, 300, 1, [b"\0\xff", b"", b"\0"]),  # ends in a skip
        (Mode.GAP8, 1, 300, 2, [b"\0\0\0", b"", b"\0"]),  # three positions instead of two
        (Mode.GAP8, 1, 9, 1, [b"\x09", b"", b"\0"]),  # a position beyond the end
        (Mode.GAP16, 2, 9, 1, [b"\0", b"", b"\0"]),  # no high bytes
        (Mode.GAP8, 1, 9, 1, [b"\0", b"", b"\2"]),  # padding of the signs
        (Mode.GAP8, 1, 9, 1, [b"\0", b"", b""]),  # no signs
        (Mode.GAP8, 2, 9, 1, [b"\0", b"", b"\0", b"\0", b"\xff", b"\0\0"]),  # an escape of zero
        (Mode.GAP8, 2, 9, 1, [b"\0", b"", b"\0", b"\0", b"\xff", b""]),  # no escape
        (Mode.GAP8, 2, 9, 1, [b"\0", b"", b"\0", b"", b"", b"\1\1"]),  # an escape of nothing
        (Mode.GAP8, 2, 9, 1, [b"\0", b"", b"\0", b"\0", b"", b""]),  # an exception without magnitude
        (Mode.GAP8, 2, 9, 1, [b"\0", b"", b"\0", b"\1", b"\0", b""]),  # an exception beyond the changes
        (Mode.GAP8, 1, 9, 1, [b"\0", b"", b"\0", b"\0", b"\x7f"]),  # a magnitude of 129 in a byte
        (Mode.GAP8, 1, 9, 1, [b"\0", b"", b"\0", b"\0", b"\xff", b"\1"]),  # an escape in a byte
        (Mode.BITMAP, 1, 4, 2, [b"\x11", b"", b"\0"]),  # padding of the bitmap
        (Mode.BITMAP, 1, 4, 2, [b"\1", b"", b"\0"]),  # one change instead of two
        (Mode.DENSE, 2, 2, 2, [b"\1\xff"]),  # no escape
        (Mode.DENSE, 2, 2, 1, [b"\1\1"]),  # two changes instead of one
        (Mode.DENSE, 2, 2, 2, [b"\1\1\1"]),  # three words instead of two
        (Mode.PLANES, 2, 2, 2, [b"\1\1"]),  # one plane instead of two
        (Mode.FULL, 1, 2, 2, [b"\1\1", b"\1\1"]),  # two planes instead of one
    ],
)
def test_streams_have_one_meaning(mode: Mode, width: int, n: int, k: int, coded: list[bytes]) -> None:
    """What breaks a rule of the format is refused, even where a meaning could be guessed."""
    coded = coded + [b""] * (6 - len(coded))
    with pytest.raises(FormatError):
        decode(mode, width, n, k, [memoryview(data) for data in coded], [len(data) for data in coded])


def refused_cheaply(stream: bytes, size: int, raw: int | None = None) -> None:
    """A full record with this stream is a `FormatError`, and decoding it allocates little beyond the record's size."""
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            decode(Mode.FULL, 1, size, size, [memoryview(stream), *[memoryview(b"")] * 5], [raw or size, *[0] * 5])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("window", [20, 27])
@pytest.mark.parametrize("content_size", [True, False])
def test_bombs_take_no_memory(window: int, content_size: bool) -> None:
    """A small frame that holds two hundred megabytes is refused before they are allocated."""
    bomb = frame(bytes(200 << 20), window_log=window, write_content_size=content_size)
    assert len(bomb) < 100_000
    refused_cheaply(bomb, 100_000)


@pytest.mark.parametrize("claim", [1 << 28, 1 << 33, 1 << 50, (1 << 64) - 3])
def test_frames_that_claim_too_much_are_refused(claim: int) -> None:
    """A frame header with an absurd content size is a damaged stream, not a lack of memory."""
    refused_cheaply(b"\x28\xb5\x2f\xfd\xe0" + claim.to_bytes(8, "little") + b"\x01\0\0", 100)


@pytest.mark.parametrize("raw", [101, 1 << 28, (1 << 32) - 1])
def test_more_than_the_counts_allow_is_not_decompressed(raw: int) -> None:
    """A directory that announces a longer stream than its record can have."""
    refused_cheaply(frame(bytes(100), write_content_size=False), 100, raw)


@pytest.mark.parametrize("extra", [b"\0", frame(b"x", write_content_size=False), b"\x50\x2a\x4d\x18\x04\0\0\0abcd"])
def test_a_stream_is_one_frame(extra: bytes) -> None:
    """Bytes, another frame or a skippable one after or before the frame are refused, the frame alone is taken."""
    good = frame(bytes(100), write_content_size=False)
    none = [memoryview(b"")] * 5
    assert not decode(Mode.FULL, 1, 100, 100, [memoryview(good), *none], [100, *[0] * 5]).diff.any()
    refused_cheaply(good + extra, 100)
    refused_cheaply(extra + good, 100)
