"""Run the components as processes that can be stopped, frozen and killed, and never outlive this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

LAUNCH = Path(__file__).with_name("launch.py")
LAST_LINES = 15
FREEZE_SECONDS = 5.0


class ComponentFailed(RuntimeError):
    """A component ended by itself or did not become ready; carries the end of its log."""


class Spawner:
    """The thread that forks.

    A child's death signal comes when the thread that forked it ends, not the process; so it must be one
    that lives as long as the children shall, whichever thread asks for them.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="devcluster-spawner")

    def spawn(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a program in a session of its own, so that Ctrl-C reaches only us."""
        return self._thread.submit(self._spawn, command, log).result()

    def close(self) -> None:
        """End the thread, and with it every child that is left."""
        self._thread.shutdown()

    def _spawn(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(
                [*tied(), *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=log.parent,
                start_new_session=True,
            )


class Component:
    """One program of the control plane; it can be started again after it ended."""

    def __init__(self, name: str, command: Sequence[str], log: Path, spawner: Spawner) -> None:
        self.name, self.command, self.log = name, command, log
        self._spawner = spawner
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the process; it is ready later."""
        if self.pid is None:
            self._process = self._spawner.spawn(self.command, self.log)

    def check(self) -> None:
        """Raise when it is not running."""
        if self.pid is None:
            status = None if self._process is None else self._process.returncode
            raise self.failure("is not running" if status is None else f"ended with status {status}")

    def terminate(self) -> None:
        """Ask it to end; a frozen one is woken for that."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    def stop(self, grace: float) -> None:
        """Ask it to end, wait for `grace` seconds, then end it."""
        self.terminate()
        self.wait(grace)
        self.kill()

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, or not longer than `seconds`."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def kill(self) -> None:
        """End it without notice; returns when it is gone."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def freeze(self) -> None:
        """Stop it where it is; returns when no thread of it runs any more."""
        pid = self.pid
        if pid is None:
            return
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + FREEZE_SECONDS
        while not _frozen(pid):
            if time.monotonic() > deadline:
                raise self.failure("does not stop on SIGSTOP")
            time.sleep(0.001)

    def thaw(self) -> None:
        """Let a frozen one go on."""
        self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)  # looks first whether it has ended, so never hits a stranger

    def failure(self, what: str) -> ComponentFailed:
        """An error that shows the end of the log."""
        return ComponentFailed(f"{self.name} {what}; the end of {self.log}:\n{tail(self.log)}")


def tied() -> list[str]:
    """What to put before a command so that it dies with the thread that starts it."""
    return [sys.executable, "-I", "-S", str(LAUNCH), str(os.getpid())]


def tail(log: Path, lines: int = LAST_LINES) -> str:
    """The last lines of a log, without reading all of it."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - lines * 1000))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def _frozen(pid: int) -> bool:
    """Whether every thread is stopped. The state is the first field after the name in parentheses."""
    states = []
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            states.append(task.read_text().rpartition(")")[2].split()[0])
    return all(state in "TtZX" for state in states)
