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
from stat import S_ISREG

import numpy as np
import numpy.typing as npt

from weightsync import assets as asset_files
from weightsync.codec.difference import Words
from weightsync.errors import CheckpointError, LocalError, SourceChanged, TargetBusy, TargetError
from weightsync.files import FOLDER, JOURNAL, lock_folder, read_plain
from weightsync.layout import (
    HEADER_LIMIT,
    INDEX,
    File,
    Layout,
    Row,
    is_index_file,
    is_weight_file,
    parse_header,
    parse_index,
)
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
    unnamed: tuple[str, ...] = ()
    hold: object = field(default=None, repr=False)

    @classmethod
    def open(cls, path: Path, *, writable: bool = False) -> Checkpoint:
        """Map a checkpoint directory, or one safetensors file. Raises `CheckpointError`.

        With `writable`, stores into `chunk` and `words` change the files.
        """
        found = _file_names(path)
        names = found.names
        root = path if path.is_dir() else path.parent
        hold = None if writable or path.is_file() else _Hold(root)
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
        _check_index(found, rows, root)
        schema = _schema(rows, names, root)
        return cls(
            root=root,
            schema=schema,
            layout=Layout(tuple(files), found.index),
            paths=tuple(root / name for name in names),
            maps=tuple(maps),
            file_of=np.array([entry[1] for entry in rows], np.int32),
            offsets=np.array([entry[2] for entry in rows], np.int64),
            stamps=tuple(stamps),
            single=path.is_file(),
            unnamed=found.unnamed,
            hold=hold,
        )

    def chunk(self, tensor: int, chunk: int) -> npt.NDArray[np.uint8]:
        """The bytes of one chunk of a tensor, mapped."""
        return self._view(tensor, chunk, 1)

    def words(self, tensor: int, chunk: int, width: int | None = None) -> Words:
        """One chunk of a tensor as words of `width` bytes (by default its type's), which must divide it, mapped."""
        return self._view(tensor, chunk, int(self.schema.words[tensor]) if width is None else width)

    def _view(self, tensor: int, chunk: int, width: int) -> Words:
        start = chunk * CHUNK_BYTES
        length = min(int(self.schema.nbytes[tensor]) - start, CHUNK_BYTES)
        where = self.maps[int(self.file_of[tensor])]
        view: Words = np.frombuffer(where, f"<u{width}", length // width, int(self.offsets[tensor]) + start)
        return view

    @cached_property
    def contents(self) -> tuple[dict[str, bytes], list[str]]:
        """The directory's assets by name, and what is ignored; read once. A single file has neither."""
        if self.single:
            return {}, []
        contents, ignored = asset_files.scan(self.root)
        return contents, sorted([*ignored, *self.unnamed])

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


@dataclass(frozen=True, slots=True)
class _Found:
    """The weight files of a checkpoint, the index that names them with the tensors in each, and files it leaves out."""

    names: list[str]
    index: str | None = None
    place: dict[str, str] = field(default_factory=dict)
    unnamed: tuple[str, ...] = ()


def _file_names(path: Path) -> _Found:
    try:
        if path.is_file():
            return _Found([path.name])
        present = sorted(entry.name for entry in path.iterdir() if is_weight_file(entry.name))
        indexes = sorted(entry.name for entry in path.iterdir() if is_index_file(entry.name))
    except OSError as e:
        raise _unreadable(path, e) from e
    if INDEX in indexes or len(indexes) == 1:
        index = path / (INDEX if INDEX in indexes else indexes[0])
        try:
            place = parse_index(read_plain(index, HEADER_LIMIT), str(index))
        except OSError as e:
            raise _unreadable(index, e) from e
        names = sorted(set(place.values()))
        missing = [name for name in names if name not in present]
        if missing:
            raise CheckpointError(f"{index}: names {missing[0]}, which is not there ({len(missing)} missing in all)")
        return _Found(names, index.name, place, tuple(sorted(set(present) - set(names))))
    if not present:
        raise CheckpointError(f"{path}: holds no safetensors file")
    return _Found(present)


def _check_index(found: _Found, rows: Sequence[tuple[Row, int, int]], root: Path) -> None:
    """Raise `CheckpointError` when the index says of a tensor what the files do not."""
    actual = {row.name: found.names[i] for row, i, _ in rows}
    for name, file in found.place.items():
        if actual.get(name) != file:
            where = f"it is in {actual[name]}" if name in actual else "no file holds it"
            raise CheckpointError(f"{root / str(found.index)}: says that tensor {name!r} is in {file}, but {where}")


class _Hold:
    """Keeps a directory from being changed by this library for as long as it is alive. Raises `TargetBusy`."""

    def __init__(self, root: Path) -> None:
        self._handle = -1
        try:
            self._handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
            free = lock_folder(self._handle, root, exclusive=False)
        except (OSError, TargetError):
            free = (
                True  # a file system without locks, or another user's folder: nobody can change it under a lock either
            )
        if not free:
            raise TargetBusy(f"{root}: another process is changing it; wait for it, then run this again")

    def __del__(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)


def _unreadable(path: Path, error: OSError) -> CheckpointError | LocalError:
    """Wrong input, or a trouble of this machine that will pass."""
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE):
        return LocalError(f"{path}: cannot be read: {error.strerror}")
    return CheckpointError(f"{path}: is no readable file or directory: {error.strerror or error}")


def _open_file(path: Path, *, writable: bool) -> tuple[File, mmap.mmap, tuple[int, ...], list[Row]]:
    try:
        flags = os.O_NONBLOCK | os.O_CLOEXEC  # a pipe of that name must not make us wait
        opened = os.open(path, flags | (os.O_RDWR if writable else os.O_RDONLY))
        with os.fdopen(opened, "r+b" if writable else "rb") as handle:
            stat = os.fstat(handle.fileno())
            if not S_ISREG(stat.st_mode):
                raise CheckpointError(f"{path}: is not a plain file")
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
        raise _unreadable(path, e) from e
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
            if str(e).startswith((f"tensor {row.name!r}:", f"tensor name {row.name!r} ")):
                raise CheckpointError(f"{root / names[file]}: byte {offset}: {e}") from e
        raise CheckpointError(f"{root}: {e}") from e


def _stamp(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
