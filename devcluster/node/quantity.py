"""Read Kubernetes quantities ("250m", "1Gi", "1e3") exactly. Pure."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1)}
_UNITS |= {unit: Fraction(1000) ** power for power, unit in enumerate("kMGTPE", 1)}
_UNITS |= {unit + "i": Fraction(1024) ** power for power, unit in enumerate("KMGTPE", 1)}
_PATTERN = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d{1,3})|(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?)")


def quantity(text: str | int | float) -> Fraction:
    """The exact value of a quantity."""
    match = _PATTERN.fullmatch(str(text).strip())
    if not match:
        raise ValueError(f"{text!r} is no quantity")
    number, exponent, unit = match.groups()
    return Fraction(number) * (Fraction(10) ** int(exponent) if exponent else _UNITS[unit or ""])


def whole(text: str | int | float, divisor: str | int | float = 1) -> int:
    """A quantity in units of `divisor`, rounded up, as resourceFieldRef gives it."""
    by = quantity(divisor) or Fraction(1)
    value = quantity(text) / by
    return -((-value.numerator) // value.denominator)
