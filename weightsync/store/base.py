"""The seam between the library and whatever keeps the bytes.

A store is a flat space of immutable objects named by slash-separated paths. The order in which a
publisher puts things (data and blobs, edge, manifest, name) is what makes a version appear whole;
a store only promises that each single object appears whole or not at all, is never overwritten,
and comes back as it went in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

READ_LIMIT = 64 << 20
"""Largest object, in bytes, that `Store.read` takes into memory unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a listing: path, size in bytes, modification time in Unix seconds."""

    path: str
    bytes: int
    modified: float


@dataclass(frozen=True, slots=True)
class Download:
    """One object to fetch into the file `dest`; `sha256` (hex) and `bytes` are checked before `dest` appears."""

    path: str
    dest: Path
    sha256: str
    bytes: int


class Store(Protocol):
    """What the library asks of a back end.

    Every method raises `StoreError` and its kinds for what the store does, `InputError` for a path that no store can
    hold or a source that cannot be read, and `TargetError` and its kinds (`NoSpace`) for a local file that cannot be
    written. Implementations may be used from one thread at a time.
    """

    @property
    def url(self) -> str:
        """The address as a user would write it, for messages."""

    def put(self, items: Mapping[str, Path | bytes], *, refresh_after: float = 12 * 3600) -> int:
        """Store each object whose path is free, and return how many bytes of content were handed over for that.

        An object that exists with the same size is left alone, or written again with the same content when it
        is older than `refresh_after` seconds (so that a clean-up does not take it from under its new user).
        One that exists with another size raises `StoreConflict`. Safe to call again after any failure and
        from two writers at once.
        """

    def get(self, items: Sequence[Download]) -> None:
        """Fetch objects to files, each checked against size and sha256 before its `dest` appears by rename.

        Raises `StoreNotFound`, or `StoreCorrupt` when a second try has wrong bytes too.
        """

    def read(self, path: str, *, sha256: str | None = None, limit: int = READ_LIMIT) -> bytes:
        """A small object's bytes; more than `limit` bytes are `StoreCorrupt`, before they are read.

        Pass `sha256` (hex) where it is known: without it, wrong bytes may go unnoticed.
        """

    def list(self, prefix: str) -> list[Entry]:
        """All objects below the folder `prefix` (which ends in "/", or is empty), in path order."""

    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects; ones that are already gone are no error."""
