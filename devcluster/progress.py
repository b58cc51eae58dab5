"""Tell the person who waits what is going on: one line per step when it is done, a live counter on a terminal.

Everything goes to stderr; stdout belongs to what a shell may want to evaluate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm


def say(text: str) -> None:
    """Print one line."""
    print(f"devcluster: {text}", file=sys.stderr, flush=True)


@contextmanager
def step(what: str, unit: str, total: int | None = None) -> Iterator[tqdm]:
    """Show a counter that the block updates, and at its end how long it took."""
    began = time.monotonic()
    if not sys.stderr.isatty():
        say(f"{what} ...")
    # disable=None: no live counter where there is no terminal
    with tqdm(
        total=total,
        desc=f"devcluster: {what}",
        unit=unit,
        unit_scale=unit == "B",
        bar_format=None if total else "{desc}: {n_fmt}{unit}, {elapsed}",
        file=sys.stderr,
        leave=False,
        disable=None,
        dynamic_ncols=True,
    ) as counter:
        yield counter
    say(f"{what}: {time.monotonic() - began:.1f} s")
