"""Faults that a test switches on while the server runs, and the order in which they are used up.

A fault names the requests it strikes by a regular expression over "METHOD /path" and how many of them.
Which part of an answer it changes is up to the routes; this module only keeps the list.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Any

ACTIONS = ("status", "cut", "flip", "refuse", "understate")


@dataclass
class Fault:
    """One switched-on fault.

    `action` is one of: `status` (answer `status` with `headers`), `cut` (send `after` bytes of the body,
    then close; -1 closes without any answer), `flip` (invert the body's byte `at`), `refuse` (a batch does
    not do operations of `kind` on paths that match `paths`), `understate` (sizes in the answer are `by`
    bytes too small). `times` is how many requests are struck, None means all.
    """

    match: str
    action: str
    times: int | None = 1
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    after: int = 0
    at: int = 100
    paths: str = ""
    kind: str = ""
    by: int = 1

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"unknown action {self.action!r}, known: {', '.join(ACTIONS)}")
        re.compile(self.match)
        re.compile(self.paths)


class Faults:
    """The switched-on faults, safe to use from all request threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

    def add(self, description: dict[str, Any]) -> None:
        """Switch a fault on; the keys are the fields of `Fault`. Raises TypeError, ValueError, re.error."""
        fault = Fault(**description)
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        """Switch all faults off."""
        with self._lock:
            self._faults.clear()

    def take(self, method: str, path: str) -> Fault | None:
        """The oldest fault that strikes this request, used up by one; None when none does."""
        request = f"{method} {path}"
        with self._lock:
            for fault in self._faults:
                if fault.times != 0 and re.search(fault.match, request):
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return None
