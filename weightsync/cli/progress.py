"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from weightsync.digests import Progress, silent


@contextmanager
def bar(title: str, total: int | None, *, quiet: bool) -> Iterator[Progress]:
    """A bar over `total` bytes (None: unknown), for the time of the block; may be advanced from several threads."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield silent
        return
    lock = threading.Lock()
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, leave=False, file=sys.stderr) as line:

        def advance(count: int) -> None:
            with lock:
                line.update(count)

        yield advance
