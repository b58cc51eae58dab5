"""A reader takes the size of words from the record: writer and reader need not know the same element types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from weightsync.bundle import Bundle, describe
from weightsync.checkpoint import Checkpoint
from weightsync.codec import GROUP_CHANGES, Mode, Sparse, compare, encode
from weightsync.codec.modes import GROUP_SEGMENTS
from weightsync.delta.apply import apply
from weightsync.delta.make import make_delta, make_merge
from weightsync.delta.reader import Delta
from weightsync.delta.step import Step
from weightsync.delta.writer import DeltaWriter
from weightsync.digests import of_checkpoint
from weightsync.errors import FormatError, Unsupported
from weightsync.manifest import Edge
from weightsync.parallel import Workers
from weightsync.schema import Schema

WORDS = 999


def checkpoint(path: Path, values: np.ndarray) -> Checkpoint:
    """One tensor of 16-bit words."""
    header = b'{"t":{"dtype":"BF16","shape":[999],"data_offsets":[0,1998]}}'
    path.mkdir()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    return Checkpoint.open(path)


def as_words(folder: Path, old: Checkpoint, new: Checkpoint, width: int) -> Bundle:
    """A delta by a writer that takes the tensor for words of `width` bytes."""
    change = compare(old.words(0, 0, width), new.words(0, 0, width))
    assert isinstance(change, Sparse)
    bundle = Bundle(folder)
    with DeltaWriter(bundle.data_folder) as writer:
        writer.add(encode(Mode.GAP8, width, [change]), [(0, 0)])
        files = writer.finish()
    with Workers(1) as workers:
        (base, one), (target, two) = (describe(c, of_checkpoint(c, workers), "m") for c in (old, new))
    bundle.put_version(base, one)
    bundle.put_version(target, two)
    bundle.put_edge(Edge("Delta", base.end, target.end, tuple(files), change.k, True))
    return bundle


def steps_of(count: int) -> list[np.ndarray]:
    """Values of consecutive checkpoints."""
    rng = np.random.default_rng(1)
    found = [rng.integers(0, 1 << 16, WORDS, np.uint16)]
    for _ in range(count):
        new = found[-1].copy()
        new[rng.choice(WORDS, 20, replace=False)] += np.uint16(300)
        found.append(new)
    return found


@pytest.mark.parametrize("width", [1, 2])
def test_another_width_leads_both_ways(tmp_path: Path, width: int) -> None:
    """Bytes or words, the same checkpoint comes out, forward and back."""
    old, new = (checkpoint(tmp_path / name, values) for name, values in zip(("a", "b"), steps_of(1), strict=True))
    bundle = as_words(tmp_path / "d", old, new, width)
    del old
    before = (tmp_path / "a" / "model.safetensors").read_bytes()
    with Workers(1) as workers:
        apply(tmp_path / "a", [Step.open(bundle)], workers)
        assert (tmp_path / "a" / "model.safetensors").read_bytes() == (
            tmp_path / "b" / "model.safetensors"
        ).read_bytes()
        apply(tmp_path / "a", [Step.open(bundle, reverse=True)], workers)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == before


def test_a_width_that_does_not_divide_the_chunk(tmp_path: Path) -> None:
    """1,998 bytes are no whole number of 4-byte words."""
    schema = Schema.build([("t", "BF16", [WORDS], 2 * WORDS)])
    with DeltaWriter(tmp_path) as writer:
        change = Sparse(499, np.array([3], np.uint32), np.array([1], np.uint32))
        writer.add(encode(Mode.GAP8, 4, [change]), [(0, 0)])
        (file,) = writer.finish()
    with pytest.raises(FormatError, match="does not divide"):
        Delta.open([tmp_path / f"{file.sha256}.safetensors"], schema)


def test_deltas_of_different_widths_do_not_merge(tmp_path: Path) -> None:
    """Differences of bytes and of words do not add up: refused, with what to do instead."""
    a, b, c = (checkpoint(tmp_path / name, values) for name, values in zip("abc", steps_of(2), strict=True))
    first = as_words(tmp_path / "first", a, b, 1)
    second = Bundle(tmp_path / "second")
    with Workers(1) as workers:
        make_delta(b, c, second, workers, model="m")
        with pytest.raises(Unsupported, match="diff the ends"):
            make_merge([Step.open(first), Step.open(second)], Bundle(tmp_path / "merged"), workers)


def test_more_segments_than_any_record_has(tmp_path: Path) -> None:
    """A record of more chunks than grouping puts into one is refused."""
    count = GROUP_SEGMENTS + 1
    assert count > GROUP_CHANGES
    schema = Schema.build([(f"{i:06}", "U8", [10], 10) for i in range(count)])
    parts = [Sparse(10, np.empty(0, np.uint32), np.empty(0, np.uint8)) for _ in range(count - 1)]
    last = Sparse(10, np.array([0], np.uint32), np.array([1], np.uint8))
    for segments, fits in ((GROUP_SEGMENTS, True), (count, False)):
        folder = tmp_path / str(segments)
        with DeltaWriter(folder) as writer:
            writer.add(encode(Mode.GAP16, 1, [*parts[: segments - 1], last]), [(i, 0) for i in range(segments)])
            (file,) = writer.finish()
        path = folder / f"{file.sha256}.safetensors"
        if fits:
            assert len(Delta.open([path], schema)) == 1
            continue
        with pytest.raises(FormatError, match="more than 65536 segments"):
            Delta.open([path], schema)
