"""Remember etcd's data of the last second, so that they can be lost.

A copy is taken four times a second, each while every thread of etcd is stopped: it is what a crash at that
instant would have left. That costs etcd some ten milliseconds each time, and is done only where asked for.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from devcluster.processes import Component

PERIOD = 0.25
SECOND = 1.0


@dataclass(frozen=True)
class Copy:
    """The data as they were at the monotonic time `taken`."""

    taken: float
    folder: Path


class History:
    """Copies of the data of a running etcd. `lock` keeps others from stopping or starting it meanwhile."""

    def __init__(self, etcd: Component, data: Path, lock: threading.RLock) -> None:
        self._etcd, self._data, self._lock = etcd, data, lock
        self._folder = data.with_name("etcd-history")
        self._copies: list[Copy] = []
        self._number = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="devcluster-history", daemon=True)

    def start(self) -> None:
        """Begin to remember."""
        self._folder.mkdir()
        self._thread.start()

    def stop(self) -> None:
        """Remember no more; returns when no copy is being taken."""
        self._ended.set()
        self._thread.join()

    def a_second_ago(self) -> Copy:
        """The youngest copy that is at least a second old; waits where there is none yet."""
        if not self._thread.is_alive():
            raise RuntimeError("etcd's last second is not remembered any more; the thread that did has failed")
        with self._lock:
            if not self._copies:
                self.copy()
            age = time.monotonic() - self._copies[0].taken
            time.sleep(max(0.0, SECOND - age))
            return max(self._old(), key=lambda copy: copy.taken)

    def restore(self, copy: Copy) -> None:
        """Put the data back as they were, and forget what came later. Only while etcd is dead."""
        shutil.rmtree(self._data)
        _copy(copy.folder, self._data)
        for other in self._copies:
            shutil.rmtree(other.folder)
        self._copies.clear()

    def copy(self) -> None:
        """Take a copy, and forget those that nobody can ask for any more."""
        with self._lock:
            if self._etcd.pid is None:
                return
            self._number += 1
            target = self._folder / str(self._number)
            self._etcd.freeze()
            try:
                taken = time.monotonic()
                _copy(self._data, target)
            finally:
                self._etcd.thaw()
            self._copies.append(Copy(taken, target))
            for old in self._old()[:-1]:
                self._copies.remove(old)
                shutil.rmtree(old.folder)

    def _old(self) -> list[Copy]:
        """Those that are at least a second old, the oldest first."""
        limit = time.monotonic() - SECOND
        return [copy for copy in self._copies if copy.taken <= limit]

    def _run(self) -> None:
        while not self._ended.wait(PERIOD):
            self.copy()


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=_copy_data)


def _copy_data(source: str, target: str) -> None:
    """Copy a file and leave out its holes: etcd reserves 128 MB for its log, which is nearly empty here."""
    with Path(source).open("rb") as old, Path(target).open("wb") as new:
        size = os.fstat(old.fileno()).st_size
        os.ftruncate(new.fileno(), size)
        end = 0
        while end < size:
            try:
                start = os.lseek(old.fileno(), end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # no data from here on
                    return
                raise
            end = os.lseek(old.fileno(), start, os.SEEK_HOLE)
            while start < end:
                start += os.copy_file_range(old.fileno(), new.fileno(), end - start, start, start)
