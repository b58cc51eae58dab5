"""One run of one container: its process, its log, how it is told to stop. Decides nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from devcluster.node import spawn
from devcluster.node.inside.spec import Launch
from devcluster.node.logs import LogWriter, last_words
from devcluster.node.mounts import ROOT_VARIABLE, without_mounts
from devcluster.node.spawn import Isolation, Process, StartFailed

MAX_MESSAGE = 4096  # bytes of a termination message, the kubelet's limit
DEATH_SECONDS = 5.0  # after SIGKILL; only what hangs in the kernel takes longer than a moment
DRAIN_SECONDS = 0.5  # how long a log may stay open after the end, by processes that outlived the first


@dataclass(frozen=True)
class Files:
    """Where a run leaves its traces."""

    log: Path
    termination: Path


@dataclass(frozen=True)
class Exit:
    """How a run ended."""

    code: int
    message: str


class Container:
    """A container that runs."""

    def __init__(self, launch: Launch, process: Process, log: LogWriter, files: Files, isolation: Isolation) -> None:
        self._launch, self._process, self._log, self._files = launch, process, log, files
        self._isolation = isolation
        self._deadline = float("inf")
        self._hastened = asyncio.Event()
        self.pid = process.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the first process, out of the blue."""
        self._process.signal(number)

    async def gone(self) -> None:
        """Wait until no process is left."""
        await asyncio.wait([self._process.exited], timeout=DEATH_SECONDS)

    async def exit(self, *, words_on_error: bool) -> Exit:
        """Wait for the end."""
        code = await asyncio.shield(self._process.exited)
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._log.closed.wait()
        code = code if code >= 0 else 128 - code
        message = ""
        with suppress(OSError), self._files.termination.open("rb") as file:
            message = file.read(MAX_MESSAGE).decode(errors="replace")
        if not message and code and words_on_error:
            message = last_words(self._files.log)
        return Exit(code, message)

    def hasten(self, deadline: float) -> None:
        """Let a stop that is under way end earlier."""
        self._deadline = min(self._deadline, deadline)
        self._hastened.set()

    async def stop(
        self, deadline: float, clock: Callable[[], float], hook: Callable[[float], Awaitable[object]]
    ) -> None:
        """Run the preStop hook, send SIGTERM, and SIGKILL once the deadline has passed."""
        self.hasten(deadline)
        if clock() < self._deadline:
            before = asyncio.ensure_future(hook(self._deadline - clock()))
            await self._until_deadline(clock, before)
            before.cancel()
            self._process.signal(signal.SIGTERM)
            await self._until_deadline(clock, self._process.exited)
        self._process.signal(signal.SIGKILL)

    async def _until_deadline(
        self, clock: Callable[[], float], future: asyncio.Future[object] | asyncio.Future[int]
    ) -> None:
        while not future.done() and not self._process.exited.done() and clock() < self._deadline:
            self._hastened.clear()
            hastened = asyncio.ensure_future(self._hastened.wait())
            waited = {future, hastened, self._process.exited}
            await asyncio.wait(waited, timeout=self._deadline - clock(), return_when=asyncio.FIRST_COMPLETED)
            hastened.cancel()

    async def execute(self, argv: list[str], timeout: float) -> tuple[int, str]:
        """Run a program inside; its exit code and what it wrote. TimeoutError kills it."""
        launch = self._launch
        if self._isolation is Isolation.NAMESPACES:
            inside = launch._replace(argv=tuple(argv), join=self.pid, root=None, mounts=())
        else:
            line, _ = without_mounts(argv, {}, launch.mounts, launch.env[ROOT_VARIABLE])
            inside = launch._replace(argv=line)
        reader, writer = os.pipe()
        try:
            process = await spawn.start(inside, writer, writer, self._isolation)
        except StartFailed as error:
            os.close(reader)
            return 126, str(error)
        finally:
            os.close(writer)
        output = asyncio.ensure_future(spawn.read_all(reader))
        try:
            async with asyncio.timeout(timeout):
                code = await asyncio.shield(process.exited)
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    await asyncio.shield(output)
        finally:
            process.signal(signal.SIGKILL)
            if not output.done():
                output.cancel()
        text = output.result() if output.done() and not output.cancelled() else b""
        return code if code >= 0 else 128 - code, text.decode(errors="replace")


async def start(launch: Launch, files: Files, isolation: Isolation, clock: Callable[[], float]) -> Container:
    """Start a container; raises StartFailed."""
    log = LogWriter(files.log, clock)
    pipes = [log.pipe("stdout"), log.pipe("stderr")]
    try:
        process = await spawn.start(launch, pipes[0], pipes[1], isolation)
    finally:
        for pipe in pipes:
            os.close(pipe)
    return Container(launch, process, log, files, isolation)
