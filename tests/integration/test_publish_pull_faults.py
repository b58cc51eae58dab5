"""Stores that lost or damaged something, fail or refuse; sources that are no checkpoints or change while they are read."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import worlds
from worlds import MODEL, World, outcome, reset, stamps, tree, unlike

from bucketserver.client import BucketServer
from integration.places import KINDS, OLD_TOKEN, Place, clean, new_store, serving
from integration.stores import TOKEN, small_disk
from weightsync.assets import Asset
from weightsync.errors import (
    FormatError,
    NoPath,
    NoSpace,
    StoreCorrupt,
    StoreDenied,
    StoreError,
    StoreNotFound,
    StoreUnavailable,
    Unsupported,
)
from weightsync.manifest import Edge, Manifest
from weightsync.parallel import Workers
from weightsync.publish import publish
from weightsync.store import HubStore, VolumeStore, names

SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    """Give a bucket server."""
    with serving(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture(scope="module", params=KINDS)
def place(request: pytest.FixtureRequest, server: BucketServer, tiny: World) -> Place:
    """Give a store that holds all of them; what a test spoils it mends."""
    return Place(new_store(request.param, tiny.root, server), tiny).publish_all()


@pytest.fixture(scope="module")
def local(tiny: World) -> Place:
    """Give a volume with v0."""
    return Place(VolumeStore(tiny.root / "local"), tiny).publish_all(0, sibling=False)


@pytest.fixture
def dest(tiny: World) -> Path:
    """Give a directory that holds v0."""
    shutil.rmtree(tiny.root / ".dest.building", ignore_errors=True)
    return reset(tiny.root / "dest", tiny.trees[0])


def own(folder: Path) -> worlds.Tree:
    """A directory without what a failed pull keeps for the next one."""
    return {name: data for name, data in tree(folder).items() if not name.startswith(".weightsync/")}


# ---- objects that are damaged or gone


@pytest.mark.parametrize(
    ("part", "how"), [("data", "flipped"), ("data", "cut"), ("data", "gone"), ("edge", "flipped"), ("edge", "cut")]
)
def test_row_damaged_delta_in_the_store(place: Place, dest: Path, how: str, part: str) -> None:
    """A cheap edge that is damaged or incomplete is left out by name and reason; the next path leads there."""
    edge, items = place.merged(0, 3)
    assert edge.size < place.cost("v1", "v2", "v3")
    path = place.edge_path(edge) if part == "edge" else names.data_path(MODEL, edge.data[0].sha256)
    with place.extra(items):
        assert place.pull("v3", dest).hops == [f"+Merge:{edge.sha256[:16]}"]
        reset(dest, place.world.trees[0])
        with place.spoiled(path, how):
            done = place.pull("v3", dest)
    assert [hop[:6] for hop in done.hops] == ["+Delta"] * 3
    assert list(done.left_out) == [edge.sha256]
    assert all(path in words for words in done.left_out.values())
    assert clean(dest, place.world.trees[3]) == []


def test_row_damaged_full_copy_in_the_store(place: Place, dest: Path) -> None:
    """The same when starting from nothing: the older full copy and the deltas after it are taken."""
    shutil.rmtree(dest)
    edge, items = place.full(3)
    with place.extra(items):
        assert len(place.pull("v3", dest).hops) == 1
        shutil.rmtree(dest)
        with place.spoiled(names.data_path(MODEL, edge.data[0].sha256)):
            done = place.pull("v3", dest)
    assert [hop[:6] for hop in done.hops] == ["+Full:", *["+Delta"] * 3]
    assert list(done.left_out) == [edge.sha256]
    assert clean(dest, place.world.trees[3]) == []


@pytest.mark.parametrize(
    ("version", "part", "how"),
    [
        ("v2", "data", "flipped"),
        ("v2", "data", "gone"),
        ("v2", "edge", "gone"),
        ("v2", "manifest", "flipped"),
        ("v1", "manifest", "gone"),
    ],
)
def test_no_path_left(place: Place, dest: Path, version: str, part: str, how: str) -> None:
    """When every path is broken the error says what was left out and why, and not a byte of the directory changed."""
    before = stamps(dest)
    with place.spoiled(place.path(version, part), how), pytest.raises(NoPath) as caught:
        place.pull("v3", dest)
    assert re.search("StoreCorrupt|StoreNotFound|none from what is held", str(caught.value))
    assert stamps(dest).items() >= before.items()
    assert unlike(own(dest), place.world.trees[0]) == []
    place.pull("v3", dest)
    assert clean(dest, place.world.trees[3]) == []


@pytest.mark.parametrize("part", ["manifest", "schema"])
def test_target_version_is_damaged(place: Place, dest: Path, part: str) -> None:
    """A version whose own description is damaged cannot be pulled; the error names the object."""
    path = place.path("v3", part)
    with place.spoiled(path), pytest.raises(StoreCorrupt, match=re.escape(path)):
        place.pull("v3", dest)
    assert unlike(own(dest), place.world.trees[0]) == []


def test_unknown_requirement_is_another_path(place: Place, dest: Path) -> None:
    """An edge that needs a feature of the future is passed over, and the explanation says so."""
    start, goal = (place.edge(place.published[v].edges[0]["digest"]) for v in ("v1", "v3"))  # type: ignore[arg-type]
    edge = Edge("Delta", start.base, goal.target, (), 1, True, requires=("telepathy",))
    with place.extra({place.edge_path(edge): edge.pack()}):
        done = place.pull("v3", dest)
    assert len(done.hops) == 3
    assert "telepathy" in done.why
    assert clean(dest, place.world.trees[3]) == []


def test_listing_that_lies(place: Place, dest: Path) -> None:
    """Names that promise a short cut are not believed: what the edge itself says counts."""
    merged, items = place.merged(0, 2)
    first = place.edge(place.published["v1"].edges[0]["digest"])  # type: ignore[arg-type]
    lies = {
        place.edge_path(merged).replace(f".{merged.size}.", ".1."): merged.pack(),
        names.edge_path(
            MODEL, place.published["v3"].weights, place.published["v0"].weights, 0, first.sha256
        ): first.pack(),
    }
    with place.extra(lies), place.extra({path: data for path, data in items.items() if "/data/" in path}):
        done = place.pull("v3", dest)
    assert done.downloaded_bytes in (place.cost("v1", "v2", "v3"), merged.size + place.cost("v3"))
    assert clean(dest, place.world.trees[3]) == []


def hostile(place: Place, version: str, **fields: Any) -> dict[str, bytes]:
    """The objects of a version like v0 but for some fields of its manifest."""
    good = Manifest.unpack(place.store.read(names.manifest_path(MODEL, place.published["v0"].manifest)))
    manifest = replace(good, **fields)
    digest = worlds.sha256(manifest.pack())
    return {names.manifest_path(MODEL, digest): manifest.pack(), names.name_path(MODEL, version, digest): b""}


@pytest.mark.parametrize(
    "path", ["../evil.json", "/tmp/evil.json", "sub/evil.json", ".evil.json", "evil.so", "evil\n.json"]
)
def test_row_no_path_leaves_the_directory(local: Place, dest: Path, path: str) -> None:
    """A manifest whose small file would land elsewhere, or under a name that is no small file's, is refused."""
    blob = b"evil"
    asset = Asset(path, len(blob), worlds.sha256(blob))
    items = hostile(local, "evil", assets=(asset,)) | {names.blob_path(MODEL, asset.sha256): blob}
    before = {entry.name for entry in dest.parent.iterdir()}
    with local.extra(items):
        for folder in (dest, dest.parent / "fresh"):
            with pytest.raises(FormatError, match="asset entry is refused"):
                local.pull("evil", folder)
    assert {entry.name for entry in dest.parent.iterdir()} - before <= {".fresh.building"}
    assert unlike(own(dest), local.world.trees[0]) == []


@pytest.mark.parametrize("name", ["../x.safetensors", "/tmp/x.safetensors", "a/b.safetensors", "x.json"])
def test_row_no_weight_file_leaves_the_directory(local: Place, dest: Path, name: str) -> None:
    """A layout that would put weights elsewhere is refused."""
    good = Manifest.unpack(local.store.read(names.manifest_path(MODEL, local.published["v0"].manifest)))
    layout = local.store.read(names.blob_path(MODEL, good.layout)).replace(SECOND.encode(), name.encode())
    items = hostile(local, "evil", layout=worlds.sha256(layout)) | {
        names.blob_path(MODEL, worlds.sha256(layout)): layout
    }
    shutil.rmtree(dest)
    with local.extra(items), pytest.raises(FormatError, match="layout"):
        local.pull("evil", dest)
    assert not dest.exists()


def test_manifest_of_the_future(local: Place, dest: Path) -> None:
    """A version that requires an unknown feature is said to need a newer program."""
    with local.extra(hostile(local, "future", requires=("later",))), pytest.raises(Unsupported, match=r"later.*newer"):
        local.pull("future", dest)
    assert unlike(own(dest), local.world.trees[0]) == []


# ---- stores that do not answer as they must


def test_row_store_down(server: BucketServer, tiny: World, dest: Path) -> None:
    """While the Hub is down the directory keeps its version; afterwards the same call works."""
    place = Place(new_store("hub", tiny.root, server), tiny).publish_all(1, sibling=False)
    for match, faults in (("/api/buckets/", {"status": 503}), ("GET /xorb-data/", {"action": "cut", "after": 5})):
        server.fail(match, times=None, **faults)  # type: ignore[arg-type]
        with pytest.raises(StoreUnavailable):
            place.pull("v1", dest)
        with pytest.raises(StoreUnavailable):
            place.publish(tiny.folders[2], "v2", "v1")
        server.clear()
        assert unlike(own(dest), tiny.trees[0]) == []
        assert set(place.remote.versions()) == {"v0", "v1"}
    place.pull("v1", dest)
    assert clean(dest, tiny.trees[1]) == []


def test_row_store_throttles(server: BucketServer, tiny: World, dest: Path) -> None:
    """Requests that are refused for a while are repeated and cost time only."""
    place = Place(new_store("hub", tiny.root, server), tiny)
    server.fail("POST .*/batch", times=2, status=429)
    place.publish_all(1, sibling=False)
    server.fail("/api/buckets/", times=2, status=429)
    place.pull("v1", dest)
    server.clear()
    assert clean(dest, tiny.trees[1]) == []


def test_row_wrong_bytes_from_the_store(server: BucketServer, tiny: World, dest: Path) -> None:
    """When all that the Hub sends is garbled nothing is believed and the directory keeps its version."""
    place = Place(new_store("hub", tiny.root, server), tiny).publish_all(1, sibling=False)
    server.fail("GET /xorb-data/", "flip", times=None)
    with pytest.raises((StoreError, NoPath)):
        place.pull("v1", dest)
    server.clear()
    assert unlike(own(dest), tiny.trees[0]) == []


def test_row_token_expired(server: BucketServer, tiny: World, dest: Path) -> None:
    """A token that is no longer valid is said to need renewal."""
    good = Place(new_store("hub", tiny.root, server), tiny).publish_all(1, sibling=False)
    assert isinstance(good.store, HubStore)
    store = HubStore(
        good.store.url.split("/buckets/")[1].split("/some")[0], "some/prefix", token=OLD_TOKEN, endpoint=server.endpoint
    )
    old = replace(good, store=store)
    old.pull("v0", dest)
    server.revoke(OLD_TOKEN)
    for act in (lambda: old.pull("v1", dest), lambda: old.publish(tiny.folders[2], "v2", "v1")):
        with pytest.raises(StoreDenied, match="Renew the token"):
            act()
    assert unlike(own(dest), tiny.trees[0]) == []


def test_row_bucket_or_volume_missing(server: BucketServer, tiny: World, dest: Path) -> None:
    """A store that is not there is named."""
    bucket = HubStore("alice/nowhere", token=TOKEN, endpoint=server.endpoint)
    for store in (bucket, VolumeStore(tiny.root / "nowhere")):
        with pytest.raises(StoreNotFound, match="nowhere"):
            Place(store, tiny).pull("v1", dest)
    with pytest.raises(StoreNotFound, match="nowhere"):
        Place(bucket, tiny).publish(tiny.folders[0], "v0")
    assert not (tiny.root / "nowhere").exists()
    assert unlike(tree(dest), tiny.trees[0]) == []


def test_row_quota(server: BucketServer, tiny: World) -> None:
    """A batch of which the Hub refuses a part is an error; the version does not appear until a retry completes it."""
    place = Place(new_store("hub", tiny.root, server), tiny).publish_all(0, sibling=False)
    server.fail("POST .*/batch", "refuse", paths="/data/", times=None)
    with pytest.raises(StoreError, match="did not do 1 operations"):
        place.publish(tiny.folders[1], "v1", "v0", tiny.folders[0])
    server.clear()
    assert place.remote.find("v1") == []
    place.publish(tiny.folders[1], "v1", "v0", tiny.folders[0])
    assert place.remote.find("v1") != []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_row_volume_denies(local: Place) -> None:
    """A volume that this user may not read or write says so, for a pull and for a publish."""
    root = Path(local.store.url)
    root.chmod(0o700)
    for act in (
        lambda: local.pull("v0", Path("/tmp/never")),
        lambda: local.publish(local.world.folders[1], "v1"),
    ):
        scratch = local.world.root
        scratch.chmod(0o777)
        assert isinstance(outcome(act, uid=65534), StoreDenied)
    root.chmod(0o755)


# ---- full disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system of two megabytes."""
    with small_disk(tmp_path / "disk", 2 << 20) as folder:
        yield folder


@pytest.mark.parametrize(
    ("fresh", "leave"), [(False, 16 << 10), (False, 90 << 10), (True, 16 << 10), (True, 200 << 10)]
)
def test_row_target_too_small_for_a_pull(place: Place, disk: Path, fresh: bool, leave: int) -> None:
    """No room for what is fetched or made: it is said, what was there stays, and with room it works."""
    target = disk / "target"
    if not fresh:
        reset(target, place.world.trees[0])
    filler = disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(disk).free - leave))
    with pytest.raises(NoSpace, match=r"\d+ bytes"):
        place.pull("v3", target)
    kept = {} if fresh else place.world.trees[0]
    found = tree(target)
    assert unlike({name: data for name, data in found.items() if ".weightsync" not in name}, kept) == []
    assert target.exists() == (not fresh)
    filler.unlink()
    place.pull("v3", target)
    assert clean(target, place.world.trees[3]) == []


def test_row_no_space_says_how_much_is_needed(tiny: World, local: Place, disk: Path) -> None:
    """Whatever it is that does not fit, the message has needed and available bytes."""
    fill = disk / "filler"
    fill.write_bytes(bytes(shutil.disk_usage(disk).free - 8192))
    with pytest.raises(NoSpace, match=r"\d+ bytes.*\d+"):
        local.pull("v0", disk / "target")


def short_of_room(act: Callable[[], object]) -> None:
    """Run what must find no room."""
    with pytest.raises(NoSpace, match=r"\d+ bytes"):
        act()


def test_row_volume_too_small_for_a_publication(tiny: World, disk: Path) -> None:
    """A full volume, or a full scratch folder, is said; no version appears, and with room the retry completes it."""
    place = Place(VolumeStore(disk / "volume"), tiny).publish_all(0, sibling=False)
    filler = disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(disk).free - (24 << 10)))
    short_of_room(lambda: place.publish(tiny.folders[1], "v1", "v0", tiny.folders[0]))
    with Workers(1) as workers:
        short_of_room(lambda: publish(tiny.folders[1], place.remote, "v1", disk / "scratch", workers))
    assert set(place.remote.versions()) == {"v0"}
    shutil.rmtree(disk / "scratch")
    filler.unlink()
    place.publish(tiny.folders[1], "v1", "v0", tiny.folders[0])
    place.pull("v1", disk / "out")
    assert clean(disk / "out", tiny.trees[1]) == []
