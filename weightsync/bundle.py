"""A folder that holds one edge and everything needed to use it: data files, both manifests, their blobs.

It has the shape of a model's folder in a store. `diff` and `merge` write one, `apply` reads one, `publish` uploads
one, `pull` fetches into one. Whatever is read from it is checked against the sha256 in its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weightsync import assets, digests
from weightsync.checkpoint import Checkpoint
from weightsync.digests import Digests
from weightsync.errors import DigestMismatch, FormatError, InputError, TargetError
from weightsync.files import FOLDER, open_plain, read_plain, write_whole, writing
from weightsync.layout import Layout
from weightsync.manifest import Data, Edge, End, Manifest
from weightsync.schema import Schema

PARTS = ("data", "blobs", "manifests", "edges")

BLOB_LIMIT = 1 << 30
"""Largest blob in bytes that is taken into memory."""

DOCUMENT_LIMIT = 4 << 20
"""Largest manifest or edge in bytes; parsed, it takes some thirty times as much memory."""


@dataclass(frozen=True)
class Version:
    """A manifest and what its schema and digests blobs hold."""

    manifest: Manifest
    schema: Schema
    digests: Digests

    @property
    def sha256(self) -> str:
        """The digest (hex) that names its manifest."""
        return self.manifest.sha256

    @property
    def end(self) -> End:
        """This version as the end of an edge."""
        return End(self.manifest.weights, self.sha256)


def describe(checkpoint: Checkpoint, chunk_digests: Digests, model: str) -> tuple[Version, Mapping[str, bytes]]:
    """The version that a checkpoint with these digests is, and the blobs its manifest names, by sha256 (hex)."""
    contents, _ = checkpoint.contents
    schema = checkpoint.schema
    named = [schema.blob, chunk_digests.tobytes(), checkpoint.layout.blob]
    blobs = {hashlib.sha256(blob).hexdigest(): blob for blob in [*named, *contents.values()]}
    manifest = Manifest(
        model=model,
        schema=schema.sha256.hex(),
        digests=hashlib.sha256(named[1]).hexdigest(),
        layout=hashlib.sha256(named[2]).hexdigest(),
        assets=assets.describe(contents),
        weights=digests.weights_digest(schema, chunk_digests),
    )
    return Version(manifest, schema, chunk_digests), blobs


class Bundle:
    """The folder `root`; it need not exist before something is put into it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._versions: dict[str, Version] = {}
        self._schemas: dict[str, Schema] = {}

    @property
    def data_folder(self) -> Path:
        """Where the data files lie."""
        return self.root / "data"

    def data_path(self, sha256: str) -> Path:
        """Where the data file of this digest lies."""
        return self.data_folder / f"{sha256}.safetensors"

    def blob_path(self, sha256: str) -> Path:
        """Where the blob of this digest lies."""
        return self.root / "blobs" / sha256

    def manifest_path(self, sha256: str) -> Path:
        """Where the manifest of this digest lies."""
        return self.root / "manifests" / f"{sha256}.json"

    def edge_path(self, edge: Edge) -> Path:
        """Where this edge lies; its name says where it leads and what it costs."""
        base = edge.base.weights[:16] if edge.base else "full"
        return self.root / "edges" / f"{edge.target.weights[:16]}.{base}.{edge.size}.{edge.sha256}.json"

    def put_version(self, version: Version, blobs: Mapping[str, bytes]) -> None:
        """Write a manifest and the blobs it names."""
        for sha256, blob in blobs.items():
            write_whole(self.blob_path(sha256), blob)
        write_whole(self.manifest_path(version.sha256), version.manifest.pack())

    def put_edge(self, edge: Edge) -> None:
        """Write the edge, last of all: a folder without one is unfinished."""
        write_whole(self.edge_path(edge), edge.pack())

    def edge(self) -> Edge:
        """The one edge. Raises `FormatError` when there is none, several, or a damaged one."""
        if not self.root.is_dir():
            raise InputError(f"{self.root}: is no directory; a delta is the directory that `weightsync diff` wrote")
        found = sorted((self.root / "edges").glob("*.json"))
        if len(found) != 1:
            raise FormatError(f"{self.root}: holds {len(found)} edges, expected one: not a folder written by `diff`?")
        return _edge(found[0])

    def find_edge(self, sha256: str) -> Edge | None:
        """The edge of this digest, if it was put here."""
        found = sorted((self.root / "edges").glob(f"*.{sha256}.json"))
        return _edge(found[0]) if found else None

    def blob(self, sha256: str, limit: int = BLOB_LIMIT) -> bytes:
        """A blob, checked."""
        return _checked(self.blob_path(sha256), sha256, limit)

    def version(self, sha256: str) -> Version:
        """A manifest with its schema and digests, all checked, the weights digest recomputed; parsed once."""
        if sha256 not in self._versions:
            path = self.manifest_path(sha256)
            manifest = Manifest.unpack(_checked(path, sha256, DOCUMENT_LIMIT), str(path))
            schema = self._schema(manifest.schema)
            chunk_digests = digests.parse(self.blob(manifest.digests), schema)
            if digests.weights_digest(schema, chunk_digests) != manifest.weights:
                raise FormatError(f"{path}: its weights digest is not that of its schema and digests")
            self._versions[sha256] = Version(manifest, schema, chunk_digests)
        return self._versions[sha256]

    def _schema(self, sha256: str) -> Schema:
        if sha256 not in self._schemas:
            self._schemas[sha256] = Schema.parse(self.blob(sha256))
        return self._schemas[sha256]

    def layout(self, version: Version) -> Layout:
        """The version's files, checked to hold exactly the tensors of its schema."""
        layout = Layout.parse(self.blob(version.manifest.layout))
        layout.check_tensors(version.schema)
        return layout

    def assets(self, version: Version) -> dict[str, bytes]:
        """The version's small files by name, checked."""
        contents = {asset.path: self.blob(asset.sha256, asset.bytes) for asset in version.manifest.assets}
        for asset in version.manifest.assets:
            if len(contents[asset.path]) != asset.bytes:
                raise FormatError(f"{self.root}: {asset.path} has {len(contents[asset.path])} bytes, not {asset.bytes}")
        return contents

    def data(self, edge: Edge) -> list[Path]:
        """The edge's data files, each checked against its sha256 and length."""
        return [self._data(entry) for entry in edge.data]

    def _data(self, entry: Data) -> Path:
        path = self.data_path(entry.sha256)
        try:
            with open_plain(path) as file:
                size = file.seek(0, 2)
                if size != entry.bytes:
                    raise DigestMismatch(
                        f"{path}: has {size} bytes, the edge says {entry.bytes}: truncated or replaced"
                    )
                file.seek(0)
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as e:
            raise FormatError(f"{path}: cannot be read: {e.strerror or e}") from e
        if found != entry.sha256:
            raise DigestMismatch(f"{path}: its bytes do not have the sha256 in its name; fetch or make it again")
        return path

    def refuse_links(self) -> None:
        """Raise `TargetError` when the folder, or one in it, is a symbolic link: writing here must stay here."""
        for path in (self.root.parent, self.root, *(self.root / part for part in PARTS)):
            if path.is_symlink():
                raise TargetError(f"{path}: is a symbolic link; remove it")

    def start(self) -> None:
        """Make the folder for a new edge. Raises `TargetError` when something is there already."""
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            if any(path.name != FOLDER for path in self.root.iterdir()):
                raise TargetError(f"{self.root}: is not empty; name a new directory")
            self.data_folder.mkdir()


def _edge(path: Path) -> Edge:
    return Edge.unpack(_checked(path, path.name.split(".")[-2], DOCUMENT_LIMIT), str(path))


def _checked(path: Path, sha256: str, limit: int) -> bytes:
    try:
        data = read_plain(path, limit)
    except OSError as e:
        raise FormatError(f"{path}: cannot be read: {e.strerror or e}") from e
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DigestMismatch(f"{path}: its bytes do not have the sha256 in its name; fetch or make it again")
    return data
