"""Threads over chunks and records, with results in order and a bounded number of them in flight.

numpy, zstandard and xxhash release the interpreter lock on large buffers, so threads are enough. With one thread
everything runs in the caller, which keeps profiles and tracebacks simple.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 2
"""Tasks in flight for each thread: enough that none waits, few enough that memory stays bounded."""


def default_threads() -> int:
    """As many as this process may use, at most 8: beyond that memory bandwidth is what limits."""
    return min(8, len(os.sched_getaffinity(0)))


class Workers(AbstractContextManager["Workers"]):
    """A pool of `threads` threads."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or default_threads()
        self._pool = ThreadPoolExecutor(self.threads, "weightsync") if self.threads > 1 else None

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """`function` of each item, in order; items are drawn only as results are taken."""
        if self._pool is None:
            yield from map(function, items)
            return
        flight: deque[Future[R]] = deque()
        source = iter(items)
        try:
            for item in source:
                flight.append(self._pool.submit(function, item))
                if len(flight) >= self.threads * AHEAD:
                    yield flight.popleft().result()
            while flight:
                yield flight.popleft().result()
        finally:
            for future in flight:
                future.cancel()
            for future in flight:  # nothing may still touch the caller's buffers once this returns
                if not future.cancelled():
                    future.exception()

    def run(self, function: Callable[[T], object], items: Iterable[T]) -> None:
        """`map` for the effect alone."""
        for _ in self.map(function, items):
            pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
