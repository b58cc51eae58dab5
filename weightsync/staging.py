"""A directory that appears whole or not at all.

It grows beside its final place under a hidden name and takes that place by one rename. The hidden folder carries a mark,
so that nothing that merely has its name is ever cleared.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weightsync.errors import TargetBusy, TargetError, TargetExists
from weightsync.files import FOLDER, lock_folder, sync_folder, writing

MARK = "made-by-weightsync"
CONTENT = "content"


@contextmanager
def building(dest: Path, *, keep: bool = False) -> Iterator[Path]:
    """An empty folder that becomes `dest` when the block succeeds and is removed otherwise.

    With `keep`, what lies beside it (in its parent, which is hidden and ours alone) outlives a failure and is found by
    the next attempt. Raises `TargetExists` when `dest` exists, `TargetError` when the hidden name is taken, `TargetBusy`
    when another process builds it.
    """
    dest = dest.absolute()
    if dest.name in ("", "..") or (dest.exists() and dest.samefile(Path.cwd())):
        raise TargetError(f"{dest}: cannot be replaced while it is where we stand; name a new directory")
    if dest.is_symlink() or (dest.exists() and not is_empty(dest)):
        sweep(dest)
        raise TargetExists(f"{dest}: exists already; name a new directory")
    hidden = _hidden(dest)
    with writing(hidden):
        dest.parent.mkdir(parents=True, exist_ok=True)
        hidden.mkdir(exist_ok=True)
        try:
            handle = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError as e:
            raise TargetBusy(f"{dest}: another process has just made it; look again") from e
    try:
        content = _take(handle, hidden, dest)
        try:
            yield content
            with writing(dest):
                shutil.rmtree(content / FOLDER, ignore_errors=True)
                content.rename(dest)
                sync_folder(dest.parent)
        except BaseException:
            shutil.rmtree(content, ignore_errors=True)
            if not keep or not any(path.is_file() for path in hidden.rglob("*") if path.name != MARK):
                _discard(hidden)
            raise
        _discard(hidden)
    finally:
        os.close(handle)


def _hidden(dest: Path) -> Path:
    return dest.with_name(f".{dest.name}.building")


def sweep(dest: Path) -> None:
    """Remove what a call left that was killed after `dest` had appeared, unless somebody is at work there."""
    hidden = _hidden(dest.absolute())
    with suppress(OSError, TargetError):
        handle = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if lock_folder(handle, hidden, exclusive=True) and ((hidden / MARK).is_file() or is_empty(hidden)):
                _discard(hidden)
        finally:
            os.close(handle)


def _discard(hidden: Path) -> None:
    """Remove the hidden folder, the mark last: until then a later call knows that it is ours."""
    with suppress(OSError):
        for path in hidden.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != MARK:
                path.unlink()
        (hidden / MARK).unlink(missing_ok=True)
        hidden.rmdir()


def _take(handle: int, hidden: Path, dest: Path) -> Path:
    """Lock and mark the hidden folder and make the one in it; whoever had it may have finished a moment ago."""
    ours = lock_folder(handle, hidden, exclusive=True)
    if not ours or not hidden.is_dir() or not os.path.samestat(os.fstat(handle), hidden.stat()):
        raise TargetBusy(f"{dest}: another process is making it; wait for it, then look again")
    mark = hidden / MARK
    if not mark.is_file() and not is_empty(hidden):
        raise TargetError(f"{hidden}: is in the way and was not made by weightsync; move it away")
    content = hidden / CONTENT
    with writing(hidden):
        mark.touch()
        if content.is_symlink() or content.is_file():
            content.unlink()
        elif content.exists():
            shutil.rmtree(content)
        content.mkdir()
    return content


def is_empty(folder: Path) -> bool:
    """Whether this is a directory without entries."""
    return folder.is_dir() and not any(folder.iterdir())
