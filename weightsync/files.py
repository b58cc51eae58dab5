"""Files and folders: writing whole or not at all, and saying in our own words why it did not work."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from weightsync.errors import NoSpace, TargetError

FOLDER = ".weightsync"
"""The library's own folder inside a checkpoint directory, there only while it is being changed."""

JOURNAL = "journal"
"""The undo journal in it: while it exists, the directory may be a mixture of two versions."""

TEMPORARY = ".tmp-"
"""How the name of a file begins that is still being written."""

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turn an `OSError` of the block into `NoSpace` (with the bytes `needed`, if known) or `TargetError`, naming `path`."""
    try:
        yield
    except OSError as e:
        if e.errno in FULL:
            wanted = "" if needed is None else f"{needed} bytes are needed, "
            raise NoSpace(f"{path}: {e.strerror}: {wanted}{available(path)} bytes are available there") from e
        raise TargetError(f"{path}: cannot be written: {e.strerror or e}") from e


def available(path: Path) -> int:
    """Bytes free for us in the file system of `path` or of its nearest existing parent."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def need_room(path: Path, needed: int, what: str) -> None:
    """Raise `NoSpace` when the file system of `path` lacks `needed` bytes for `what`."""
    free = available(path)
    if needed > free:
        raise NoSpace(f"{path}: {what} needs {needed} bytes, {free} are available")


def write_whole(path: Path, data: bytes, *, via: Path | None = None) -> None:
    """Write a file so that it appears complete or not at all, replacing one of that name, and survives a power cut.

    It grows under a temporary name in the folder `via` of the same file system, or else beside `path`.
    """
    with writing(path, len(data)):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = (via or path.parent) / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            with temporary.open("xb") as file:  # exclusive: never through a link that somebody laid there
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def open_plain(path: Path) -> BufferedReader:
    """Open a plain file for reading, without waiting for whoever writes a pipe of that name. Raises `OSError`."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a plain file", str(path))
    return os.fdopen(handle, "rb")


def read_plain(path: Path, limit: int) -> bytes:
    """All of a plain file of at most `limit` bytes. Raises `OSError`."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"has {size} bytes, at most {limit} are expected", str(path))
        return file.read(size)


def lock_folder(handle: int, folder: Path, *, exclusive: bool) -> bool:
    """Lock an open directory for as long as `handle` is open; False when somebody else holds it.

    Raises `TargetError` where the file system has no such locks.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        raise TargetError(f"{folder}: cannot be locked: {e.strerror or e}; use a file system that has locks") from e
    return True


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
