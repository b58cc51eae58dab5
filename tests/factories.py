"""Small checkpoints written by hand, steps between them, and edges made of them: input for tests.

Headers are written without the safetensors library and without padding, so that tensors lie at odd addresses and
types exist that the library does not know.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import zstandard

from weightsync import checkpoint, digests, schema
from weightsync.bundle import Bundle
from weightsync.checkpoint import Checkpoint
from weightsync.codec import Dense, Difference, Encoded, Mode, Sparse
from weightsync.codec.difference import negated
from weightsync.delta import reader
from weightsync.delta.format import HEADER_BYTES, RECORD, SEGMENT, SHARD_BYTES, Header
from weightsync.delta.make import Made, make_delta, make_full, make_merge
from weightsync.delta.merge import split
from weightsync.delta.reader import Delta
from weightsync.delta.step import Step
from weightsync.dtypes import BITS, word_bytes
from weightsync.errors import FormatError, Unsupported
from weightsync.parallel import Workers
from weightsync.schema import Schema

Tensors: TypeAlias = Mapping[str, tuple[str, Sequence[int], bytes]]
"""Name to (dtype string, shape, bytes)."""

DENSITIES = (0, 0.001, 0.002, 0.01, 0.1, 0.19, 0.3, 0.7, 0.9, 1)
"""Shares of changed words that bring every mode about."""

KINDS = ("ulp", "wide", "sign", "nan", "zero", "edges", "mixed")
"""What `random_step` can do to the words it changes."""

SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where tests make thousands of small files: syncing them costs nothing in memory."""

MODEL: dict[str, tuple[str, tuple[int, ...]]] = {
    "bool": ("BOOL", (7,)),
    "bf16.matrix": ("BF16", (123, 41)),
    "bf16.vector": ("BF16", (6001,)),
    "empty": ("F32", (0, 4)),
    "f16": ("F16", (513,)),
    "f32": ("F32", (4097,)),
    "f4": ("F4", (3, 6)),
    "f6": ("F6_E2M3", (4, 2)),
    "f64": ("F64", (77,)),
    "fp8": ("F8_E4M3", (5000,)),
    "i64": ("I64", (3, 3)),
    "later": ("X13", (9,)),
    "scalar": ("F32", ()),
    "u8": ("U8", (1001,)),
    "ünïcode": ("BF16", (2,)),
}
"""A tensor of every kind: 1, 2, 4 and 8 bytes, less than one, an unknown type, a scalar and an empty one."""


MANY = {f"t{i:02d}": (dtype, (1500 + i,)) for i, dtype in enumerate(["BF16", "U8", "F32", "F16"] * 8)}
"""Tensors of which no two share a record once all their words change."""


def header_of(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """The JSON text of a safetensors header, tensors in the given order, not padded."""
    document: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def file_bytes(header: bytes, body: bytes = b"") -> bytes:
    """A safetensors file of any header text and any data."""
    return struct.pack("<Q", len(header)) + header + body


def write_file(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> Path:
    """Write one safetensors file."""
    path.write_bytes(file_bytes(header_of(tensors, metadata), b"".join(data for _, _, data in tensors.values())))
    return path


def write_checkpoint(
    path: Path,
    tensors: Tensors,
    shards: int = 1,
    metadata: Mapping[str, str] | None = None,
    assets: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a checkpoint directory: `model.safetensors`, or that many files and an index."""
    path.mkdir(parents=True)
    if shards == 1:
        write_file(path / "model.safetensors", tensors, metadata)
    else:
        names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        place = {tensor: names[i % shards] for i, tensor in enumerate(tensors)}
        for name in names:
            write_file(path / name, {t: row for t, row in tensors.items() if place[t] == name}, metadata)
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    for name, data in (assets or {}).items():
        (path / name).write_bytes(data)
    return path


def random_words(rng: np.random.Generator, n: int, width: int) -> npt.NDArray[Any]:
    """`n` words of `width` bytes: half of them near each other as weights are, half anything."""
    words = rng.integers(0, 1 << 8 * width, n, np.uint64).astype(f"<u{width}")
    near = rng.random(n) < 0.5
    low = 3 << 8 * width - 3
    words[near] = rng.integers(low, low + (1 << 8 * width - 5), int(near.sum()), np.uint64).astype(f"<u{width}")
    return words


def random_step(rng: np.random.Generator, words: npt.NDArray[Any], density: float, kind: str) -> npt.NDArray[Any]:
    """A copy in which about that share of the words, and one at the least unless the density is 0, is different."""
    width, n = words.itemsize, len(words)
    at = np.flatnonzero(rng.random(n) < density)
    if density and n and not len(at):
        at = rng.integers(0, n, 1)
    if kind == "mixed":
        new = words.copy()
        for part, one in zip(np.array_split(rng.permutation(at), len(KINDS) - 1), KINDS, strict=False):
            new[part] = random_step(rng, words[part], 1, one)
        return new
    top, k = 1 << 8 * width - 1, len(at)
    old = words[at].astype(np.uint64)
    infinity = {1: 0x7C, 2: 0x7F80, 4: 0x7F800000}[width]
    if kind == "ulp":
        fresh = old + rng.choice(np.array([1, 2**64 - 1], np.uint64), k)
    elif kind == "wide":
        fresh = rng.integers(0, 2 * top, k, np.uint64)
    elif kind == "sign":
        fresh = old ^ np.uint64(top)
    elif kind == "nan":
        fresh = (
            np.uint64(infinity) + rng.integers(1, 4, k, np.uint64) + np.uint64(top) * rng.integers(0, 2, k, np.uint64)
        )
    elif kind == "zero":
        fresh = np.where(old == 0, np.uint64(top), np.uint64(0))
    else:
        sizes = np.array([1, 2, 126, 127, 128, 254, 255, 256, 257, 258, top - 1, top], np.uint64)
        fresh = old + rng.choice(np.concatenate([sizes, np.uint64(0) - sizes]), k)
    new = words.copy()
    new[at] = fresh.astype(words.dtype)
    same = at[new[at] == words[at]]
    new[same] += words.dtype.type(1)
    return new


def random_tensors(
    rng: np.random.Generator, model: Mapping[str, tuple[str, Sequence[int]]] = MODEL
) -> dict[str, tuple[str, Sequence[int], bytes]]:
    """Values for the tensors of `model`."""
    tensors = {}
    for name, (dtype, shape) in model.items():
        length = int(np.prod(shape, dtype=np.int64)) * BITS.get(dtype, 8) // 8
        width = word_bytes(dtype)
        tensors[name] = (dtype, shape, random_words(rng, length // width, width).tobytes())
    return tensors


def step_tensors(
    rng: np.random.Generator, tensors: Tensors, density: float | Mapping[str, float], kind: str = "mixed"
) -> dict[str, tuple[str, Sequence[int], bytes]]:
    """The tensors one training step later; `density` may be given by name, 0 for those not named."""
    new = {}
    for name, (dtype, shape, data) in tensors.items():
        share = density if isinstance(density, float | int) else density.get(name, 0)
        words = np.frombuffer(data, f"<u{word_bytes(dtype)}")
        new[name] = (dtype, shape, random_step(rng, words, share, kind).tobytes())
    return new


def applied(words: npt.NDArray[Any], change: Difference | None) -> npt.NDArray[Any]:
    """The words after a change."""
    new = words.copy()
    if isinstance(change, Sparse):
        new[change.at] += change.diff
    elif isinstance(change, Dense):
        new += change.diff
    return new


def same(one: Difference | None, two: Difference | None) -> bool:
    """Whether two differences have the same form and the same content."""
    if one is None or two is None or type(one) is not type(two):
        return one is two
    if (one.n, one.k, one.diff.dtype) != (two.n, two.k, two.diff.dtype) or not np.array_equal(one.diff, two.diff):
        return False
    return not isinstance(one, Sparse) or not isinstance(two, Sparse) or np.array_equal(one.at, two.at)


def plain_decode(record: Encoded) -> list[int]:
    """The differences of all words of a record, from its streams by the letter of docs/format.md, one word at a time."""
    mode, width, n, k, top = record.mode, record.width, record.n, record.k, 1 << 8 * record.width
    sizes = zip(record.coded, record.raw, strict=True)
    slots = [c if len(c) == r else zstandard.ZstdDecompressor().decompress(c, max_output_size=r) for c, r in sizes]

    def unplaned(parts: Sequence[bytes]) -> list[int]:
        return [int.from_bytes(bytes(word), "little") for word in zip(*parts, strict=True)]

    def places(tokens: Sequence[int], skip: int) -> list[int]:
        at, found = 0, []
        for token in tokens:
            at += token
            if token != skip:
                found.append(at)
                at += 1
        return found

    def bit(stream: bytes, at: int) -> int:
        return stream[at // 8] >> at % 8 & 1

    def cut(stream: bytes) -> list[bytes]:
        return [stream[i * len(stream) // width : (i + 1) * len(stream) // width] for i in range(width)]

    escapes = iter(unplaned(cut(slots[5])) if slots[5] else ())
    if mode == Mode.FULL:
        return unplaned(slots[:width])
    if mode in (Mode.DENSE, Mode.PLANES):
        z = unplaned(slots[:width]) if mode == Mode.PLANES else [b if b < 255 else next(escapes) for b in slots[0]]
        return [word >> 1 if word % 2 == 0 else top - 1 - (word >> 1) for word in z]
    sizes_of = dict.fromkeys(range(k), 1)
    for at, short in zip(places(slots[3], 255), slots[4], strict=True):
        sizes_of[at] = next(escapes) if short == 255 and width > 1 else short + 2
    values = [top - sizes_of[i] if bit(slots[2], i) else sizes_of[i] for i in range(k)]
    if mode == Mode.BITMAP:
        at = [i for i in range(n) if bit(slots[0], i)]
    else:
        at = places(slots[0], 255) if mode == Mode.GAP8 else places(unplaned(slots[:2]), 65535)
    diff = [0] * n
    for i, value in zip(at, values, strict=True):
        diff[i] = value
    return diff


def delta(old: Path, new: Path, folder: Path, *, threads: int = 1, shard_bytes: int = SHARD_BYTES) -> Made:
    """Make the edge between two checkpoint directories in `folder`."""
    with Workers(threads) as workers:
        ends = Checkpoint.open(old), Checkpoint.open(new)
        return make_delta(*ends, Bundle(folder), workers, model="m", shard_bytes=shard_bytes)


def between(root: Path, old: Tensors, new: Tensors) -> Made:
    """Write two checkpoints to `root`/a and `root`/b and make the edge between them in `root`/d."""
    return delta(write_checkpoint(root / "a", old), write_checkpoint(root / "b", new), root / "d")


def chain(root: Path, states: Sequence[Tensors]) -> tuple[list[Path], list[Step]]:
    """Write consecutive checkpoints to `root`/s0, s1 and so on, with the edges between them, opened, in `root`/d0, d1."""
    paths = [write_checkpoint(root / f"s{i}", tensors) for i, tensors in enumerate(states)]
    for i, (one, two) in enumerate(pairwise(paths)):
        delta(one, two, root / f"d{i}", threads=2)
    return paths, [Step.open(Bundle(root / f"d{i}")) for i in range(len(states) - 1)]


def full(path: Path, folder: Path, *, threads: int = 1, shard_bytes: int = SHARD_BYTES) -> Made:
    """Make the edge from nothing to a checkpoint directory in `folder`."""
    with Workers(threads) as workers:
        return make_full(Checkpoint.open(path), Bundle(folder), workers, model="m", shard_bytes=shard_bytes)


def merge(steps: Sequence[Step], folder: Path, *, threads: int = 1, shard_bytes: int = SHARD_BYTES) -> Made:
    """Fold a chain of edges into one in `folder`."""
    with Workers(threads) as workers:
        return make_merge(steps, Bundle(folder), workers, shard_bytes=shard_bytes)


@contextmanager
def chunks_of(size: int) -> Iterator[None]:
    """Cut tensors into much smaller chunks than usual, so that small tensors have many."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (schema, checkpoint, digests, reader):
            patch.setattr(module, "CHUNK_BYTES", size)
        yield


def mixed(
    rng: np.random.Generator, tensors: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """A step that changes every tensor to another extent, and takes some back to what they were earlier."""
    shares = {name: float(rng.choice(DENSITIES)) for name in tensors}
    new = step_tensors(rng, tensors, shares, str(rng.choice(KINDS)))
    for name in new:
        if earlier and rng.random() < 0.2:
            new[name] = earlier[rng.integers(len(earlier))][name]
    return new


def opened(folder: Path, made: Made) -> Delta:
    """The records of an edge that was just made."""
    paths = [Bundle(folder).data_path(file.sha256) for file in made.edge.data]
    return Delta.open(paths, made.target.schema, full=made.base is None)


def decoded(found: Delta) -> list[tuple[tuple[int, int], Difference]]:
    """Every segment with how it changes."""
    return [
        ((int(segment["tensor"]), int(segment["chunk"])), part)
        for record in range(len(found))
        for segment, part in zip(
            found.segments[found.span(record)],
            split(found.decode(record), found.lengths[found.span(record)]),
            strict=True,
        )
        if part is not None
    ]


def walked(found: Delta, of: Schema, tensors: Mapping[str, Any], *, reverse: bool = False) -> dict[str, bytes]:
    """The tensors' bytes after all records of an edge, worked out without the code that applies edges."""
    words = {of.name(t): np.frombuffer(tensors[of.name(t)][2], f"<u{of.words[t]}").copy() for t in range(len(of))}
    for (t, chunk), part in decoded(found):
        whole, size = words[of.name(t)], schema.CHUNK_BYTES // int(of.words[t])
        piece = slice(chunk * size, (chunk + 1) * size)
        whole[piece] = applied(whole[piece], negated(part) if reverse else part)
    return {name: data.tobytes() for name, data in words.items()}


def only_bytes(tensors: Mapping[str, Any]) -> dict[str, bytes]:
    """The bytes of tensors."""
    return {name: row[2] for name, row in tensors.items()}


def names(made: Made) -> list[str]:
    """What its data files are called."""
    return [file.sha256 for file in made.edge.data]


class Valid:
    """A path to write files to, and of a valid delta file: schema, bytes, and changes. No data class: its repr is short."""

    def __init__(
        self, path: Path, schema: Schema, data: bytes, changes: list[tuple[tuple[int, int], Difference]]
    ) -> None:
        self.path, self.schema, self.bytes, self.changes, self.full = path, schema, data, changes, False

    def open(self, schema: Schema | None = None) -> Delta:
        """The file at `path`, with the schema it was made for or another."""
        return Delta.open([self.path], self.schema if schema is None else schema, full=self.full)

    def outcome(self, data: bytes) -> list[tuple[tuple[int, int], Difference]] | None:
        """The changes that a delta file of these bytes holds, or None where it is refused as it should be."""
        self.path.write_bytes(data)
        try:
            return decoded(self.open())
        except (FormatError, Unsupported):
            return None

    def parts(self) -> tuple[Header, bytes, Any, Any]:
        """The file taken apart: header, payload, and copies of directory and segments."""
        header = Header.unpack(self.bytes[:HEADER_BYTES], "x")
        tables = HEADER_BYTES + header.payload
        segments = tables + header.directory
        records = np.frombuffer(self.bytes[tables:segments], RECORD).copy()
        return header, self.bytes[HEADER_BYTES:tables], records, np.frombuffer(self.bytes[segments:], SEGMENT).copy()


def every_mode(root: Path, kind: str) -> Valid:
    """A small delta with records of every mode that has a base, or a small Full edge's file."""
    rng = np.random.default_rng(4)
    model = {
        "a": ("BF16", (6001,)), "b": ("U8", (900,)), "b2": ("U8", (90,)), "c": ("F16", (513,)), "d": ("F32", (400,)), "e": ("F32", (300,)),
        "f": ("U8", (200,)), "g": ("BF16", (100,)), "h": ("I64", (20,)), "i": ("BF16", (50,)),
    }  # fmt: skip
    old = random_tensors(rng, model)
    few = {"a": 0.0005, "b": 0.05, "b2": 0.1, "c": 0.5, "d": 1.0, "g": 1.0, "h": 0.1}
    new = step_tensors(rng, step_tensors(rng, old, few, "ulp"), {"e": 1.0, "f": 1.0, "i": 1.0}, "wide")
    made = between(root, old, new) if kind == "delta" else full(write_checkpoint(root / "b", new), root / "d")
    found = opened(root / "d", made)
    valid = Valid(root / "x.safetensors", made.target.schema, found.paths[0].read_bytes(), decoded(found))
    valid.full = kind == "full"
    return valid


def fields(table: Any) -> Iterator[tuple[Callable[[], Any], Callable[[int], None], int]]:
    """For every number in a table: how to read it, how to set it, and the largest that fits."""
    for row in range(len(table)):
        for name in table.dtype.names:
            column = table[name]
            for inner in column.dtype.names or [None]:
                cells = column if inner is None else column[inner]
                for at in np.ndindex(cells[row].shape):
                    yield (
                        lambda c=cells, i=(row, *at): int(c[i]),
                        lambda value, c=cells, i=(row, *at): c.__setitem__(i, value),
                        int(np.iinfo(cells.dtype).max),
                    )
