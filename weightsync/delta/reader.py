"""Reading delta files: nothing in them is believed before it was checked against the schema they are used with.

Opening maps the files and checks every field of every directory entry at once, as columns; a record's streams are
checked when they are decoded. The sha256 of a file is the business of whoever hands it over.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weightsync.codec import Difference, Mode, decode, largest, largest_raw, reversible
from weightsync.codec.modes import GROUP_SEGMENTS
from weightsync.delta.format import HEADER_BYTES, RECORD, SEGMENT, Header
from weightsync.errors import FormatError, Unsupported
from weightsync.files import open_plain
from weightsync.schema import CHUNK_BYTES, Schema


@dataclass(frozen=True)
class Delta:
    """The records of one edge, over all its data files, in ascending order of their segments.

    `records` (R,) is the directory with `first` counting over all files, `segments` (S,) the (tensor, chunk) pairs,
    `lengths` (S,) their words, `shards` (R,) the file each record lies in.
    """

    paths: tuple[Path, ...]
    headers: tuple[Header, ...]
    maps: tuple[memoryview, ...]
    records: npt.NDArray[np.void]
    segments: npt.NDArray[np.void]
    lengths: npt.NDArray[np.int64]
    shards: npt.NDArray[np.int64]
    full: bool

    @classmethod
    def open(cls, paths: Sequence[Path], schema: Schema, *, full: bool = False) -> Delta:
        """Map and check the data files of one edge, a Full one or not. Raises `FormatError` or `Unsupported`."""
        headers: list[Header] = []
        maps: list[memoryview] = []
        tables: list[tuple[npt.NDArray[np.void], npt.NDArray[np.void]]] = []
        for i, path in enumerate(paths):
            view = _map(path)
            header = Header.unpack(bytes(view[:HEADER_BYTES]), str(path))
            if header.file_bytes != len(view):
                raise FormatError(f"{path}: has {len(view)} bytes, its header says {header.file_bytes}")
            if header.shard != i:
                raise FormatError(f"{path}: is data file {header.shard}, expected {i}")
            headers.append(header)
            maps.append(view[HEADER_BYTES:])
            tables.append(_tables(view[HEADER_BYTES:], header, str(path)))
        records = np.concatenate([t[0] for t in tables]) if tables else np.empty(0, RECORD)
        segments = np.concatenate([t[1] for t in tables]) if tables else np.empty(0, SEGMENT)
        shards = np.repeat(np.arange(len(tables)), [len(t[0]) for t in tables])
        starts = np.cumsum([0] + [len(t[1]) for t in tables[:-1]]) if tables else np.zeros(0, np.int64)
        records["first"] += starts[shards].astype(np.uint32)
        what = str(paths[0]) if paths else "an edge without data"
        lengths = _check(records, segments, schema, what, full=full)
        return cls(tuple(paths), tuple(headers), tuple(maps), records, segments, lengths, shards, full)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def reversible(self) -> bool:
        """Whether every record also leads back."""
        return all(reversible(Mode(mode)) for mode in np.unique(self.records["mode"]))

    def span(self, record: int) -> slice:
        """The record's rows in `segments` and `lengths`."""
        first = int(self.records["first"][record])
        return slice(first, first + int(self.records["segments"][record]))

    def decode(self, record: int) -> Difference:
        """Decompress and check one record. Raises `FormatError` that names it."""
        entry = self.records[record]
        view = self.maps[int(self.shards[record])]
        at = int(entry["offset"])
        parts = []
        for coded in entry["streams"]["coded"].tolist():
            parts.append(view[at : at + coded])
            at += coded
        try:
            mode, width = Mode(int(entry["mode"])), int(entry["width"])
            return decode(mode, width, int(entry["n"]), int(entry["k"]), parts, entry["streams"]["raw"].tolist())
        except FormatError as e:
            raise FormatError(f"{self.paths[int(self.shards[record])]}: record {record}: {e}") from e


def _map(path: Path) -> memoryview:
    try:
        with open_plain(path) as file:
            size = file.seek(0, 2)
            if size < HEADER_BYTES:
                raise FormatError(f"{path}: {size} bytes are too short for a delta file")
            return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
    except OSError as e:
        raise FormatError(f"{path}: cannot be read: {e.strerror or e}") from e


def _tables(body: memoryview, header: Header, what: str) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """Directory (copied) and segments of one file; their offsets are checked against this file's own payload."""
    if header.directory % RECORD.itemsize or header.segments % SEGMENT.itemsize or header.payload % 8:
        raise FormatError(f"{what}: directory, segments or payload have an impossible length")
    records = np.frombuffer(body[header.payload : header.payload + header.directory], RECORD).copy()
    segments = np.frombuffer(body[header.payload + header.directory :], SEGMENT)
    sizes = records["streams"]["coded"].astype(np.uint64).sum(axis=1)
    ends = np.cumsum(sizes, dtype=np.uint64)
    if (records["offset"] != ends - sizes).any():
        raise FormatError(f"{what}: record offsets do not follow each other")
    if int(ends[-1] if len(ends) else 0) + 7 < header.payload or int(ends[-1] if len(ends) else 0) > header.payload:
        raise FormatError(f"{what}: the records do not fill the payload")
    counts = records["segments"].astype(np.uint64)
    ends = np.cumsum(counts, dtype=np.uint64)
    if (records["first"] != ends - counts).any() or int(ends[-1] if len(ends) else 0) != len(segments):
        raise FormatError(f"{what}: the records do not cover the segments")
    return records, segments


def _check(
    records: npt.NDArray[np.void], segments: npt.NDArray[np.void], schema: Schema, what: str, *, full: bool
) -> npt.NDArray[np.int64]:
    """Every field of every entry against the schema; returns the words of each segment."""
    tensors, chunks = segments["tensor"].astype(np.int64), segments["chunk"].astype(np.int64)
    if len(tensors) and int(tensors.max()) >= len(schema):
        raise FormatError(f"{what}: a segment names tensor {int(tensors.max())}, there are {len(schema)}")
    if (chunks >= np.diff(schema.chunk_starts)[tensors]).any():
        raise FormatError(f"{what}: a segment names a chunk beyond its tensor")
    if (np.diff(schema.chunk_starts[tensors] + chunks) <= 0).any():
        raise FormatError(f"{what}: segments are not in ascending order")
    known = np.array([int(mode) for mode in Mode if mode != Mode.CLASSES])
    if (records["mode"] == Mode.CLASSES).any():
        raise Unsupported(f"{what}: needs the feature 'classes'; use a newer version of weightsync")
    if (~np.isin(records["mode"], known)).any():
        raise FormatError(f"{what}: a record has an unknown mode")
    if ((records["mode"] == Mode.FULL) != full).any():
        kind = "with a base in a Full edge" if full else "without a base in an edge that has one"
        raise FormatError(f"{what}: holds a record {kind}")
    if records["flags"].any() or records["reserved"].any():
        raise FormatError(f"{what}: reserved fields of a record are not zero")
    counts = records["segments"].astype(np.int64)
    if (counts == 0).any():
        raise FormatError(f"{what}: a record has no segments")
    if (counts > GROUP_SEGMENTS).any():
        raise FormatError(f"{what}: a record has more than {GROUP_SEGMENTS} segments")
    # a writer that knows the type chooses the width; a reader need not know the type
    widths = np.repeat(records["width"].astype(np.int64), counts)
    nbytes = schema.chunk_lengths(tensors, chunks)
    if not np.isin(widths, (1, 2, 4)).all() or (nbytes % widths).any():
        raise FormatError(f"{what}: a record's word size is not 1, 2 or 4, or does not divide its chunks")
    lengths: npt.NDArray[np.int64] = nbytes // widths
    if len(records):
        totals = np.add.reduceat(lengths, np.cumsum(counts) - counts)
        if (records["n"] != totals).any():
            raise FormatError(f"{what}: a record's number of words is not that of its segments")
    if (
        (records["k"] > records["n"]).any()
        or (records["k"] == 0).any()
        or (full and (records["k"] != records["n"]).any())
    ):
        raise FormatError(f"{what}: a record's number of changes is impossible")
    _check_streams(records, what)
    return lengths


def _check_streams(records: npt.NDArray[np.void], what: str) -> None:
    """The length of every stream against what its record's counts allow, one mode and width at a time."""
    coded, raw = records["streams"]["coded"], records["streams"]["raw"]
    if (coded > raw).any():
        raise FormatError(f"{what}: a record's stream grew by compression")
    for mode, width in set(zip(records["mode"].tolist(), records["width"].tolist(), strict=True)):
        rows = (records["mode"] == mode) & (records["width"] == width)
        words, changes = largest(Mode(mode), CHUNK_BYTES // width)
        if (records["n"][rows] > words).any() or (records["k"][rows] > changes).any():
            raise FormatError(f"{what}: a record is larger than any that is written")
        n, k = records["n"][rows].astype(np.int64), records["k"][rows].astype(np.int64)
        for slot, limit in enumerate(largest_raw(Mode(mode), width, n, k)):
            if (raw[rows, slot] > limit).any():
                raise FormatError(f"{what}: a record's stream is longer than its counts allow")
