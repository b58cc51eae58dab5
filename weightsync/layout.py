"""Where tensors lie in the files of a checkpoint: safetensors headers, and the blob that keeps them.

A header fixes everything about a file but the values, so the layout of a version is its file names and header bytes.
This module parses and checks headers; it opens no file. It guards the boundary: names from a blob that came out of a
store become paths on this machine.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from weightsync import canonical
from weightsync.errors import CheckpointError, FormatError
from weightsync.schema import MAX_DIMENSIONS, Schema

FORMAT = "weightsync.layout/1"
INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 100_000_000
"""Longest header in bytes, as in the safetensors library."""


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of a file: name, dtype string, shape, and its bytes [start, stop) counted from the data's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class File:
    """One safetensors file: its plain name and its header text, without the 8-byte length before it."""

    name: str
    header: bytes

    @property
    def data_start(self) -> int:
        """Offset of the first tensor byte in the file."""
        return 8 + len(self.header)

    @property
    def prefix(self) -> bytes:
        """The bytes of the file before its tensors."""
        return len(self.header).to_bytes(8, "little") + self.header


def parse_header(header: bytes, what: str) -> list[Row]:
    """The tensors of a header in order of their bytes, which must follow each other without holes.

    `what` names the file in the `CheckpointError`; offsets in messages count from the start of the file.
    """
    try:
        text = header.decode()
        document = json.loads(text, object_pairs_hook=_unique)
    except UnicodeDecodeError as e:
        raise CheckpointError(f"{what}: byte {8 + e.start}: the header is not UTF-8") from e
    except json.JSONDecodeError as e:
        raise CheckpointError(f"{what}: byte {8 + len(text[: e.pos].encode())}: the header is not JSON: {e.msg}") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{what}: byte 8: the header is not valid: {e}") from e
    if not isinstance(document, dict):
        raise CheckpointError(f"{what}: byte 8: the header is not a JSON object")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{what}: byte 8: __metadata__ must map strings to strings")
    rows = sorted((_row(name, entry, what) for name, entry in document.items()), key=lambda r: (r.start, r.stop))
    at = 0
    for row in rows:
        if row.start != at:
            kind = "overlaps the tensor before it" if row.start < at else "leaves a hole before it"
            raise CheckpointError(f"{what}: byte {8 + len(header) + row.start}: tensor {row.name!r} {kind}")
        at = row.stop
    return rows


def _row(name: str, entry: Any, what: str) -> Row:
    try:
        name.encode()
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        ok = isinstance(dtype, str) and dtype.isascii() and isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS
        ok = ok and all(type(number) is int and 0 <= number < 2**53 for number in [*shape, start, stop])
    except (TypeError, KeyError, ValueError) as e:
        raise CheckpointError(f"{what}: byte 8: header entry of tensor {name!r} is malformed") from e
    if not ok or stop < start:
        raise CheckpointError(f"{what}: byte 8: header entry of tensor {name!r} is malformed")
    return Row(name, dtype, tuple(shape), start, stop)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0]!r} occurs twice")
    return value


@dataclass(frozen=True)
class Layout:
    """The files of a version in order of their names, and the name of the index file, if there is one."""

    files: tuple[File, ...]
    index: str | None

    @property
    def blob(self) -> bytes:
        """The canonical JSON that stands in the store."""
        files = [{"header": file.header.decode(), "name": file.name} for file in self.files]
        return canonical.dumps({"files": files, "format": FORMAT, "index": self.index})

    @classmethod
    def parse(cls, blob: bytes) -> Layout:
        """From an untrusted blob: every header is checked and every name is a plain file name. Raises `FormatError`."""
        document = canonical.loads(blob, "layout blob")
        try:
            if document["format"] != FORMAT:
                raise FormatError(f"layout blob has format {document['format']!r}, expected {FORMAT!r}")
            files = tuple(File(str(entry["name"]), entry["header"].encode()) for entry in document["files"])
            index = document["index"]
        except (KeyError, TypeError, AttributeError) as e:
            raise FormatError(f"layout blob lacks a field or has a wrong one: {e!r}") from e
        if index is not None and (not isinstance(index, str) or not is_index_file(index)):
            raise FormatError(f"layout blob: {index!r} is not a plain name of an index file")
        for file in files:
            if not is_weight_file(file.name):
                raise FormatError(f"layout blob: {file.name!r} is not a plain name of a safetensors file")
        if any(one.name >= two.name for one, two in pairwise(files)):
            raise FormatError("layout blob: files are not in order of their names, or one occurs twice")
        return cls(files, index)

    @cached_property
    def rows(self) -> list[tuple[int, Row]]:
        """Every tensor with the index of its file, in order of their names."""
        rows = ((i, row) for i, file in enumerate(self.files) for row in parse_header(file.header, file.name))
        return sorted(rows, key=lambda entry: entry[1].name)

    def check_tensors(self, schema: Schema) -> None:
        """Raise `FormatError` unless the files hold exactly the tensors of `schema`."""
        try:
            rows = self.rows
            mine = Schema.build((row.name, row.dtype, row.shape, row.stop - row.start) for _, row in rows)
        except CheckpointError as e:
            raise FormatError(f"layout blob: {e}") from e
        if mine != schema:
            raise FormatError("layout blob: its files do not hold the tensors of the schema")

    def index_text(self) -> bytes:
        """The index file as the transformers library writes it."""
        rows = self.rows
        place = {row.name: self.files[i].name for i, row in rows}
        index = {"metadata": {"total_size": sum(row.stop - row.start for _, row in rows)}, "weight_map": place}
        return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def is_plain_name(name: str) -> bool:
    """Whether this is a file name and nothing more: no folder, not hidden, nothing a terminal would interpret.

    1 to 255 bytes of UTF-8 that do not begin with "." and hold no "/" and no control character (below U+0020, and U+007F to
    U+009F).
    """
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return False
    return 0 < size <= 255 and name[0] != "." and not any(c < " " or c == "/" or "\x7f" <= c <= "\x9f" for c in name)


def is_weight_file(name: str) -> bool:
    """Whether this is the plain name of a safetensors file."""
    return is_plain_name(name) and name.endswith(".safetensors")


def is_index_file(name: str) -> bool:
    """Whether this is the plain name of the file that says which tensor lies in which file."""
    return is_plain_name(name) and name.endswith(".safetensors.index.json")


def parse_index(data: bytes, what: str) -> dict[str, str]:
    """Which file an index says each tensor is in, by the tensor's name. Raises `CheckpointError`."""
    try:
        place = json.loads(data.decode())["weight_map"]
        names: Sequence[Any] = sorted(set(place.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{what}: byte 0: not a safetensors index: no object `weight_map` of file names") from e
    for name in names:
        if not isinstance(name, str) or not is_weight_file(name):
            raise CheckpointError(f"{what}: names {name!r}, which is not a safetensors file beside it")
    if not names:
        raise CheckpointError(f"{what}: names no file")
    return dict(place)
