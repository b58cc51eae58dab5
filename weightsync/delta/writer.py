"""Writing delta files: records in order, payload streamed out as they come, header last."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from weightsync.codec import Encoded
from weightsync.delta.format import HEADER_BYTES, RECORD, SEGMENT, SHARD_BYTES, Header
from weightsync.files import TEMPORARY, writing
from weightsync.manifest import Data

PADDING = 8
"""Reckoned for each file when its length is planned, whatever the payload then needs."""


class DeltaWriter:
    """Appends records to data files in `folder`, each at most `shard_bytes` long, named by their sha256 when finished.

    Used as a context manager: leaving it by an exception removes what was begun. Only one thread may call `add`. A file
    that is full is finished (hashed and brought to the disk) in the background.
    """

    def __init__(self, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._limit = shard_bytes
        self._open: _Shard | None = None
        self._done: list[Future[Data]] = []
        self._finisher = ThreadPoolExecutor(1, "weightsync-finish")

    def add(self, record: Encoded, segments: Sequence[tuple[int, int]]) -> None:
        """Append one record and its (tensor, chunk) segments."""
        more = record.bytes + RECORD.itemsize + len(segments) * SEGMENT.itemsize
        if self._open is not None and self._open.records and self._open.bytes + more > self._limit:
            self._roll()
        if self._open is None:
            self._open = _Shard(self._folder, len(self._done))
        self._open.add(record, segments)

    def finish(self) -> list[Data]:
        """Finish the last file; all files in order, under their names."""
        if self._open is not None:
            self._roll()
        return [future.result() for future in self._done]

    def _roll(self) -> None:
        if self._open is not None:
            self._done.append(self._finisher.submit(self._open.finish))
            self._open = None

    def __enter__(self) -> DeltaWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finisher.shutdown(wait=True)
        if self._open is not None:
            self._open.discard()
        if error is not None:
            for future in self._done:
                if future.exception() is None:
                    (self._folder / f"{future.result().sha256}.safetensors").unlink(missing_ok=True)


class _Shard:
    def __init__(self, folder: Path, number: int) -> None:
        self._path = folder / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}.safetensors"
        self._number = number
        self._payload = self._count = 0
        self._directory: list[bytes] = []
        self._segments: list[bytes] = []
        with writing(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self._path.open("xb")
            self._file.write(bytes(HEADER_BYTES))

    @property
    def records(self) -> int:
        return len(self._directory)

    @property
    def bytes(self) -> int:
        tables = self.records * RECORD.itemsize + self._count * SEGMENT.itemsize
        return HEADER_BYTES + self._payload + PADDING + tables

    def add(self, record: Encoded, segments: Sequence[tuple[int, int]]) -> None:
        sizes = [(len(data), raw) for data, raw in zip(record.coded, record.raw, strict=True)]
        entry = (self._payload, record.n, record.k, self._count, len(segments), record.mode, record.width, 0, 0, sizes)
        self._directory.append(np.array([entry], RECORD).tobytes())
        self._segments.append(np.array(segments, SEGMENT).tobytes())
        with writing(self._path):
            for data in record.coded:
                self._file.write(data)
        self._payload += record.bytes
        self._count += len(segments)

    def finish(self) -> Data:
        padding = -self._payload % PADDING
        directory, segments = b"".join(self._directory), b"".join(self._segments)
        header = Header(self._number, self._payload + padding, len(directory), len(segments))
        try:
            with writing(self._path, header.file_bytes):
                self._file.write(bytes(padding) + directory + segments)
                self._file.seek(0)
                self._file.write(header.pack())
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                with self._path.open("rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                self._path.replace(self._path.with_name(f"{sha256}.safetensors"))
        except BaseException:
            self.discard()
            raise
        return Data(sha256, header.file_bytes)

    def discard(self) -> None:
        with suppress(OSError):  # what was not written yet cannot be, on a full disk; it is not wanted either
            self._file.close()
        self._path.unlink(missing_ok=True)
