"""Integer words in, bytes out, and back. No names, no files, no tensors.

`compare` finds what differs between two word arrays, `choose` picks a mode from counts alone, `encode` turns the
differences of one record into compressed streams, and `decode` turns untrusted streams back. This is the numpy
implementation; a faster one must produce the same streams.
"""

from weightsync.codec.difference import Dense, Difference, Sparse, compare, summed
from weightsync.codec.modes import GROUP_CHANGES, GROUP_WORDS, STREAMS, Mode, choose, largest, reversible
from weightsync.codec.record import Encoded, decode, encode, largest_raw, undo_bytes

__all__ = [
    "GROUP_CHANGES",
    "GROUP_WORDS",
    "STREAMS",
    "Dense",
    "Difference",
    "Encoded",
    "Mode",
    "Sparse",
    "choose",
    "compare",
    "decode",
    "encode",
    "largest",
    "largest_raw",
    "reversible",
    "summed",
    "undo_bytes",
]
