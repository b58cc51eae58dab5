"""Start processes for containers: each the first of a PID namespace of its own, tied to the agent's life.

If the agent dies by whatever means, the kernel kills the first process of each namespace and with it
everything in there. Without the right to make namespaces (see `Isolation`) a container is a process group,
and only its first process is tied to the agent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path

from devcluster.node.inside import syscalls
from devcluster.node.inside.spec import Launch

_PROGRAM = "import sys; sys.path.append({root!r}); from devcluster.node.inside.main import run; run({spec}, {error})"
_ROOT = str(Path(__file__).resolve().parent.parent.parent)


class StartFailed(RuntimeError):
    """The program could not be executed."""


class Isolation(Enum):
    """What the agent may do."""

    NAMESPACES = "namespaces"  # as root, or as root of a user namespace
    NONE = "none"


class Process:
    """A running program and, with namespaces, all its descendants."""

    def __init__(self, popen: subprocess.Popen[bytes], isolation: Isolation) -> None:
        self._popen = popen
        self._isolation = isolation
        self.pid = popen.pid
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pidfd = os.pidfd_open(popen.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._popen.wait()
        if self._isolation is Isolation.NONE:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # what the program left behind
        if not self.exited.done():
            self.exited.set_result(self._popen.returncode)

    def signal(self, number: int) -> None:
        """Send a signal to the first process; SIGKILL reaches all."""
        if self._popen.returncode is not None:
            return
        with suppress(ProcessLookupError):
            if self._isolation is Isolation.NONE and number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)


async def start(launch: Launch, stdout: int, stderr: int, isolation: Isolation) -> Process:
    """Start a program; returns once it is executing, raises StartFailed if it never will."""
    spec = os.memfd_create("launch")
    reader, writer = os.pipe()
    try:
        os.write(spec, launch.dump())
        os.lseek(spec, 0, os.SEEK_SET)
        program = _PROGRAM.format(root=_ROOT, spec=spec, error=writer)
        arguments = [sys.executable, "-E", "-s", "-S", "-c", program]
        own_namespace = isolation is Isolation.NAMESPACES and launch.join is None
        popen = _in_new_pid_namespace(
            lambda: subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={},
                cwd="/",
                pass_fds=(spec, writer),
                start_new_session=True,
            ),
            wanted=own_namespace,
        )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(spec)
        os.close(writer)
    process = Process(popen, isolation)
    try:
        message = await read_all(reader)
    except BaseException:
        process.signal(signal.SIGKILL)
        raise
    if message:
        await process.exited
        raise StartFailed(message.decode(errors="replace"))
    return process


def _in_new_pid_namespace(fork: Callable[[], subprocess.Popen[bytes]], *, wanted: bool) -> subprocess.Popen[bytes]:
    """Fork so that the child is the first process of a new PID namespace; the caller stays in its own."""
    if not wanted:
        return fork()
    # Only this thread's future children are concerned, and it makes no others in between.
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        syscalls.unshare(syscalls.CLONE_NEWPID)
        try:
            return fork()
        finally:
            syscalls.setns(own, syscalls.CLONE_NEWPID)
    finally:
        os.close(own)


async def read_all(fd: int) -> bytes:
    """What comes out of a pipe until it closes."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    chunks: list[bytes] = []

    def readable() -> None:
        chunk = os.read(fd, 4096)
        if chunk:
            chunks.append(chunk)
        elif not done.done():
            done.set_result(None)

    loop.add_reader(fd, readable)
    try:
        await done
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return b"".join(chunks)
