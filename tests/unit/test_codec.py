"""The codec: what it finds, that it comes back bit for bit, and that it adds up."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from factories import KINDS, applied, plain_decode, random_step, random_words, same
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.codec import Dense, Difference, Encoded, Mode, Sparse, choose, compare, decode, encode
from weightsync.codec import difference as difference_module
from weightsync.codec.difference import negated, summed
from weightsync.codec.modes import choose_gaps
from weightsync.codec.record import largest_raw

WIDTHS = (1, 2, 4)
SPARSE = (Mode.GAP16, Mode.GAP8)
DENSE = (Mode.BITMAP, Mode.DENSE, Mode.PLANES)
ROUNDS = settings(max_examples=200, deadline=None)
DENSITIES = (0, 1e-9, 0.0005, 0.002, 0.003, 0.05, 0.19, 0.21, 0.5, 0.79, 0.81, 0.95, 1)


@st.composite
def words(draw: st.DrawFn, most: int = 20_000) -> tuple[np.random.Generator, Any]:
    """A generator and some words."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.one_of(st.integers(1, 40), st.integers(1, most), st.integers(most // 2, most)))
    return rng, random_words(rng, n, draw(st.sampled_from(WIDTHS)))


@st.composite
def pairs(draw: st.DrawFn, most: int = 20_000) -> tuple[Any, Any]:
    """Words before and after a step."""
    rng, old = draw(words(most))
    return old, random_step(rng, old, draw(st.sampled_from(DENSITIES)), draw(st.sampled_from(KINDS)))


@st.composite
def chains(draw: st.DrawFn, steps: int) -> list[Any]:
    """The same words after each of several steps, some of which lead back to where an earlier one was."""
    rng, old = draw(words())
    chain = [old]
    for _ in range(steps):
        back = draw(st.integers(0, 5)) == 0
        density, kind = draw(st.sampled_from(DENSITIES[1:])), draw(st.sampled_from(KINDS))
        chain.append(chain[rng.integers(len(chain))] if back else random_step(rng, chain[-1], density, kind))
    return chain


def back(record: Encoded) -> Difference:
    """What `decode` makes of a record."""
    return decode(record.mode, record.width, record.n, record.k, [memoryview(c) for c in record.coded], record.raw)


def at_positions(n: int, at: list[int], width: int = 2, diff: int = 1) -> Sparse:
    """One and the same difference at the given positions."""
    return Sparse(n, np.array(at, np.uint32), np.full(len(at), diff, f"<u{width}"))


def modes_of(change: Difference) -> tuple[Mode, ...]:
    """The modes that can code a difference of this form."""
    return SPARSE if isinstance(change, Sparse) else DENSE


@ROUNDS
@given(pairs())
def test_compare_finds_exactly_the_different_positions(pair: tuple[Any, Any]) -> None:
    """Positions, differences, count and form are those of a plain comparison of integers."""
    old, new = pair
    change, different = compare(old, new), np.flatnonzero(old != new)
    if change is None:
        assert not len(different)
        return
    assert change.n == len(old)
    assert change.k == len(different)
    assert isinstance(change, Sparse) == (len(different) * 5 <= len(old))
    assert np.array_equal(applied(old, change), new)
    if isinstance(change, Sparse):
        assert np.array_equal(change.at, different)
        assert change.diff.all()


@pytest.mark.parametrize(("old", "new"), [(0x0000, 0x8000), (0x7FC1, 0x7FC2), (0x7FC0, 0xFFC0), (0x7F80, 0x7F81)])
def test_compare_sees_what_floats_hide(old: int, new: int) -> None:
    """Signed zeros and NaN payloads are different words, and equal NaNs are equal words."""
    before, after = np.full(1000, old, "<u2"), np.full(1000, old, "<u2")
    assert compare(before, after) is None
    after[[0, 999]] = new
    change = compare(before, after)
    assert isinstance(change, Sparse)
    assert change.at.tolist() == [0, 999]


@ROUNDS
@given(pairs(2000), st.sampled_from([1, 7, 64, 1000]))
def test_the_blocks_of_compare_do_not_show(pair: tuple[Any, Any], block: int) -> None:
    """The outcome is the same wherever the borders of the blocks fall."""
    expected = compare(*pair)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(difference_module, "BLOCK", block)
        assert same(compare(*pair), expected)


@ROUNDS
@given(pairs())
def test_every_mode_comes_back(pair: tuple[Any, Any]) -> None:
    """decode(encode(x)) == x in every mode that can hold x, and no stream is longer than announced."""
    old, new = pair
    whole = encode(Mode.FULL, old.itemsize, [Dense(new, len(new))])
    assert np.array_equal(back(whole).diff, new)
    change = compare(old, new)
    for mode in modes_of(change) if change else ():
        record = encode(mode, old.itemsize, [change])
        assert same(back(record), change)
        assert (record.mode, record.n, record.k) == (mode, change.n, change.k)
        assert record.bytes == sum(map(len, record.coded))
        limits = largest_raw(mode, record.width, change.n, change.k)
        for coded, raw, most in zip(record.coded, record.raw, limits, strict=True):
            assert len(coded) <= raw <= most


@ROUNDS
@given(pairs(600), st.integers(0, 70_000))
def test_streams_are_what_the_format_says(pair: tuple[Any, Any], gap: int) -> None:
    """Another decoder, written from the text of the format, finds the same differences."""
    old, new = (np.concatenate([words[:1], np.zeros(gap, words.dtype), words[1:]]) for words in pair)
    change = compare(old, new)
    for mode in modes_of(change) if change else ():
        assert np.array_equal(np.array(plain_decode(encode(mode, old.itemsize, [change])), old.dtype), new - old)
    assert plain_decode(encode(Mode.FULL, old.itemsize, [Dense(pair[1], len(pair[1]))])) == pair[1].tolist()


@pytest.mark.parametrize(
    ("mode", "n", "diff", "slots"),
    [
        (Mode.GAP8, 600, {0: 1, 255: -256, 511: 257}, [b"\0\xfe\xff\0", b"", b"\2", b"\1\0", b"\xfe\xff", b"\1\1"]),
        (Mode.GAP16, 70_000, {1: -1, 65536: 2, 65540: 1}, [b"\1\xfe\3", b"\0\xff\0", b"\1", b"\1", b"\0", b""]),
        (Mode.GAP16, 70_000, {65535: 1}, [b"\xff\0", b"\xff\0", b"\0", b"", b"", b""]),
        (Mode.BITMAP, 12, {0: 1, 2: -1, 9: 0x8000}, [b"\5\2", b"", b"\6", b"\2", b"\xff", b"\0\x80"]),
        (Mode.DENSE, 6, {0: 1, 1: -1, 2: 127, 3: -128, 4: 128}, [b"\2\1\xfe\xff\xff\0", b"", b"", b"", b"", b"\xff\0\0\1"]),
        (Mode.PLANES, 4, {0: 1, 1: -1, 2: 128}, [b"\2\1\0\0", b"\0\0\1\0", b"", b"", b"", b""]),
        (Mode.FULL, 4, {0: 1, 1: -1, 2: 128}, [b"\1\xff\x80\0", b"\0\xff\0\0", b"", b"", b"", b""]),
    ],
)  # fmt: skip
def test_streams_byte_for_byte(mode: Mode, n: int, diff: dict[int, int], slots: list[bytes]) -> None:
    """Short streams are stored, so the bytes of each slot are those that can be worked out by hand."""
    words = np.zeros(n, "<u2")
    words[list(diff)] = np.array(list(diff.values())).astype("<u2")
    at = np.array(list(diff), np.uint32)
    change = Sparse(n, at, words[at]) if mode in SPARSE else Dense(words, len(at))
    record = encode(mode, 2, [change])
    assert list(record.coded) == slots
    assert list(record.raw) == [len(slot) for slot in slots]


def test_short_streams_and_signs_are_stored() -> None:
    """Streams of 32 bytes and more are compressed where that is shorter, shorter ones and signs never."""
    for n, stored in ((31, True), (32, False)):
        assert (len(encode(Mode.FULL, 1, [Dense(np.zeros(n, np.uint8), n)]).coded[0]) == n) == stored
    signs = encode(Mode.BITMAP, 2, [Dense(np.ones(8000, "<u2"), 8000)])
    assert len(signs.coded[2]) == signs.raw[2] == 1000
    assert len(signs.coded[0]) < 100
    noise = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
    assert encode(Mode.FULL, 1, [Dense(noise, 5000)]).coded[0] == noise.tobytes()


@ROUNDS
@given(st.lists(pairs(2000), min_size=2, max_size=5), st.sampled_from(WIDTHS))
def test_parts_lie_end_to_end(parts: list[tuple[Any, Any]], width: int) -> None:
    """A record of several parts of one form is the record of their concatenation."""
    cut = [(old.astype(f"<u{width}"), new.astype(f"<u{width}")) for old, new in parts]
    for kind in (Sparse, Dense):
        changes = [change for pair in cut if isinstance(change := compare(*pair), kind)]
        if not changes:
            continue
        one = np.concatenate([applied(np.zeros(change.n, f"<u{width}"), change) for change in changes])
        for mode in modes_of(changes[0]):
            record = encode(mode, width, changes)
            assert record.k == sum(change.k for change in changes)
            assert np.array_equal(applied(np.zeros_like(one), back(record)), one)


@pytest.mark.parametrize("mode", SPARSE)
@pytest.mark.parametrize(
    "at",
    [
        [0], [1], [253], [254], [255], [256], [509], [510], [511], [65534], [65535], [65536], [131069], [131070],
        [199_999], [0, 199_999], [0, 255, 511], [0, 256, 512], [0, 65535], [0, 65536], [0, 65537], [3, 65539, 131074],
    ],
)  # fmt: skip
def test_long_gaps_come_back(mode: Mode, at: list[int]) -> None:
    """First and last positions, and gaps at and around what one token can say."""
    change = at_positions(200_000, at)
    assert same(back(encode(mode, 2, [change])), change)
    tight = at_positions(at[-1] + 1, at)
    assert same(back(encode(mode, 2, [tight])), tight)


@pytest.mark.parametrize("width", WIDTHS)
def test_boundary_magnitudes_come_back(width: int) -> None:
    """Differences where a coding changes its form, of either sign, up to the one that is its own negative."""
    top = 1 << 8 * width
    sizes = [1, 2, 3, 126, 127, 128, 129, 254, 255, 256, 257, 258, 511, 512, 0x7FFF, 0x8000, 0x8001, top // 2]
    diff = np.array([d for size in sizes if size % top for d in (size % top, top - size % top)], f"<u{width}")
    assert same(back(encode(Mode.BITMAP, width, [Dense(diff, len(diff))])), Dense(diff, len(diff)))
    for mode in (Mode.DENSE, Mode.PLANES):
        padded = np.append(diff, np.zeros(3, diff.dtype))
        assert same(back(encode(mode, width, [Dense(padded, len(diff))])), Dense(padded, len(diff)))
    for mode in SPARSE:
        change = Sparse(len(diff) * 10, np.arange(3, len(diff) * 10, 10, dtype=np.uint32), diff)
        assert same(back(encode(mode, width, [change])), change)
    for alone in (at_positions(9, [8], width, int(one)) for one in diff):
        assert same(back(encode(Mode.GAP8, width, [alone])), alone)


@pytest.mark.parametrize(
    ("n", "width", "density", "kind"),
    [
        (20_000_000, 2, 0.001, "ulp"),
        (20_000_000, 2, 0.02, "mixed"),
        (4_000_000, 4, 0.9, "ulp"),
        (4_000_000, 1, 0.5, "wide"),
        (2_000_000, 4, 1, "wide"),
    ],
)
def test_large_records_come_back(n: int, width: int, density: float, kind: str) -> None:
    """Millions of words in the mode that is chosen for them."""
    rng = np.random.default_rng(n + width)
    old = rng.integers(0, 1 << 8 * width, n, f"u{width}")
    new = random_step(rng, old, density, kind)
    change = compare(old, new)
    assert change is not None
    assert np.array_equal(applied(old, change), new)
    assert same(back(encode(choose(change), width, [change])), change)
    assert compare(old, old.copy()) is None


@ROUNDS
@given(chains(steps=3))
def test_sums_are_what_compare_finds(chain: list[Any]) -> None:
    """Two or three steps add up to the direct comparison, in content and form, however they are grouped."""
    direct = compare(chain[0], chain[-1])
    steps = [change for one, two in pairwise(chain) if (change := compare(one, two))]
    if not steps:
        assert direct is None
        return
    assert same(summed(steps), direct)
    for cut in range(1, len(steps)):
        grouped = [part for part in (summed(steps[:cut]), summed(steps[cut:])) if part is not None]
        assert same(summed(grouped) if grouped else None, direct)


@ROUNDS
@given(pairs())
def test_negated_undoes(pair: tuple[Any, Any]) -> None:
    """The negated difference is the one found the other way round, and both cancel out."""
    change, reverse = compare(*pair), compare(*reversed(pair))
    assert (change is None) == (reverse is None)
    if change is not None:
        assert same(negated(change), reverse)
        assert same(negated(negated(change)), change)
        assert summed([change, negated(change)]) is None


@pytest.mark.parametrize(
    ("n", "k", "mode"),
    [
        (400, 1, Mode.GAP8), (401, 1, Mode.GAP16), (4000, 10, Mode.GAP8), (4001, 10, Mode.GAP16),
        (5, 1, Mode.GAP8), (4, 1, Mode.BITMAP), (1000, 200, Mode.GAP8), (1000, 201, Mode.BITMAP),
        (5, 4, Mode.BITMAP), (1000, 800, Mode.BITMAP), (1000, 801, Mode.DENSE), (1, 1, Mode.DENSE),
    ],
)  # fmt: skip
def test_modes_change_at_their_thresholds(n: int, k: int, mode: Mode) -> None:
    """The counts alone decide, exactly at the documented fractions."""
    old, new = np.zeros(n, "<u2"), np.zeros(n, "<u2")
    for at in (slice(k), slice(n - k, n)):
        new[:] = 0
        new[at] = 1
        change = compare(old, new)
        assert change is not None
        assert choose(change) == mode


@pytest.mark.parametrize(
    ("width", "diff", "wide", "mode"),
    [
        (2, 127, 0, Mode.DENSE), (2, -127, 0, Mode.DENSE), (2, 128, 100, Mode.DENSE), (2, 128, 101, Mode.PLANES),
        (2, -128, 100, Mode.DENSE), (2, -128, 101, Mode.PLANES), (4, 127, 0, Mode.DENSE), (4, 1 << 31, 101, Mode.PLANES),
        (1, 1, 0, Mode.PLANES), (1, 128, 800, Mode.PLANES),
    ],
)  # fmt: skip
def test_wide_differences_go_into_planes(width: int, diff: int, wide: int, mode: Mode) -> None:
    """More than one in eight words beyond ±127 tip the scale, and words of one byte always go there."""
    words = np.ones(800, f"<u{width}")
    words[: wide or 1] = diff % (1 << 8 * width)
    assert choose(Dense(words, 800)) == mode
    assert choose(Dense(words[::-1], 800)) == mode


@ROUNDS
@given(pairs(5000), st.integers(0, 2**32 - 1))
def test_choice_does_not_depend_on_where_changes_are(pair: tuple[Any, Any], seed: int) -> None:
    """Any order of the same words gives the same mode, and nothing but n and k matters to the sparse ones."""
    order = np.random.default_rng(seed).permutation(len(pair[0]))
    one, two = compare(*pair), compare(pair[0][order], pair[1][order])
    if one is not None and two is not None:
        assert choose(one) == choose(two)
        assert not isinstance(one, Sparse) or choose(one) == choose_gaps(one.n, one.k)
