"""One control plane for all worker processes of a test run, whichever needs it first.

Whoever comes first owns it: starts it, and at its own end waits until nobody uses it any more. Who does is
told by locks of the kernel only, so a worker that is killed is counted out at once. An owner that is
killed takes its control plane with it; whoever asks after that is the next owner.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO

from devcluster.access import Access

POLL_SECONDS = 0.1


@contextmanager
def shared(folder: Path, start: Callable[[], AbstractContextManager[Access]]) -> Iterator[Access]:
    """Give the control plane of all who name the same `folder`; the first one's `start` makes it."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        owner = stack.enter_context((folder / "owner").open("w"))
        users = stack.enter_context((folder / "users").open("w"))
        with _alone(folder):  # so the others wait while the first one starts it
            if _lock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB):
                access = stack.enter_context(start())
                stack.callback(_give_up, folder, owner, users)
                _write(folder, access)
            else:
                _lock(users, fcntl.LOCK_SH)
                access = _read(folder)
        yield access


def _give_up(folder: Path, owner: IO[str], users: IO[str]) -> None:
    """Wait until nobody else uses it, then let the next one to come start another."""
    while True:
        with _alone(folder):
            if _lock(users, fcntl.LOCK_EX | fcntl.LOCK_NB):
                _lock(users, fcntl.LOCK_UN)
                _lock(owner, fcntl.LOCK_UN)
                return
        time.sleep(POLL_SECONDS)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Only one at a time finds out, or changes, who is what."""
    with (folder / "deciding").open("w") as file:
        _lock(file, fcntl.LOCK_EX)
        yield


def _lock(file: IO[str], how: int) -> bool:
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    return True


def _write(folder: Path, access: Access) -> None:
    told = {"url": access.url, "folder": str(access.folder), "programs": str(access.programs)}
    (folder / "access.json").write_text(json.dumps(told))


def _read(folder: Path) -> Access:
    told = json.loads((folder / "access.json").read_text())
    return Access(told["url"], Path(told["folder"]), Path(told["programs"]))
