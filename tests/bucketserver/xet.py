"""The two binary formats of Xet storage, as far as a server must read them.

A *xorb* is a run of compressed chunks, a *shard* lists which chunk ranges of which xorbs make up a file.
Pure functions over bytes; nothing is decompressed, because clients fetch compressed chunks.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

EMPTY = "0" * 64
"""Hash of the empty file, which has no terms and never touches storage."""

_BOOKEND = b"\xff" * 32
_ROW = 48  # bytes of every header and entry of a shard
_VERIFICATION = 1 << 31
_SHA256 = 1 << 30


class Chunk(NamedTuple):
    """One chunk of a xorb: its serialized bytes [start, end) and its length when decompressed."""

    start: int
    end: int
    length: int


class Term(NamedTuple):
    """A piece of a file: `length` bytes that are the chunks [first, last) of a xorb."""

    xorb: str
    length: int
    first: int
    last: int


def hash_hex(raw: bytes) -> str:
    """32 hash bytes in the form URLs use: four little-endian u64, each as 16 hex digits."""
    return "".join(f"{value:016x}" for value in struct.unpack("<4Q", raw))


def parse_xorb(data: bytes) -> list[Chunk]:
    """The chunks of a serialized xorb; a footer after them is ignored. Raises ValueError."""
    chunks: list[Chunk] = []
    at = 0
    while at + 8 <= len(data) and data[at] == 0:  # a chunk's version byte; a footer starts with a letter
        end = at + 8 + int.from_bytes(data[at + 1 : at + 4], "little")
        chunks.append(Chunk(at, end, int.from_bytes(data[at + 5 : at + 8], "little")))
        at = end
    if not chunks or chunks[-1].end > len(data):
        raise ValueError("not a xorb")
    return chunks


def parse_shard(data: bytes) -> dict[str, list[Term]]:
    """The files of an uploaded shard, by hash. Raises ValueError."""
    try:
        if struct.unpack_from("<Q", data, 32)[0] != 2:
            raise ValueError("unknown shard version")
        return _files(data)
    except struct.error as error:
        raise ValueError(f"not a shard: {error}") from error


def _files(data: bytes) -> dict[str, list[Term]]:
    files: dict[str, list[Term]] = {}
    at = _ROW
    while data[at : at + 32] != _BOOKEND:
        name = hash_hex(data[at : at + 32])
        flags, count = struct.unpack_from("<II", data, at + 32)
        at += _ROW
        terms = []
        for _ in range(count):
            length, first, last = struct.unpack_from("<III", data, at + 36)
            terms.append(Term(hash_hex(data[at : at + 32]), length, first, last))
            at += _ROW
        at += _ROW * count if flags & _VERIFICATION else 0
        at += _ROW if flags & _SHA256 else 0
        files[name] = terms
    return files
