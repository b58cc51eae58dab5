"""Local files as the stores need them: arriving under a temporary name, checked, then renamed.

What happens on the local side is told apart here from what the store does: a full disk is `NoSpace`,
anything else a `TargetError`, never a fault of the store. Must not know any back end.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Self

from weightsync.errors import InputError, NoSpace, TargetError
from weightsync.files import FULL, TEMPORARY
from weightsync.store.base import Download

BLOCK = 1 << 20
"""Bytes that are read, hashed and written at a time."""


def temporary_name() -> str:
    """A new name for a file that is still being written; no listing shows it."""
    return f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"


@contextmanager
def opened(file: int) -> Iterator[int]:
    """Close a file descriptor at the end."""
    try:
        yield file
    finally:
        os.close(file)


def blocks(file: int) -> Iterator[memoryview]:
    """The rest of an open file, at most `BLOCK` bytes at a time; each view is valid until the next one."""
    buffer = memoryview(bytearray(BLOCK))
    while count := os.readv(file, [buffer]):
        yield buffer[:count]


def write_all(file: int, data: bytes | memoryview) -> None:
    """Write all of `data`; the system may take it in pieces."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def digest(path: Path) -> tuple[int, str]:
    """Size in bytes and sha256 (hex) of a file."""
    found, size = hashlib.sha256(), 0
    with opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as file:
        for block in blocks(file):
            found.update(block)
            size += len(block)
    return size, found.hexdigest()


def no_space(folder: Path, what: str, needed: int) -> NoSpace:
    """The error for a full disk: `needed` bytes for `what` in `folder`, with what is available there."""
    try:
        status = os.statvfs(folder)
        available = f"{status.f_bavail * status.f_frsize} bytes"
    except OSError:
        available = "an unknown number of bytes"
    return NoSpace(
        f"no room for {what} in {folder}: {needed} bytes needed, {available} available there (a quota may be lower)"
    )


@contextmanager
def local_side(folder: Path, what: str, needed: int) -> Iterator[None]:
    """Turn a local `OSError` while `what` (of `needed` bytes) is written to `folder` into `NoSpace` or `TargetError`."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise no_space(folder, what, needed) from error
        raise TargetError(
            f"cannot write {what} to {folder}: {words(error)}; check that path and its permissions"
        ) from error


def words(error: OSError) -> str:
    """What the system says, without Python's decoration."""
    return error.strerror or str(error) or type(error).__name__


class Source:
    """What is to be stored: bytes, or a file that is opened for each use. Wrong input is `InputError`."""

    def __init__(self, path: str, content: Path | bytes) -> None:
        """Take `content` for the object `path`; a file's size is taken now and must stay."""
        self.path, self.content = path, content
        try:
            self.bytes = len(content) if isinstance(content, bytes) else content.stat().st_size
            if isinstance(content, Path) and not (content.is_file() and os.access(content, os.R_OK)):
                raise InputError(f"cannot store {content} as {path}: it is not a file that this user can read")
        except OSError as error:
            raise self._unreadable(error) from error

    def read(self) -> Iterator[bytes | memoryview]:
        """The content in blocks; raises `InputError` when it cannot be read or has changed its size."""
        if isinstance(self.content, bytes):
            yield self.content
            return
        left = self.bytes
        try:
            with opened(os.open(self.content, os.O_RDONLY | os.O_CLOEXEC)) as file:
                for block in blocks(file):
                    left -= len(block)
                    yield block
        except OSError as error:
            raise self._unreadable(error) from error
        if left:
            raise InputError(f"{self.content} changed while it was stored as {self.path}: it had {self.bytes} bytes")

    def _unreadable(self, error: OSError) -> InputError:
        return InputError(f"cannot read {self.content!s:.300} to store it as {self.path}: {words(error)}")


class Arrival:
    """One file on its way to `item.dest`: a temporary beside it, removed unless it is published.

    Entering makes the destination's folder and proves that it can be written. Raises `NoSpace` and `TargetError`.
    """

    def __init__(self, item: Download) -> None:
        """Prepare for `item`; nothing is touched yet."""
        self.item = item
        self.path = item.dest.with_name(temporary_name())

    def __enter__(self) -> Self:
        with self._local():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.path.unlink()

    def fill(self, content: Iterator[memoryview]) -> bool:
        """Write `content` and publish it if it is what `item` wants; False when it is something else."""
        found, size = hashlib.sha256(), 0
        with self._local():
            with opened(os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)) as file:
                for block in content:
                    size += len(block)
                    if size > self.item.bytes:
                        return False
                    found.update(block)
                    write_all(file, block)
            return self._publish(size, found.hexdigest())

    def check(self) -> bool:
        """Read back what somebody else wrote to `path` and publish it if it is what `item` wants; else False."""
        with self._local():
            return self._publish(*digest(self.path))

    def _publish(self, size: int, sha256: str) -> bool:
        right = (size, sha256) == (self.item.bytes, self.item.sha256)
        if right:
            self.path.replace(self.item.dest)
        return right

    def _local(self) -> AbstractContextManager[None]:
        return local_side(self.path.parent, self.item.path, self.item.bytes)
