"""The element types of safetensors and how their bytes are compared.

The codec never interprets a value: it sees little-endian unsigned words of 1, 2 or 4 bytes. Comparing as floats would
call -0 equal to +0 and NaN unequal to itself. Types of 8 bytes are two words; types below one byte, and types that a
later safetensors may add, are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weightsync.errors import CheckpointError

BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of one element, for each dtype string of safetensors 0.8."""

NON_FINITE: dict[str, tuple[int, int]] = {
    "BF16": (0x7FFF, 0x7F80), "F16": (0x7FFF, 0x7C00), "F32": (0x7FFFFFFF, 0x7F800000),
    "F8_E5M2": (0x7F, 0x7C), "C64": (0x7FFFFFFF, 0x7F800000), "F64": (0x7FFFFFFF, 0x7FF00000),
}  # fmt: skip
"""(mask, infinity): a word is infinite or NaN when (word & mask) >= infinity. Of an F64 only the high word tells, and only
a change of it is noticed.

Types without infinities are not counted.
"""


def word_bytes(dtype: str) -> int:
    """Bytes of the word (1, 2 or 4) in which tensors of this type are compared."""
    bits = BITS.get(dtype, 8)
    return {16: 2, 32: 4, 64: 4}.get(bits, 1)


def check_length(name: str, dtype: str, shape: Sequence[int], length: int) -> None:
    """Raise `CheckpointError` when `length` bytes cannot hold `shape` elements of a known `dtype`."""
    bits = BITS.get(dtype)
    if bits is None:
        return
    want, rest = divmod(math.prod(shape) * bits, 8)
    if rest or want != length:
        size = f"{8 * want + rest} bits" if rest else f"{want} bytes"
        raise CheckpointError(f"tensor {name!r}: {dtype}{list(shape)} takes {size}, its offsets span {length} bytes")
