"""A directory that appears whole or not at all.

It grows beside its final place under a hidden name and takes that place by one rename. The hidden folder carries a mark,
so that nothing that merely has its name is ever cleared.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weightsync.errors import TargetBusy, TargetError, TargetExists
from weightsync.files import FOLDER, lock_folder, sync_folder, writing

MARK = "building"


@contextmanager
def building(dest: Path, *, keep: bool = False) -> Iterator[Path]:
    """A hidden folder, empty but for our own, that becomes `dest` when the block succeeds and is removed otherwise.

    With `keep`, what lies in the library's own folder in it outlives a failure and is found by the next attempt. Raises
    `TargetExists` when `dest` exists, `TargetError` when the hidden name is taken, `TargetBusy` when another process
    builds it.
    """
    dest = dest.absolute()
    if dest.name in ("", "..") or (dest.exists() and dest.samefile(Path.cwd())):
        raise TargetError(f"{dest}: cannot be replaced while it is where we stand; name a new directory")
    if dest.is_symlink() or (dest.exists() and not is_empty(dest)):
        raise TargetExists(f"{dest}: exists already; name a new directory")
    folder = dest.with_name(f".{dest.name}.building")
    with writing(folder):
        dest.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError as e:
            raise TargetBusy(f"{dest}: another process has just made it; look again") from e
    try:
        _take(handle, folder, dest)
        try:
            yield folder
            with writing(dest):
                shutil.rmtree(folder / FOLDER)
                folder.rename(dest)
                sync_folder(dest.parent)
        except BaseException:
            _clear(folder)
            if not keep or is_empty_but_for_mark(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        os.close(handle)


def _take(handle: int, folder: Path, dest: Path) -> None:
    """Lock, mark and clear the hidden folder; whoever had it may have finished, and renamed it, a moment ago."""
    ours = lock_folder(handle, folder, exclusive=True)
    if not ours or not folder.is_dir() or not os.path.samestat(os.fstat(handle), folder.stat()):
        raise TargetBusy(f"{dest}: another process is making it; wait for it, then look again")
    mark = folder / FOLDER / MARK
    if not mark.is_file():
        if not is_empty(folder):
            raise TargetError(f"{folder}: is in the way and was not made by weightsync; move it away")
        with writing(mark):
            mark.parent.mkdir()
            mark.touch()
    _clear(folder)


def _clear(folder: Path) -> None:
    """Remove everything but our own folder."""
    with writing(folder):
        for path in folder.iterdir():
            if path.name == FOLDER:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def is_empty(folder: Path) -> bool:
    """Whether this is a directory without entries."""
    return folder.is_dir() and not any(folder.iterdir())


def is_empty_but_for_mark(folder: Path) -> bool:
    """Whether a cleared hidden folder holds nothing that the next attempt could use."""
    return not any(path.is_file() for path in (folder / FOLDER).rglob("*") if path.name != MARK)
