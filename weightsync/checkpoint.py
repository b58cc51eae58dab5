"""A directory of safetensors files as named, mapped integer arrays. Never loaded whole.

Which files count: those the index names; else the one safetensors file; else all of them, duplicates refused.
Opening checks every header against the file it heads; errors name the file and the byte offset in it.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weightsync import assets as asset_files
from weightsync.codec.difference import Words
from weightsync.errors import CheckpointError, SourceChanged, TargetError
from weightsync.files import FOLDER, JOURNAL
from weightsync.layout import HEADER_LIMIT, INDEX, File, Layout, Row, is_weight_file, parse_header, parse_index
from weightsync.schema import CHUNK_BYTES, Schema


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: T tensors, their bytes mapped from `files` in `root`.

    `file_of` (T,) and `offsets` (T,) say where each tensor of `schema` lies, in bytes from the start of its file.
    """

    root: Path
    schema: Schema
    layout: Layout
    paths: tuple[Path, ...]
    maps: tuple[mmap.mmap, ...]
    file_of: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    stamps: tuple[tuple[int, ...], ...] = field(repr=False)
    single: bool = False

    @classmethod
    def open(cls, path: Path, *, writable: bool = False) -> Checkpoint:
        """Map a checkpoint directory, or one safetensors file. Raises `CheckpointError`.

        With `writable`, stores into `chunk` and `words` change the files.
        """
        names, index = _file_names(path)
        root = path if path.is_dir() else path.parent
        if not writable and (root / FOLDER / JOURNAL).exists():
            raise CheckpointError(
                f"{root}: an apply was interrupted here, it may be a mixture of two versions; run that apply (or pull) again"
            )
        files, maps, stamps, rows = [], [], [], []
        for i, name in enumerate(names):
            file, mapped, stamp, tensors = _open_file(root / name, writable=writable)
            files.append(file)
            maps.append(mapped)
            stamps.append(stamp)
            rows += [(row, i, file.data_start + row.start) for row in tensors]
        rows.sort(key=lambda entry: entry[0].name)
        for one, two in pairwise(rows):
            if one[0].name == two[0].name:
                raise CheckpointError(
                    f"{root}: tensor {one[0].name!r} is in both {names[one[1]]} (byte {one[2]}) and {names[two[1]]} (byte {two[2]})"
                )
        schema = _schema(rows, names, root)
        return cls(
            root=root,
            schema=schema,
            layout=Layout(tuple(files), index),
            paths=tuple(root / name for name in names),
            maps=tuple(maps),
            file_of=np.array([entry[1] for entry in rows], np.int32),
            offsets=np.array([entry[2] for entry in rows], np.int64),
            stamps=tuple(stamps),
            single=path.is_file(),
        )

    def chunk(self, tensor: int, chunk: int) -> npt.NDArray[np.uint8]:
        """The bytes of one chunk of a tensor, mapped."""
        return self._view(tensor, chunk, 1)

    def words(self, tensor: int, chunk: int) -> Words:
        """One chunk of a tensor as words of its type's width, mapped."""
        return self._view(tensor, chunk, int(self.schema.words[tensor]))

    def _view(self, tensor: int, chunk: int, width: int) -> Words:
        start = chunk * CHUNK_BYTES
        length = min(int(self.schema.nbytes[tensor]) - start, CHUNK_BYTES)
        where = self.maps[int(self.file_of[tensor])]
        view: Words = np.frombuffer(where, f"<u{width}", length // width, int(self.offsets[tensor]) + start)
        return view

    @cached_property
    def contents(self) -> tuple[dict[str, bytes], list[str]]:
        """The directory's assets by name, and what is ignored; read once. A single file has neither."""
        return ({}, []) if self.single else asset_files.scan(self.root)

    def check_unchanged(self) -> None:
        """Raise `SourceChanged` when a file was replaced, rewritten or resized since it was opened."""
        for path, stamp in zip(self.paths, self.stamps, strict=True):
            try:
                now = _stamp(path.stat())
            except OSError as e:
                raise SourceChanged(f"{path}: vanished while it was read: {e.strerror}") from e
            if now != stamp:
                raise SourceChanged(f"{path}: was changed while it was read; publish it when its writer has finished")

    def flush(self) -> None:
        """Bring all stores to the disk."""
        for mapped in self.maps:
            mapped.flush()


def _file_names(path: Path) -> tuple[list[str], str | None]:
    try:
        if path.is_file():
            return [path.name], None
        present = sorted(entry.name for entry in path.iterdir() if is_weight_file(entry.name))
        indexes = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(".safetensors.index.json"))
    except OSError as e:
        raise CheckpointError(f"{path}: is no readable directory or file: {e.strerror or e}") from e
    if INDEX in indexes or len(indexes) == 1:
        index = path / (INDEX if INDEX in indexes else indexes[0])
        try:
            names = parse_index(index.read_bytes(), str(index))
        except OSError as e:
            raise CheckpointError(f"{index}: cannot be read: {e.strerror}") from e
        missing = [name for name in names if name not in present]
        if missing:
            raise CheckpointError(f"{index}: names {missing[0]}, which is not there ({len(missing)} missing in all)")
        return names, index.name
    if not present:
        raise CheckpointError(f"{path}: holds no safetensors file")
    return present, None


def _open_file(path: Path, *, writable: bool) -> tuple[File, mmap.mmap, tuple[int, ...], list[Row]]:
    try:
        with path.open("r+b" if writable else "rb") as handle:
            stat = os.fstat(handle.fileno())
            size = stat.st_size
            prefix = handle.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, HEADER_LIMIT):
                raise CheckpointError(
                    f"{path}: byte 0: not a safetensors file, or truncated: {size} bytes cannot hold a header of {length}"
                )
            header = handle.read(length)
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            mapped = mmap.mmap(handle.fileno(), size, access=access)
    except OSError as e:
        if writable and e.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ETXTBSY):
            raise TargetError(f"{path}: is not writable: {e.strerror}") from e
        raise CheckpointError(f"{path}: cannot be read: {e.strerror or e}") from e
    rows = parse_header(header, str(path))
    end = 8 + length + (rows[-1].stop if rows else 0)
    if end != size:
        kind = "truncated" if size < end else "followed by other bytes"
        raise CheckpointError(f"{path}: byte {min(size, end)}: {kind}: its tensors end at {end}, the file at {size}")
    return File(path.name, header), mapped, _stamp(stat), rows


def _schema(rows: Sequence[tuple[Row, int, int]], names: Sequence[str], root: Path) -> Schema:
    try:
        return Schema.build((row.name, row.dtype, row.shape, row.stop - row.start) for row, _, _ in rows)
    except CheckpointError as e:
        for row, file, offset in rows:
            if repr(row.name) in str(e):
                raise CheckpointError(f"{root / names[file]}: byte {offset}: {e}") from e
        raise CheckpointError(f"{root}: {e}") from e


def _stamp(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
