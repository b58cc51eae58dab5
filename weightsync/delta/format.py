"""The bytes of a delta file: a valid safetensors file with a fixed-size header that we write ourselves.

The safetensors library writes `__metadata__` in random order, which would change digests from run to run. The header
has a fixed size so that it can be written last, when the payload has been streamed out. docs/format.md is the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from weightsync import canonical
from weightsync.codec import STREAMS
from weightsync.errors import FormatError, Unsupported

FORMAT = "weightsync.delta/1"
HEADER_BYTES = 1024
ROOM = HEADER_BYTES - 8
PARTS = ("payload", "directory", "segments")
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
    """What a data file says of itself: its number within the edge, and the lengths of its parts in bytes.

    Which edge it belongs to is the edge's business, which names it by sha256. So a file can be finished, and hashed,
    before the digests of the checkpoints are known.
    """

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
        return ROOM.to_bytes(8, "little") + text.ljust(ROOM)

    def _document(self) -> dict[str, Any]:
        ends = np.cumsum([0, self.payload, self.directory, self.segments]).tolist()
        return {
            "__metadata__": {"format": FORMAT, "requires": "", "shard": str(self.shard)},
            **{
                name: {"data_offsets": [start, stop], "dtype": "U8", "shape": [stop - start]}
                for name, start, stop in zip(PARTS, ends, ends[1:], strict=False)
            },
        }

    @classmethod
    def unpack(cls, data: bytes, what: str) -> Header:
        """From the untrusted first 1,024 bytes of a file; only the exact form that `pack` writes is taken."""
        if len(data) < HEADER_BYTES or int.from_bytes(data[:8], "little") != ROOM:
            raise FormatError(f"{what}: not a weightsync delta file (no {HEADER_BYTES}-byte header)")
        document = canonical.loads(data[8:HEADER_BYTES], f"{what}: its header")
        try:
            meta = document["__metadata__"]
            if meta["format"] != FORMAT:
                raise Unsupported(f"{what}: format {meta['format']!r} is not {FORMAT!r}; use a matching weightsync")
            if meta["requires"]:
                raise Unsupported(f"{what}: requires {meta['requires']!r}, which this version does not know")
            lengths = [stop - start for start, stop in (document[name]["data_offsets"] for name in PARTS)]
            header = cls(int(meta["shard"]), *lengths)
            ok = min(header.shard, *lengths) >= 0 and header.pack() == data
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise FormatError(f"{what}: its header lacks a field or has a wrong one: {e!r}") from e
        if not ok:
            raise FormatError(f"{what}: its header is not in the form that weightsync writes")
        return header
