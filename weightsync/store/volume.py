"""A directory as a store: a mounted volume, a shared file system, or a folder for tests.

Each object is written under a temporary name in its own folder, forced to disk, and published by a hard link,
which the kernel refuses when the name exists: of two writers exactly one wins and nothing is ever overwritten.
File systems without hard links get `renameat2(RENAME_NOREPLACE)`, which makes the same promise; one that offers
neither is refused, because a plain rename could replace an object unnoticed.

Everything below the root is reached through folder handles that refuse symbolic links, so no name and no planted
link leads outside. (A link that stays inside is refused too: nothing here makes any.) The root itself may be a link.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from weightsync.errors import StoreConflict, StoreCorrupt, StoreDenied, StoreError, StoreNotFound, StoreUnavailable
from weightsync.files import FULL, TEMPORARY
from weightsync.store import files, names
from weightsync.store.base import READ_LIMIT, Download, Entry

STALE_SECONDS = 24 * 3600
"""Age after which a temporary belongs to a writer that died, and `put` may remove it."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_RENAME_NOREPLACE = 1
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS, errno.EINVAL})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_LIBC = ctypes.CDLL(None, use_errno=True)


class VolumeStore:
    """The store in directory `root`, which the first `put` makes. See `Store` for what the methods promise."""

    def __init__(self, root: Path) -> None:
        """Take the directory; nothing is touched yet."""
        self._root = root.absolute()
        self._swept: set[str] = set()

    @property
    def url(self) -> str:
        """The directory's path."""
        return str(self._root)

    def put(self, items: Mapping[str, Path | bytes], *, refresh_after: float = 12 * 3600) -> int:
        """Store objects, one after the other in the given order; see `Store.put`. Files get mode 0644.

        Refreshing sets the modification time. Temporaries of writers that died more than `STALE_SECONDS`
        ago are removed from the folders written to.
        """
        sources = [files.Source(names.check_path(path), content) for path, content in items.items()]
        return sum(self._put(source, refresh_after) for source in sources)

    def get(self, items: Sequence[Download]) -> None:
        """Fetch objects, one after the other; see `Store.get`. Files are not forced to disk."""
        for item in items:
            names.check_path(item.path)
        for item in items:
            if not (self._fetch(item) or self._fetch(item)):
                raise StoreCorrupt(
                    f"{item.path} in {self.url} is not the {item.bytes} bytes with sha256 {item.sha256}, also on a second "
                    f"try; {item.dest} was not touched. Publish the version again after deleting that file"
                )

    def read(self, path: str, *, sha256: str | None = None, limit: int = READ_LIMIT) -> bytes:
        """A small object's bytes; see `Store.read`."""
        for _ in range(2):
            with self._object(path) as (file, size):
                if size > limit:
                    raise StoreCorrupt(f"{path} in {self.url} has {size} bytes, more than the {limit} allowed here")
                data = bytearray()
                for block in self._blocks(file, path):
                    data += block
                    if len(data) > size:
                        break
            if len(data) == size and sha256 in (None, hashlib.sha256(data).hexdigest()):
                return bytes(data)
        raise StoreCorrupt(
            f"{path} in {self.url} does not have sha256 {sha256 or 'a steady size'}, also on a second try"
        )

    def list(self, prefix: str) -> list[Entry]:
        """Objects below a folder; see `Store.list`. Links, temporaries and foreign names are passed over."""
        parts = [part for part in names.check_prefix(prefix).split("/") if part]
        try:
            with self._guard(prefix or "the root"), self._folder(parts) as folder:
                found = list(self._walk(folder, prefix))
        except _Absent:
            return []
        return sorted(found, key=lambda entry: entry.path)

    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects; see `Store.delete`. Folders stay: another writer may be about to use them."""
        for path in [names.check_path(path) for path in paths]:
            *parts, name = path.split("/")
            with suppress(_Absent), self._guard(path), self._folder(parts) as folder:
                _unlink(folder, name)

    # ---- writing

    def _put(self, source: files.Source, refresh_after: float) -> int:
        *parts, name = source.path.split("/")
        try:
            with self._guard(source.path, source.bytes), self._folder(parts, create=True) as folder:
                self._sweep(folder, "/".join(parts))
                for _ in range(3):  # again only when the object vanishes between two looks at it
                    present = _stat(folder, name)
                    if present is None:
                        if self._publish(folder, name, source):
                            return source.bytes
                    elif self._keep(folder, name, source, present, refresh_after):
                        return 0
        except _Absent as error:
            raise StoreConflict(f"{source.path} cannot be stored in {self.url}: {error}") from error
        raise StoreUnavailable(f"{source.path} in {self.url} keeps appearing and vanishing; is a clean-up running?")

    def _keep(
        self, folder: int, name: str, source: files.Source, present: os.stat_result, refresh_after: float
    ) -> bool:
        """Leave an existing object in place, made young when it is old; False when it vanished meanwhile."""
        if not stat.S_ISREG(present.st_mode) or present.st_size != source.bytes:
            what = f"{present.st_size} bytes" if stat.S_ISREG(present.st_mode) else "something that is no file"
            raise StoreConflict(
                f"{source.path} exists in {self.url} with {what} where {source.bytes} bytes were to be stored; "
                "nothing was overwritten. Objects never change: use another name, or find out who wrote that one"
            )
        if time.time() - present.st_mtime >= refresh_after:
            try:
                os.utime(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                return False
        return True

    def _publish(self, folder: int, name: str, source: files.Source) -> bool:
        """Write a temporary and give it its name; False when somebody else's object took the name first."""
        temporary = files.temporary_name()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(temporary, flags, 0o644, dir_fd=folder)
        try:
            with files.opened(file):
                with suppress(PermissionError):  # a mount that fixes the modes of all files refuses this
                    os.fchmod(file, 0o644)  # readable for other users whatever the umask says
                for block in source.read():
                    files.write_all(file, block)
                os.fsync(file)
            return self._link(folder, temporary, name)
        finally:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            _sync_folder(folder)

    def _link(self, folder: int, temporary: str, name: str) -> bool:
        try:
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return self._rename(folder, temporary, name)
        return True

    def _rename(self, folder: int, temporary: str, name: str) -> bool:
        code = _rename_noreplace(folder, temporary, name)
        if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise StoreError(
                f"the file system of {self.url} can neither make hard links nor rename without replacing, so nothing "
                "would keep two writers apart; use another volume type, or a bucket"
            )
        if code not in (0, errno.EEXIST):
            raise OSError(code, os.strerror(code))
        return code == 0

    def _sweep(self, folder: int, path: str) -> None:
        """Remove stale temporaries, once per folder in a store's life."""
        if path in self._swept:
            return
        self._swept.add(path)
        oldest = time.time() - STALE_SECONDS
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.name.startswith(TEMPORARY) and entry.stat(follow_symlinks=False).st_mtime < oldest:
                        os.unlink(entry.name, dir_fd=folder)

    # ---- reading

    def _fetch(self, item: Download) -> bool:
        with self._object(item.path) as (file, size):
            if size != item.bytes:
                return False
            with files.Arrival(item) as arrival:
                return arrival.fill(self._blocks(file, item.path))

    def _blocks(self, file: int, path: str) -> Iterator[memoryview]:
        with self._guard(path):
            yield from files.blocks(file)

    @contextmanager
    def _object(self, path: str) -> Iterator[tuple[int, int]]:
        """An object opened for reading, and its size in bytes."""
        *parts, name = names.check_path(path).split("/")
        try:
            with self._guard(path), self._folder(parts) as folder:
                file = self._open(folder, name)
        except _Absent as error:
            raise StoreNotFound(f"{path} is not in {self.url}: {error}") from error
        with files.opened(file):
            with self._guard(path):
                status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise StoreNotFound(f"{path} is not in {self.url}: what has this name is no regular file")
            yield file, status.st_size

    def _open(self, folder: int, name: str) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # not blocked by a pipe of that name
        try:
            return os.open(name, flags, dir_fd=folder)
        except FileNotFoundError:
            raise _Absent("there is no such file") from None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise self._link_refused(name) from None

    def _walk(self, folder: int, prefix: str) -> Iterator[Entry]:
        with os.scandir(folder) as entries:
            for entry in entries:
                path = prefix + entry.name
                if not names.is_path(path) or path == "lost+found":  # which file systems keep to themselves
                    continue
                with suppress(FileNotFoundError):  # deleted meanwhile
                    if entry.is_dir(follow_symlinks=False):
                        with files.opened(os.open(entry.name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)) as inner:
                            yield from self._walk(inner, path + "/")
                    elif entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        yield Entry(path, status.st_size, status.st_mtime)

    # ---- folders and errors

    @contextmanager
    def _folder(self, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
        """A handle on a folder below the root, reached without following links. Raises `_Absent`."""
        if create:
            self._root.mkdir(parents=True, exist_ok=True)
        try:
            folder = os.open(self._root, _FOLDER)
        except FileNotFoundError:
            raise StoreNotFound(
                f"the directory {self.url} does not exist: mount the volume there, or publish something to it first"
            ) from None
        try:
            for part in parts:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=folder)
                        _sync_folder(folder)
                inner = self._descend(folder, part)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    def _descend(self, folder: int, part: str) -> int:
        try:
            return os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
        except FileNotFoundError:
            raise _Absent(f"there is no folder {part!r}") from None
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            present = _stat(folder, part)
        if present is not None and stat.S_ISLNK(present.st_mode):
            raise self._link_refused(part)
        raise _Absent(f"{part!r} is not a folder")

    def _link_refused(self, name: str) -> StoreDenied:
        return StoreDenied(
            f"{name!r} in {self.url} is a symbolic link, and none is followed below the root, so that nothing leads out "
            "of it; put the real file or folder there, or open the store where the link points"
        )

    @contextmanager
    def _guard(self, path: str, needed: int = 0) -> Iterator[None]:
        """Turn the volume's `OSError` into the error that says what helps."""
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                raise files.no_space(self._root, path, needed) from error
            words = f"{path} in {self.url}: {files.words(error)}"
            if error.errno in _DENIED:
                raise StoreDenied(
                    f"{words}; check the volume's access mode and the permissions of this user"
                ) from error
            raise StoreUnavailable(f"{words}; check that the volume is mounted and healthy, then try again") from error


class _Absent(Exception):
    """There is no such folder or object; which error that makes depends on what was asked."""


def _stat(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _unlink(folder: int, name: str) -> None:
    """Remove an object that may be gone already; a folder of that name is no object."""
    with suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(name, dir_fd=folder)
        _sync_folder(folder)


def _sync_folder(folder: int) -> None:
    """Force a folder's names to disk, where the file system knows how."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise


def _rename_noreplace(folder: int, source: str, target: str) -> int:
    """Rename within a folder unless `target` exists; returns the errno, 0 for success."""
    call = getattr(_LIBC, "renameat2", None)
    if call is None:  # a libc older than 2018
        return errno.ENOSYS
    result: int = call(folder, os.fsencode(source), folder, os.fsencode(target), _RENAME_NOREPLACE)
    return 0 if result == 0 else ctypes.get_errno()
