"""Numbers as people read them, and the shape of a command's outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """What a command has to say: an object for `--json`, lines for people, and its exit status."""

    data: dict[str, Any]
    lines: list[str]
    status: int = 0


def size(count: int) -> str:
    """Bytes with a unit: 1 536 is "1.5 KiB"."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def ratio(whole: int, part: int) -> str:
    """How many times smaller `part` is."""
    return f"{whole / part:.4g}x smaller" if part else "nothing to send"


def percent(part: int, whole: int) -> str:
    """A share, with enough digits to tell 0.01 % from nothing."""
    return f"{100 * part / whole:.3g} %" if whole else "0 %"


def plural(count: int, noun: str) -> str:
    """The count and the noun, in the plural where that is due."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
