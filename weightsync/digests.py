"""The digests that identify weights: xxh3-128 of each chunk, and sha256 over all of them.

xxh3 runs at memory speed and guards against accidents only. What makes a version authentic is the sha256 of its
manifest, which names the sha256 of these digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from weightsync.checkpoint import Checkpoint
from weightsync.errors import FormatError
from weightsync.parallel import Workers
from weightsync.schema import CHUNK_BYTES, Schema

DIGEST_BYTES = 16

Digests: TypeAlias = npt.NDArray[np.uint8]
"""(C, 16): the canonical (big-endian) xxh3-128, seed 0, of each chunk in the order of the schema."""

Progress: TypeAlias = Callable[[int], object]
"""Called with the number of bytes just done, possibly from several threads."""


def silent(_: int) -> None:
    """Progress that nobody watches."""


def chunk_digest(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The 16 bytes that identify one chunk."""
    return np.frombuffer(xxhash.xxh3_128_digest(data.data), np.uint8)


def batches(schema: Schema) -> Iterator[range]:
    """All chunk indices in order, in runs of about one chunk's bytes: a thousand tiny tensors are one task."""
    every = np.arange(schema.chunks)
    tensors = np.searchsorted(schema.chunk_starts, every, side="right") - 1
    ends = np.cumsum(schema.chunk_lengths(tensors, every - schema.chunk_starts[tensors]))
    start = done = 0
    while start < schema.chunks:
        stop = max(int(np.searchsorted(ends, done + CHUNK_BYTES, side="right")), start + 1)
        yield range(start, stop)
        start, done = stop, int(ends[stop - 1])


def of_checkpoint(checkpoint: Checkpoint, workers: Workers, progress: Progress = silent) -> Digests:
    """The digests of all chunks of a checkpoint, read once."""
    out = np.empty((checkpoint.schema.chunks, DIGEST_BYTES), np.uint8)

    def work(run: range) -> None:
        for index in run:
            data = checkpoint.chunk(*checkpoint.schema.locate(index))
            out[index] = chunk_digest(data)
            progress(data.nbytes)

    workers.run(work, batches(checkpoint.schema))
    return out


def parse(blob: bytes, schema: Schema) -> Digests:
    """Digests from an untrusted blob. Raises `FormatError` when it does not fit the schema."""
    if len(blob) != schema.chunks * DIGEST_BYTES:
        raise FormatError(f"digests blob has {len(blob)} bytes, {schema.chunks * DIGEST_BYTES} expected")
    return np.frombuffer(blob, np.uint8).reshape(-1, DIGEST_BYTES)


def weights_digest(schema: Schema, digests: Digests) -> str:
    """The identity (hex) of a set of tensors, whatever files they lie in: sha256(sha256(schema) + sha256(digests))."""
    return hashlib.sha256(schema.sha256 + hashlib.sha256(digests.tobytes()).digest()).hexdigest()
