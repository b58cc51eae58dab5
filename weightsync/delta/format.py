"""The bytes of a delta file: a valid safetensors file with a fixed-size header that we write ourselves.

The safetensors library writes `__metadata__` in random order, which would change digests from run to run. The header
has a fixed size so that it can be written last, when the payload has been streamed out. docs/format.md is the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightsync import canonical
from weightsync.codec import STREAMS
from weightsync.errors import FormatError, Unsupported

FORMAT = "weightsync.delta/1"
HEADER_BYTES = 1024
_HEX = re.compile("[0-9a-f]{64}")
SHARD_BYTES = 2_000_000_000
"""Largest data file in bytes."""

RECORD = np.dtype(
    [
        ("offset", "<u8"),
        ("n", "<u8"),
        ("k", "<u8"),
        ("first", "<u4"),
        ("segments", "<u4"),
        ("mode", "u1"),
        ("width", "u1"),
        ("flags", "<u2"),
        ("reserved", "<u4"),
        ("streams", [("coded", "<u4"), ("raw", "<u4")], (STREAMS,)),
    ]
)
"""A directory entry, 88 bytes."""

SEGMENT = np.dtype([("tensor", "<u4"), ("chunk", "<u4")])
"""A segment: a chunk of a tensor, both counted as in the schema."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a data file says of itself: weights digests (hex, `base` None for Full), its number, lengths of its parts."""

    base: str | None
    target: str
    shard: int
    payload: int
    directory: int
    segments: int

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return HEADER_BYTES + self.payload + self.directory + self.segments

    def pack(self) -> bytes:
        """The first 1,024 bytes of the file."""
        text = canonical.dumps(self._document())
        room = HEADER_BYTES - 8
        if len(text) > room:
            raise FormatError(f"delta header needs {len(text)} bytes, {room} are there")
        return room.to_bytes(8, "little") + text.ljust(room)

    def _document(self) -> dict[str, Any]:
        ends = np.cumsum([0, self.payload, self.directory, self.segments]).tolist()
        parts = zip(("payload", "directory", "segments"), ends, ends[1:], strict=False)
        return {
            "__metadata__": {
                "base": self.base or "none",
                "format": FORMAT,
                "requires": "",
                "shard": str(self.shard),
                "target": self.target,
            },
            **{name: {"data_offsets": [a, b], "dtype": "U8", "shape": [b - a]} for name, a, b in parts},
        }

    @classmethod
    def unpack(cls, data: bytes, what: str) -> Header:
        """From the untrusted first 1,024 bytes of a file; only the exact form that `pack` writes is taken."""
        if len(data) < HEADER_BYTES or int.from_bytes(data[:8], "little") != HEADER_BYTES - 8:
            raise FormatError(f"{what}: not a weightsync delta file (no {HEADER_BYTES}-byte header)")
        document = canonical.loads(data[8:HEADER_BYTES], f"{what}: its header")
        try:
            meta = document["__metadata__"]
            if meta["format"] != FORMAT:
                raise Unsupported(f"{what}: format {meta['format']!r} is not {FORMAT!r}; use a matching weightsync")
            if meta["requires"]:
                raise Unsupported(f"{what}: requires {meta['requires']!r}, which this version does not know")
            spans = [document[name]["data_offsets"] for name in ("payload", "directory", "segments")]
            header = cls(
                base=None if meta["base"] == "none" else meta["base"],
                target=meta["target"],
                shard=int(meta["shard"]),
                payload=spans[0][1] - spans[0][0],
                directory=spans[1][1] - spans[1][0],
                segments=spans[2][1] - spans[2][0],
            )
            digests = [header.target] + ([] if header.base is None else [header.base])
            if not all(_HEX.fullmatch(digest) for digest in digests):
                raise FormatError(f"{what}: its header names no weights")
            ok = min(header.payload, header.directory, header.segments, header.shard) >= 0 and header.pack() == data
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise FormatError(f"{what}: its header lacks a field or has a wrong one: {e!r}") from e
        if not ok:
            raise FormatError(f"{what}: its header is not in the form that weightsync writes")
        return header
