"""Container logs: lines as the kubelet keeps them (time, stream, text), and what `kubectl logs` asks of them.

`LogWriter` is fed by a pipe, `select` is pure. Logs are not rotated; they go with the pod.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from devcluster.node import pods

CHUNK = 1 << 16
MAX_LINE = 16 * 1024  # a longer line is kept in parts, as container runtimes do
TAIL_BYTES, TAIL_LINES = 2048, 80  # of a log that stands in for a termination message


@dataclass(frozen=True)
class Query:
    """What `kubectl logs` may ask for."""

    tail: int | None = None
    since: float | None = None  # a moment
    limit_bytes: int | None = None
    timestamps: bool = False
    follow: bool = False
    previous: bool = False


class LogWriter:
    """Copies what comes through pipes into one log file."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._file = path.open("ab", buffering=0)
        self._clock = clock
        self._open = 0
        self.closed = asyncio.Event()

    def pipe(self, stream: str) -> int:
        """The writing end of a new pipe; the caller closes it once a child has it."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        rest = bytearray()
        self._open += 1
        asyncio.get_running_loop().add_reader(reader, self._readable, reader, stream, rest)
        return writer

    def _readable(self, fd: int, stream: str, rest: bytearray) -> None:
        with suppress(BlockingIOError):
            chunk = os.read(fd, CHUNK)
            rest += chunk
            *lines, tail = bytes(rest).split(b"\n")
            if len(tail) > MAX_LINE or (tail and not chunk):
                lines, tail = [*lines, tail], b""
            rest[:] = tail
            if lines:
                stamp = datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
                head = f"{stamp} {stream} F ".encode()
                self._file.write(b"".join(head + line + b"\n" for line in lines))
            if not chunk:
                self._end(fd)

    def _end(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        self._open -= 1
        if not self._open:
            self._file.close()
            self.closed.set()


def select(lines: Iterable[bytes], query: Query) -> bytes:
    """The part of a log that was asked for, as it is shown."""
    kept = [line for line in lines if line.endswith(b"\n")]
    if query.since is not None:
        kept = [line for line in kept if pods.seconds(line.split(b" ", 1)[0][:26].decode() + "Z") >= query.since]
    if query.tail is not None:
        kept = kept[len(kept) - min(query.tail, len(kept)) :]
    shown = b"".join(shown_line(line, timestamps=query.timestamps) for line in kept)
    return shown if query.limit_bytes is None else shown[: query.limit_bytes]


def shown_line(line: bytes, *, timestamps: bool) -> bytes:
    """One line of the file as a reader sees it."""
    stamp, _, _, text = line.split(b" ", 3)
    return stamp + b" " + text if timestamps else text


def last_words(path: Path) -> str:
    """The end of a log, for a container that failed without a message."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - MAX_LINE - CHUNK - 4 * TAIL_BYTES)  # at least one whole line, however long
        file.seek(start)
        # only at "\n": a program may print "\r", as progress bars do
        lines = [line + b"\n" for line in file.read().split(b"\n")[1 if start else 0 : -1]]
        return select(lines, Query(tail=TAIL_LINES))[-TAIL_BYTES:].decode(errors="replace")
    return ""
