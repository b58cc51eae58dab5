"""Writing delta files: records in order, payload streamed out as they come, header last."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from weightsync.codec import Encoded
from weightsync.delta.format import HEADER_BYTES, RECORD, SEGMENT, SHARD_BYTES, Header
from weightsync.files import writing


@dataclass(frozen=True, slots=True)
class DataFile:
    """A finished data file under its content name."""

    sha256: str
    bytes: int


class DeltaWriter:
    """Appends records to data files in `folder`, each at most `shard_bytes` long, named by their sha256 when finished.

    Used as a context manager: leaving it by an exception removes what was begun. Only one thread may call `add`.
    """

    def __init__(self, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._limit = shard_bytes
        self._open: list[_Shard] = []

    def add(self, record: Encoded, segments: Sequence[tuple[int, int]]) -> None:
        """Append one record and its (tensor, chunk) segments."""
        more = record.bytes + RECORD.itemsize + len(segments) * SEGMENT.itemsize
        if not self._open or (self._open[-1].records and self._open[-1].bytes + more > self._limit):
            if self._open:
                self._open[-1].flush()
            self._open.append(_Shard(self._folder / f".tmp-{os.getpid()}-{len(self._open)}.safetensors"))
        self._open[-1].add(record, segments)

    def finish(self, *, base: str | None, target: str) -> list[DataFile]:
        """Write the headers, now that both weights digests (hex) are known, and give the files their names."""
        done = [shard.finish(base, target, i) for i, shard in enumerate(self._open)]
        self._open = []
        return done

    def __enter__(self) -> DeltaWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for shard in self._open:
            shard.discard()


class _Shard:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._payload = 0
        self._directory: list[bytes] = []
        self._segments: list[bytes] = []
        self._count = 0
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("wb")
            self._file.write(bytes(HEADER_BYTES))

    @property
    def records(self) -> int:
        return len(self._directory)

    @property
    def bytes(self) -> int:
        tables = self.records * RECORD.itemsize + self._count * SEGMENT.itemsize
        return HEADER_BYTES + self._payload + tables + 8

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

    def flush(self) -> None:
        with writing(self._path):
            self._file.flush()

    def finish(self, base: str | None, target: str, number: int) -> DataFile:
        padding = -self._payload % 8
        directory, segments = b"".join(self._directory), b"".join(self._segments)
        header = Header(base, target, number, self._payload + padding, len(directory), len(segments))
        with writing(self._path):
            self._file.write(bytes(padding) + directory + segments)
            self._file.seek(0)
            self._file.write(header.pack())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            with self._path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            self._path.replace(self._path.with_name(f"{sha256}.safetensors"))
        return DataFile(sha256, header.file_bytes)

    def discard(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)
