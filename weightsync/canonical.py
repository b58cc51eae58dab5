"""Canonical JSON: one byte sequence for one value, so that a sha256 names it.

Integers below 2**53, no floats, object keys sorted by their UTF-8 bytes, no white space, strings in UTF-8 and
escaped only where JSON demands it. Readers never re-encode: they hash the bytes they received and parse them with
`loads`, which refuses what two parsers could understand differently (duplicate keys, lone surrogates, huge numbers).
"""

from __future__ import annotations

import json
import re
from typing import Any

from weightsync.errors import FormatError

MAX_INTEGER = 2**53 - 1
MAX_DEPTH = 32
_SHA256 = re.compile("[0-9a-f]{64}")


def dumps(value: Any) -> bytes:
    """The canonical bytes of a tree of dict, list, str, int, bool and None. Raises `FormatError` on anything else."""
    _check(value, 0)
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise FormatError(f"text with a lone surrogate cannot be stored: {e.object[e.start : e.end]!r}") from e


def loads(data: bytes, what: str) -> dict[str, Any]:
    """Parse one JSON object from untrusted bytes; `what` names it in the `FormatError` of a refusal."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_float=_no_float, parse_constant=_no_float)
        _check(value, 0)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError, FormatError) as e:
        raise FormatError(f"{what} is not valid: {e}") from e
    if not isinstance(value, dict):
        raise FormatError(f"{what} is not a JSON object")
    return value


def is_sha256(text: Any) -> bool:
    """Whether this is a SHA-256 as documents and names write it: 64 lower-case hex digits."""
    return isinstance(text, str) and _SHA256.fullmatch(text) is not None


def _check(value: Any, depth: int) -> None:
    """Refuse values outside the canonical subset; sort order of str equals that of UTF-8 bytes, so keys need no care."""
    if depth > MAX_DEPTH:
        raise FormatError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise FormatError(f"object key {key!r} is not a string")
            _check(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check(item, depth + 1)
    elif isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise FormatError("an integer is 2**53 or more")
    elif not isinstance(value, str) and value is not None:
        raise FormatError(f"{type(value).__name__} is not allowed")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise FormatError(f"duplicate key {key!r}")
            seen.add(key)
    return value


def _no_float(text: str) -> Any:
    raise FormatError(f"number {text} is not an integer")
