"""One model in a store: which versions and edges it has, and fetching them into a bundle, checked.

Names become manifests, listings become the links of the graph. What was fetched and proven once is not fetched again,
so that a pull that was killed goes on where it was.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from weightsync.bundle import DOCUMENT_LIMIT, Bundle, Version
from weightsync.errors import InputError, StoreConflict, StoreNotFound
from weightsync.files import need_room, write_whole, writing
from weightsync.graph import Link
from weightsync.manifest import Edge, Manifest
from weightsync.store import Download, Store, names

KEY = 16
"""Hex digits of a weights digest by which a listing knows a version."""


class Remote:
    """The model `model` in `store`."""

    def __init__(self, store: Store, model: str) -> None:
        self.store = store
        self.model = names.check_name(model)

    def versions(self) -> dict[str, str]:
        """The sha256 (hex) of the manifest of every published version, by its name."""
        found: dict[str, str] = {}
        for entry in self.store.list(f"{self.model}/names/"):
            name = names.parse_name_path(entry.path)
            if name is None:
                continue
            if name.version in found:
                raise StoreConflict(f"{self.store.url}: version {name.version!r} of {self.model!r} has two manifests")
            found[name.version] = name.manifest
        return found

    def find(self, version: str) -> str | None:
        """The sha256 (hex) of the manifest of one version, or None when it is not published."""
        listed = self.store.list(f"{self.model}/names/{names.check_name(version, 'version')}/")
        found = [name for name in (names.parse_name_path(entry.path) for entry in listed) if name]
        if len(found) > 1:
            raise StoreConflict(
                f"{self.store.url}: version {version!r} of {self.model!r} has {len(found)} manifests: two publishers "
                "gave different weights one name; remove the wrong name"
            )
        return found[0].manifest if found else None

    def resolve(self, version: str) -> str:
        """The sha256 (hex) of a version's manifest, from its name or from that sha256 itself."""
        if re.fullmatch("(sha256:)?[0-9a-f]{64}", version):
            return version.removeprefix("sha256:")
        found = self.find(version)
        if found is None:
            raise StoreNotFound(
                f"{self.store.url}: model {self.model!r} has no version {version!r}; see `weightsync graph`"
            )
        return found

    def links(self) -> list[Link]:
        """Every edge of the model, as far as one listing tells; nodes are the first 16 digits of weights digests."""
        found = (names.parse_edge_path(entry.path) for entry in self.store.list(f"{self.model}/edges/"))
        return [Link(edge.base16, edge.target16, edge.bytes, edge.sha256) for edge in found if edge]

    def edge(self, link: Link) -> Edge:
        """Read an edge that a listing named. Raises `StoreNotFound`, `FormatError` or a digest error."""
        base = link.base or "full"
        path = f"{self.model}/edges/{link.target}.{base}.{link.bytes}.{link.name}.json"
        return Edge.unpack(self.store.read(path, sha256=link.name), path)

    def known(self, link: Link) -> Link:
        """The link with everything that its edge says."""
        return Link.of(self.edge(link), link.name, lambda weights: weights[:KEY])

    def fetch_manifest(self, sha256: str, bundle: Bundle) -> Manifest:
        """Bring a manifest into the bundle."""
        path = bundle.manifest_path(sha256)
        if not _holds(path, sha256):
            write_whole(path, self.store.read(names.manifest_path(self.model, sha256), sha256=sha256))
        manifest = Manifest.unpack(path.read_bytes(), str(path))
        if manifest.model != self.model:
            raise InputError(f"manifest {sha256[:16]} belongs to model {manifest.model!r}, not {self.model!r}")
        return manifest

    def fetch_version(self, sha256: str, bundle: Bundle, *, whole: bool = False) -> Version:
        """Bring a version's manifest, schema and digests into the bundle; with `whole` its layout and assets too."""
        manifest = self.fetch_manifest(sha256, bundle)
        for blob in manifest.blobs if whole else (manifest.schema, manifest.digests):
            path = bundle.blob_path(blob)
            if not _holds(path, blob):
                data = self.store.read(names.blob_path(self.model, blob), sha256=blob, limit=DOCUMENT_LIMIT)
                write_whole(path, data)
        return bundle.version(sha256)

    def fetch_data(self, edge: Edge, bundle: Bundle) -> int:
        """Bring an edge's data files into the bundle; returns the bytes that were not there yet."""
        with writing(bundle.data_folder):
            bundle.data_folder.mkdir(parents=True, exist_ok=True)
        missing = [
            Download(names.data_path(self.model, data.sha256), bundle.data_path(data.sha256), data.sha256, data.bytes)
            for data in edge.data
            if not _holds(bundle.data_path(data.sha256), data.sha256)
        ]
        need_room(bundle.root, sum(item.bytes for item in missing), "the delta")
        if missing:
            self.store.get(missing)
        return sum(item.bytes for item in missing)


def _holds(path: Path, sha256: str) -> bool:
    """Whether the file is there and whole."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False
