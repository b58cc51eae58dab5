"""A chain of versions in a store of either kind, and ways to spoil single objects of it for the time of a test."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import worlds
from worlds import MODEL, Tree, World, tree

from bucketserver.client import BucketServer
from integration.stores import TOKEN, fresh_client
from weightsync.bundle import Bundle
from weightsync.delta.make import make_merge
from weightsync.manifest import Edge, Manifest
from weightsync.parallel import Workers
from weightsync.publish import Parent, Published, publish
from weightsync.pull import Pulled, pull
from weightsync.remote import Remote
from weightsync.store import HubStore, Store, VolumeStore, names

KINDS = ["volume", "hub"]

OLD_TOKEN = "hf_old"
"""Another token of the same user, for tests to revoke."""


@contextmanager
def serving(home: Path) -> Iterator[BucketServer]:
    """A bucket server, and a Hub client that has met no other."""
    with pytest.MonkeyPatch.context() as monkeypatch, BucketServer({TOKEN: "alice", OLD_TOKEN: "alice"}) as server:
        fresh_client(monkeypatch, home)
        yield server


def new_store(kind: str, folder: Path, server: BucketServer) -> Store:
    """An empty store of a kind."""
    if kind == "volume":
        return VolumeStore(folder / f"volume-{time.monotonic_ns()}")
    bucket = f"alice/place-{time.monotonic_ns()}"
    server.create(bucket, token=TOKEN)
    return HubStore(bucket, "some/prefix", token=TOKEN, endpoint=server.endpoint)


@dataclass(frozen=True)
class Place:
    """One model in a store, and the world whose versions it holds as v0, v1 … and sibling."""

    store: Store
    world: World
    published: dict[str, Published] = field(default_factory=dict)
    model: str = MODEL

    @property
    def remote(self) -> Remote:
        """What publishers and pullers use."""
        return Remote(self.store, self.model)

    def publish(
        self, source: Path, version: str, parent: str | None = None, origin: Path | None = None, **options: Any
    ) -> Published:
        """Publish, by default without further full copies."""
        with Workers(options.pop("threads", 1)) as workers, tempfile.TemporaryDirectory(dir=self.world.root) as scratch:
            return publish(
                source,
                self.remote,
                version,
                Path(scratch) / "new",
                workers,
                parent=Parent(parent, origin) if parent else None,
                **{"full_ratio": 1e9, **options},
            )

    def publish_all(self, last: int = 3, *, sibling: bool = True) -> Place:
        """The chain up to v`last`, and the sibling, each as a delta from its parent's checkpoint."""
        folders = self.world.folders
        self.published["v0"] = self.publish(folders[0], "v0")
        for i in range(1, last + 1):
            self.published[f"v{i}"] = self.publish(folders[i], f"v{i}", f"v{i - 1}", folders[i - 1])
        if sibling:
            self.published["sibling"] = self.publish(self.world.sibling, "sibling", "v1", folders[1])
        return self

    def pull(self, version: str, dest: Path, **options: Any) -> Pulled:
        """Pull."""
        with Workers(options.pop("threads", 1)) as workers:
            return pull(self.remote, version, dest, workers, **options)

    def listing(self) -> list[str]:
        """The path of every object."""
        return [entry.path for entry in self.store.list("")]

    def cost(self, *versions: str) -> int:
        """Bytes of the first edge that was published with each of the versions."""
        return sum(int(str(self.published[version].edges[0]["bytes"])) for version in versions)

    def edge(self, name: str) -> Edge:
        """The edge whose sha256 begins so."""
        return next(self.remote.edge(link) for link in self.remote.links() if link.name.startswith(name))

    def edge_path(self, edge: Edge) -> str:
        """Where an edge lies in the store."""
        base = edge.base.weights if edge.base else None
        return names.edge_path(MODEL, edge.target.weights, base, edge.size, edge.sha256)

    def path(self, version: str, part: str) -> str:
        """An object of a version: its `edge`, the edge's `data`, its `manifest`, or its `schema` blob."""
        done = self.published[version]
        edge = self.edge(str(done.edges[0]["digest"]))
        if part == "edge":
            return self.edge_path(edge)
        if part == "data":
            return names.data_path(MODEL, edge.data[0].sha256)
        if part == "manifest":
            return names.manifest_path(MODEL, done.manifest)
        manifest = Manifest.unpack(self.store.read(names.manifest_path(MODEL, done.manifest)))
        return names.blob_path(MODEL, manifest.schema)

    @contextmanager
    def spoiled(self, path: str, how: str = "flipped") -> Iterator[None]:
        """An object with one bit flipped, cut short by a byte, or gone; afterwards it is as it was."""
        good = self.store.read(path)
        bad = {"flipped": good[:-9] + bytes([good[-9] ^ 4]) + good[-8:], "cut": good[:-1], "gone": None}[how]
        self.store.delete([path])
        if bad is not None:
            self.store.put({path: bad})
        try:
            yield
        finally:
            self.store.delete([path])
            self.store.put({path: good})

    @contextmanager
    def extra(self, items: dict[str, bytes]) -> Iterator[None]:
        """More objects for a while."""
        new = {path: data for path, data in items.items() if path not in self.listing()}
        self.store.put(new)
        try:
            yield
        finally:
            self.store.delete(new)

    def merged(self, start: int, goal: int) -> tuple[Edge, dict[str, bytes]]:
        """One edge that does what a chain of the world does, and the objects that publishing it would put."""
        with tempfile.TemporaryDirectory(dir=self.world.root) as folder, Workers(1) as workers:
            bundle = Bundle(Path(folder) / "merged")
            bundle.start()
            return self._objects(make_merge(self.world.steps(start, goal), bundle, workers).edge, bundle)

    def full(self, version: int) -> tuple[Edge, dict[str, bytes]]:
        """The same for a full copy of a version of the world."""
        with tempfile.TemporaryDirectory(dir=self.world.root) as folder:
            source = self.world.folders[version]
            bundle = worlds.edge(source, source, Path(folder) / "full", full=True)
            return self._objects(bundle.edge(), bundle)

    def _objects(self, edge: Edge, bundle: Bundle) -> tuple[Edge, dict[str, bytes]]:
        data = {names.data_path(MODEL, one.sha256): bundle.data_path(one.sha256).read_bytes() for one in edge.data}
        return edge, data | {self.edge_path(edge): edge.pack()}


def clean(folder: Path, expected: Tree) -> list[str]:
    """What differs from the expected tree, and hidden leftovers beside the directory."""
    beside = [path.name for path in folder.parent.iterdir() if path.name.startswith(f".{folder.name}")]
    return worlds.unlike(tree(folder), expected) + [f"{name} is left beside" for name in beside]
