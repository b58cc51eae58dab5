"""The tensors of a checkpoint as columns: names, types, shapes, lengths, and how they fall into chunks.

A trillion-parameter mixture of experts has 10**5 tensors; they are kept as a handful of arrays, never as an object
each. Tensors are ordered by the bytes of their names, whatever files they lie in, so that the same tensors always give
the same schema blob. This module reads no file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from weightsync import canonical
from weightsync.dtypes import check_length, word_bytes
from weightsync.errors import CheckpointError, FormatError

CHUNK_BYTES = 8 << 20
"""A tensor is compared, digested and coded in pieces of this many bytes, counted from its first byte."""

FORMAT = "weightsync.schema/1"

MAX_DIMENSIONS = 64


class _Wire(msgspec.Struct):
    """The schema blob: parallel arrays, `types` indexes into `dtypes`."""

    bytes: list[int]
    dtypes: list[str]
    format: str
    names: list[str]
    shapes: list[list[int]]
    types: list[int]


@dataclass(frozen=True)
class Schema:
    """Columns over T tensors in byte order of their names.

    `name_bytes` holds all names end to end, name i being [name_ends[i-1], name_ends[i]); likewise `dims` the shapes.
    `types` (T,) indexes `dtypes`; `nbytes` (T,) int64 are the tensors' lengths in bytes.
    """

    name_bytes: bytes
    name_ends: npt.NDArray[np.int64]
    dtypes: tuple[str, ...]
    types: npt.NDArray[np.uint8]
    dims: npt.NDArray[np.int64]
    dim_ends: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]

    @classmethod
    def build(cls, tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> Schema:
        """From (name, dtype, shape, bytes) of each tensor, in any order. Raises `CheckpointError`."""
        rows = sorted(tensors, key=lambda row: row[0])
        for one, two in pairwise(rows):
            if one[0] == two[0]:
                raise CheckpointError(f"tensor name {one[0]!r} occurs twice")
        for row in rows:
            check_length(*row)
        dtypes = tuple(sorted({row[1] for row in rows}))
        if len(dtypes) > 255:
            raise CheckpointError(f"{len(dtypes)} different element types; at most 255 are supported")
        code = {dtype: i for i, dtype in enumerate(dtypes)}
        encoded = [row[0].encode() for row in rows]
        try:
            return cls(
                name_bytes=b"".join(encoded),
                name_ends=np.cumsum([len(name) for name in encoded], dtype=np.int64),
                dtypes=dtypes,
                types=np.array([code[row[1]] for row in rows], np.uint8),
                dims=np.array([dim for row in rows for dim in row[2]], np.int64),
                dim_ends=np.cumsum([len(row[2]) for row in rows], dtype=np.int64),
                nbytes=np.array([row[3] for row in rows], np.int64),
            )
        except OverflowError as e:
            raise CheckpointError(f"a tensor's shape or length is beyond 64 bits: {e}") from e

    @classmethod
    def parse(cls, blob: bytes) -> Schema:
        """From an untrusted blob of `blob`'s form. Raises `FormatError`."""
        try:
            wire = msgspec.json.decode(blob, type=_Wire)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            raise FormatError(f"schema blob is not valid: {e}") from e
        if wire.format != FORMAT:
            raise FormatError(f"schema blob has format {wire.format!r}, expected {FORMAT!r}")
        count = len(wire.names)
        if not len(wire.bytes) == len(wire.shapes) == len(wire.types) == count:
            raise FormatError("schema blob: its columns differ in length")
        if any(not 0 <= t < len(wire.dtypes) for t in wire.types):
            raise FormatError("schema blob: a type index is out of range")
        if any(one >= two for one, two in pairwise(wire.names)):
            raise FormatError("schema blob: names are not in ascending order")
        if any(not 0 <= size <= canonical.MAX_INTEGER for size in wire.bytes):
            raise FormatError("schema blob: a length is out of range")
        if any(dim < 0 or dim > canonical.MAX_INTEGER for shape in wire.shapes for dim in shape):
            raise FormatError("schema blob: a dimension is out of range")
        if any(len(shape) > MAX_DIMENSIONS for shape in wire.shapes):
            raise FormatError(f"schema blob: a shape has more than {MAX_DIMENSIONS} dimensions")
        rows = zip(wire.names, (wire.dtypes[t] for t in wire.types), wire.shapes, wire.bytes, strict=True)
        try:
            schema = cls.build(rows)
        except (CheckpointError, UnicodeEncodeError) as e:
            raise FormatError(f"schema blob: {e}") from e
        if schema.blob != blob:
            raise FormatError("schema blob is not in canonical form")
        return schema

    @cached_property
    def blob(self) -> bytes:
        """The canonical JSON that stands in the store and whose sha256 is part of the weights digest."""
        return canonical.dumps(
            {
                "bytes": self.nbytes.tolist(),
                "dtypes": list(self.dtypes),
                "format": FORMAT,
                "names": [self.name(t) for t in range(len(self))],
                "shapes": [self.shape(t) for t in range(len(self))],
                "types": self.types.tolist(),
            }
        )

    @cached_property
    def sha256(self) -> bytes:
        """The digest of `blob`, 32 bytes."""
        return hashlib.sha256(self.blob).digest()

    def __len__(self) -> int:
        return len(self.nbytes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    def name(self, tensor: int) -> str:
        """The tensor's name."""
        start = int(self.name_ends[tensor - 1]) if tensor else 0
        return self.name_bytes[start : int(self.name_ends[tensor])].decode()

    def shape(self, tensor: int) -> list[int]:
        """The tensor's dimensions, outermost first."""
        start = int(self.dim_ends[tensor - 1]) if tensor else 0
        dims: list[int] = self.dims[start : int(self.dim_ends[tensor])].tolist()
        return dims

    def dtype(self, tensor: int) -> str:
        """The tensor's safetensors dtype string."""
        return self.dtypes[int(self.types[tensor])]

    @cached_property
    def words(self) -> npt.NDArray[np.uint8]:
        """(T,) bytes of the word in which each tensor is compared: 1, 2 or 4."""
        table = np.array([word_bytes(dtype) for dtype in self.dtypes] or [1], np.uint8)
        return table[self.types]

    @cached_property
    def chunk_starts(self) -> npt.NDArray[np.int64]:
        """(T + 1,) the index of each tensor's first chunk in the digests; the last entry is the number of chunks."""
        counts = -(-self.nbytes // CHUNK_BYTES)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])

    @property
    def chunks(self) -> int:
        """The number of chunks of all tensors; an empty tensor has none."""
        return int(self.chunk_starts[-1])

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return int(self.nbytes.sum())

    @cached_property
    def total_words(self) -> int:
        """Words of all tensors: elements, but two for each 64-bit element and one a byte for sub-byte types."""
        return int((self.nbytes // self.words).sum()) if len(self) else 0

    def chunk_lengths(self, tensors: npt.NDArray[np.integer], chunks: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Bytes of the given (tensor, chunk) pairs, which must exist."""
        start = np.asarray(chunks, np.int64) * CHUNK_BYTES
        lengths: npt.NDArray[np.int64] = np.minimum(self.nbytes[tensors] - start, CHUNK_BYTES)
        return lengths

    def locate(self, chunk: int) -> tuple[int, int]:
        """(tensor, chunk within it) of a chunk index, the inverse of `chunk_starts`."""
        tensor = int(np.searchsorted(self.chunk_starts, chunk, side="right")) - 1
        return tensor, chunk - int(self.chunk_starts[tensor])

    def differences(self, other: Schema, limit: int = 5) -> list[str]:
        """What differs from `other`, at most `limit` lines, for a message."""
        mine = {self.name(t): (self.dtype(t), tuple(self.shape(t))) for t in range(len(self))}
        theirs = {other.name(t): (other.dtype(t), tuple(other.shape(t))) for t in range(len(other))}
        lines = [f"{name!r} only in the first" for name in mine if name not in theirs]
        lines += [f"{name!r} only in the second" for name in theirs if name not in mine]
        lines += [
            f"{name!r} is {mine[name][0]}{list(mine[name][1])} in the first, {theirs[name][0]}{list(theirs[name][1])} in the second"
            for name in mine
            if name in theirs and mine[name] != theirs[name]
        ]
        if len(lines) > limit:
            lines = [*lines[:limit], f"and {len(lines) - limit} more"]
        return lines
