"""One model in a store: which versions and edges it has, and fetching them into a bundle, checked.

Names become manifests, listings become the links of the graph. What was fetched and proven once is not fetched again,
so that a pull that was killed goes on where it was.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from weightsync import graph
from weightsync.bundle import BLOB_LIMIT, DOCUMENT_LIMIT, Bundle, Version
from weightsync.canonical import is_sha256
from weightsync.errors import FormatError, InputError, StoreConflict, StoreCorrupt, StoreNotFound, WeightsyncError
from weightsync.files import TEMPORARY, need_room, open_plain, write_whole, writing
from weightsync.graph import Link
from weightsync.manifest import Edge, Manifest
from weightsync.store import Download, Store, names

KEY = 16
"""Hex digits of a weights digest by which a listing knows a version."""

FILES_AT_ONCE = 2
"""Data files (of up to 2 GB) fetched by one call to the store."""


class Remote:
    """The model `model` in `store`."""

    def __init__(self, store: Store, model: str) -> None:
        self.store = store
        self.model = names.check_name(model)

    def versions(self) -> dict[str, list[str]]:
        """The sha256 (hex) of the manifest of every published version, by its name; more than one is a conflict."""
        found: dict[str, list[str]] = {}
        for entry in self.store.list(f"{self.model}/names/"):
            name = names.parse_name_path(entry.path)
            if name is not None:
                found.setdefault(name.version, []).append(name.manifest)
        return found

    def find(self, version: str) -> list[str]:
        """The sha256 (hex) of the manifests that go by one version's name: none, one, or a conflict."""
        listed = self.store.list(f"{self.model}/names/{names.check_name(version, 'version')}/")
        return [name.manifest for name in (names.parse_name_path(entry.path) for entry in listed) if name]

    def resolve(self, version: str) -> str:
        """The sha256 (hex) of a version's manifest, from its name or from that sha256 itself."""
        if is_sha256(version.removeprefix("sha256:")):
            return version.removeprefix("sha256:")
        found = self.find(version)
        if not found:
            raise StoreNotFound(
                f"{self.store.url}: model {self.model!r} has no version {version!r}; see `weightsync graph`"
            )
        if len(found) > 1:
            paths = ", ".join(names.name_path(self.model, version, manifest) for manifest in found)
            raise StoreConflict(
                f"{self.store.url}: version {version!r} of {self.model!r} stands for {len(found)} manifests; name one by its "
                f"sha256, or delete the wrong one of {paths}"
            )
        return found[0]

    def links(self) -> list[Link]:
        """Every edge of the model, as far as one listing tells; nodes are the first 16 digits of weights digests."""
        found = (names.parse_edge_path(entry.path) for entry in self.store.list(f"{self.model}/edges/"))
        return [Link(edge.base16, edge.target16, edge.bytes, edge.sha256) for edge in found if edge]

    def edge(self, link: Link) -> Edge:
        """Read an edge that a listing named, and check that it is what its name says."""
        name = names.EdgeName(link.target, link.base, link.bytes, link.name)
        path = names.listed_edge_path(self.model, name)
        edge = Edge.unpack(self.store.read(path, sha256=link.name, limit=DOCUMENT_LIMIT), path)
        if known(edge).base != link.base or known(edge).target != link.target or edge.size != link.bytes:
            raise FormatError(f"{path}: leads elsewhere, or costs otherwise, than its name says")
        return edge

    def fetch_manifest(self, sha256: str, bundle: Bundle) -> Manifest:
        """Bring a manifest into the bundle."""
        path = bundle.manifest_path(sha256)
        if not _holds(path, sha256):
            name = names.manifest_path(self.model, sha256)
            write_whole(path, self.store.read(name, sha256=sha256, limit=DOCUMENT_LIMIT))
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
                data = self.store.read(names.blob_path(self.model, blob), sha256=blob, limit=BLOB_LIMIT)
                write_whole(path, data)
        return bundle.version(sha256)

    def fetch_edge(self, edge: Edge, bundle: Bundle) -> int:
        """Bring an edge with both its versions and its data into the bundle; returns the data bytes fetched for that."""
        for end in (edge.base, edge.target):
            if end is not None:
                self.fetch_version(end.manifest, bundle, whole=True)
        with writing(bundle.data_folder):
            bundle.data_folder.mkdir(parents=True, exist_ok=True)
            for left in bundle.data_folder.glob(f"{TEMPORARY}*"):  # of a call that was killed; the folder is ours
                left.unlink(missing_ok=True)
        missing = [
            Download(names.data_path(self.model, data.sha256), bundle.data_path(data.sha256), data.sha256, data.bytes)
            for data in edge.data
            if not _holds(bundle.data_path(data.sha256), data.sha256)
        ]
        need_room(bundle.root, sum(item.bytes for item in missing), "the delta")
        for start in range(0, len(missing), FILES_AT_ONCE):  # what has arrived is not lost when a later one fails
            self.store.get(missing[start : start + FILES_AT_ONCE])
        bundle.put_edge(edge)
        return sum(item.bytes for item in missing)


class Routes:
    """Paths through a model's versions, as far as edges have proven usable: one that does not is left out from then on."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._links = {link.name: link for link in remote.links()}
        self._reasons: dict[str, str] = {}
        self.edges: dict[str, Edge] = {}
        self.left_out: dict[str, str] = {}

    def choose(self, held: str | None, needed: str, *, max_hops: int = graph.MAX_HOPS, full: bool = True) -> graph.Path:
        """The cheapest path between two weights digests (hex, or their first digits), every edge of it read."""
        while True:
            path = graph.cheapest(
                self._links.values(),
                held[:KEY] if held else None,
                needed[:KEY],
                excluded=self._reasons,
                max_hops=max_hops,
                full=full,
            )
            unread = [hop.link for hop in path.hops if hop.link.name not in self.edges]
            if not unread:
                return path
            for link in unread:
                try:
                    edge = self.edges[link.name] = self._remote.edge(link)
                    self._links[link.name] = known(edge)
                except (InputError, StoreCorrupt, StoreNotFound) as e:
                    self.leave_out(link.name, e)

    def leave_out(self, name: str, error: WeightsyncError) -> None:
        """Do not use the edge `name` again."""
        self.left_out[name], self._reasons[name] = str(error), error.reason


def known(edge: Edge) -> Link:
    """The edge as a link between the nodes of a listing."""
    return Link.of(edge, edge.sha256, lambda weights: weights[:KEY])


def _holds(path: Path, sha256: str) -> bool:
    """Whether the file is there and whole."""
    try:
        with open_plain(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False
