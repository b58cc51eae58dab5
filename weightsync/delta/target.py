"""A checkpoint directory that is about to be changed: locked, safe to write, with room, and its small files.

Refusals come before the first byte changes; nothing here looks at a delta.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from weightsync.checkpoint import Checkpoint
from weightsync.errors import TargetBusy, TargetError
from weightsync.files import FOLDER, lock_folder, need_room, write_whole, writing


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the directory against readers and other writers of this library; the lock goes with the process.

    Raises `TargetBusy` when another process holds it, `TargetError` when it cannot be locked.
    """
    try:
        handle = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as e:
        raise TargetError(f"{target}: is not a directory that can be opened: {e.strerror}") from e
    try:
        if not lock_folder(handle, target, exclusive=True):
            raise TargetBusy(f"{target}: another process reads or changes it; wait for it, then run this again")
        yield
    finally:
        os.close(handle)


def open_target(target: Path) -> Checkpoint:
    """Map a directory for writing, if that can harm nothing else. Raises `TargetError`.

    Refused: symbolic links (Hub caches link to shared blobs), files with other hard links, anything not a plain file.
    """
    if not target.is_dir():
        raise TargetError(f"{target}: is not a directory; apply changes a checkpoint directory in place")
    if (target / FOLDER).is_symlink():
        raise TargetError(f"{target / FOLDER}: is a symbolic link; remove it")
    checkpoint = Checkpoint.open(target, writable=True)
    for path, stamp in zip(checkpoint.paths, checkpoint.stamps, strict=True):
        link = path.lstat()
        if not stat.S_ISREG(link.st_mode):
            raise TargetError(
                f"{path}: is not a plain file (a Hub cache links to shared blobs); use --output for a copy"
            )
        if link.st_nlink > 1:
            raise TargetError(
                f"{path}: has {link.st_nlink} hard links, another name would change too; use --output for a copy"
            )
        if (link.st_dev, link.st_ino) != stamp[:2]:
            raise TargetError(f"{path}: was replaced while it was opened; run this again")
    _reserve(checkpoint)
    return checkpoint


def _reserve(checkpoint: Checkpoint) -> None:
    """Allocate holes of sparse files now: touching one on a full disk (on tmpfs even reading it) kills the process."""
    for path in checkpoint.paths:
        size = path.stat()
        missing = size.st_size - size.st_blocks * 512
        if missing > 0:
            need_room(path, missing, "filling the holes of a sparse file")
            with writing(path, missing), path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, size.st_size)


def mark_changed(checkpoint: Checkpoint) -> None:
    """Let whoever watches modification times see that the files change: stores to a tmpfs mapping do not move them."""
    for path in checkpoint.paths:
        with writing(path):
            os.utime(path)


def check_assets(target: Path, contents: Mapping[str, bytes]) -> None:
    """Raise `TargetError` or `NoSpace` now if `put_assets` could not write these files later."""
    for name in contents:
        path = target / name
        if path.is_dir() and not path.is_symlink():
            raise TargetError(f"{path}: is a directory where a file of the version belongs; move it away")
    changed = [data for name, data in contents.items() if not _holds(target / name, data)]
    need_room(target, sum(map(len, changed)), "the small files")


def put_assets(target: Path, contents: Mapping[str, bytes], old: set[str]) -> None:
    """Write the small files that differ, and remove those of `old` that `contents` lacks."""
    own = target / FOLDER
    for name, data in contents.items():
        if not _holds(target / name, data):
            with writing(own):
                own.mkdir(exist_ok=True)
            write_whole(target / name, data, via=own)
    for name in old - contents.keys():
        with writing(target / name):
            (target / name).unlink(missing_ok=True)


def _holds(path: Path, data: bytes) -> bool:
    """Whether a plain file has exactly these bytes."""
    return not path.is_symlink() and path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data
