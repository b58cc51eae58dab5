"""Publishing a chain of versions into either kind of store, and getting every one of them back, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import worlds
from worlds import MODEL, World, reset, stamps, tree, unlike

from bucketserver.client import BucketServer
from integration.places import KINDS, Place, clean, new_store, serving
from weightsync.errors import NoPath
from weightsync.store import VolumeStore


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    """Give a bucket server."""
    with serving(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture(scope="module", params=KINDS)
def place(request: pytest.FixtureRequest, server: BucketServer, tiny: World) -> Place:
    """Give a store that holds all of them; what a test adds must not lead to them."""
    return Place(new_store(request.param, tiny.root, server), tiny).publish_all()


@pytest.fixture(params=KINDS)
def empty(request: pytest.FixtureRequest, server: BucketServer, tiny: World) -> Place:
    """Give an empty store."""
    return Place(new_store(request.param, tiny.root, server), tiny)


@pytest.fixture
def dest(tiny: World) -> Path:
    """Give a place that is free."""
    shutil.rmtree(tiny.root / "dest", ignore_errors=True)
    return tiny.root / "dest"


# ---- pulling


def test_fresh_pull_is_bit_identical(place: Place, dest: Path) -> None:
    """Every version, pulled into nothing by one thread or two, is its source's directory file for file."""
    expected = [*place.world.trees, tree(place.world.sibling)]
    for i, (version, content) in enumerate(zip(place.published, expected, strict=True)):
        done = place.pull(version, dest, threads=1 + i % 2)
        assert clean(dest, content) == []
        assert done.weights == place.published[version].weights
        assert done.content == place.published[version].content
        assert done.hops[0].startswith("+Full:")
        shutil.rmtree(dest)


def test_pull_into_an_empty_directory(place: Place, dest: Path) -> None:
    """A directory that is there but empty is filled."""
    dest.mkdir()
    place.pull("v1", dest)
    assert clean(dest, place.world.trees[1]) == []


@pytest.mark.parametrize(
    ("start", "goal", "signs", "edges"),
    [
        (0, "v3", "+++", ["v1", "v2", "v3"]),
        (3, "v0", "---", ["v1", "v2", "v3"]),
        (1, "v2", "+", ["v2"]),
        (2, "sibling", "-+", ["v2", "sibling"]),
        (0, "sibling", "++", ["v1", "sibling"]),
        (3, "v3", "", []),
    ],
)
def test_pull_in_place(place: Place, dest: Path, start: int, goal: str, signs: str, edges: list[str]) -> None:
    """Forward, backward and across branches only the edges between are fetched; a user's own files stay."""
    mine = {"notes.md": b"mine", "logs/": b"", "logs/a.txt": b"1"}
    reset(dest, {**place.world.trees[start], **mine})
    expected = tree(place.world.sibling) if goal == "sibling" else place.world.trees[int(goal[1:])]
    before = stamps(dest)
    done = place.pull(goal, dest)
    assert clean(dest, {**expected, **mine}) == []
    assert "".join(hop[0] for hop in done.hops) == signs
    assert all(hop[1:].startswith("Delta:") for hop in done.hops)
    assert done.downloaded_bytes == place.cost(*edges)
    assert done.full_bytes == place.published["v0"].full_bytes
    assert (stamps(dest) == before) == (not edges)
    assert done.left_out == {}


def test_pull_by_digest(place: Place, dest: Path) -> None:
    """A manifest's sha256, with or without a prefix, is as good as a name."""
    manifest = place.published["v2"].manifest
    place.pull(f"sha256:{manifest}", dest)
    assert clean(dest, place.world.trees[2]) == []
    assert place.pull(manifest, dest).downloaded_bytes == 0


def test_same_weights_other_assets(place: Place, dest: Path) -> None:
    """A version that differs in small files only costs no edge; changed and added files are written."""
    other = reset(place.world.root / "reworded", {**place.world.trees[3], "config.json": b"{}\n", "new.txt": b"new"})
    done = place.publish(other, "v3-reworded", "v3", place.world.folders[3])
    assert (done.edges, done.changed, done.delta_bytes) == ([], 0, 0)
    assert done.weights == place.published["v3"].weights
    assert done.content != place.published["v3"].content
    reset(dest, place.world.trees[3])
    pulled = place.pull("v3-reworded", dest)
    assert (pulled.hops, pulled.downloaded_bytes, pulled.content) == ([], 0, done.content)
    assert clean(dest, tree(other)) == []
    shutil.rmtree(dest)
    place.pull("v3-reworded", dest)
    assert clean(dest, tree(other)) == []


def test_same_weights_fewer_assets(place: Place, dest: Path) -> None:
    """A small file that the version lacks goes, as it does when an edge leads there."""
    fewer = {name: data for name, data in place.world.trees[3].items() if name != "added-v3.json"}
    place.publish(reset(place.world.root / "fewer", fewer), "v3-fewer", "v3")
    reset(dest, place.world.trees[3])
    place.pull("v3-fewer", dest)
    assert clean(dest, fewer) == []


@pytest.fixture
def lacking(dest: Path) -> Path:
    """Give a directory that lacks a tensor of the published versions."""
    model = worlds.model(3)
    tensors = {name: tensor for name, tensor in model.tensors.items() if name != "h.scale"}
    return replace(model, tensors=tensors).save(dest)


def test_pull_of_other_tensors(place: Place, lacking: Path) -> None:
    """Another model's directory is refused with the tensors' names, and its files are left alone."""
    before = stamps(lacking)
    with pytest.raises(NoPath, match=r"'h\.scale' only in the second.*new directory"):
        place.pull("v1", lacking)
    assert stamps(lacking).items() >= before.items()


def test_refused_pull_leaves_nothing_behind(place: Place, lacking: Path) -> None:
    """Where repeating the call cannot help, nothing is kept in the user's directory for that."""
    content = tree(lacking)
    with pytest.raises(NoPath):
        place.pull("v1", lacking)
    assert clean(lacking, content) == []


def test_pull_longer_than_allowed(place: Place, dest: Path) -> None:
    """A chain longer than `max_hops` is no path, and the message says how long it is."""
    reset(dest, place.world.trees[0])
    with pytest.raises(NoPath, match="shortest way has 3 edges, more than the 2 allowed"):
        place.pull("v3", dest, max_hops=2)


# ---- publishing


def test_what_publishing_reports(place: Place) -> None:
    """Counts, sizes, digests and objects agree with what was made by hand from the same checkpoints."""
    first, second = place.published["v0"], place.published["v1"]
    edge = place.world.edges[0].edge()
    assert [item["kind"] for item in first.edges] == ["Full"]
    assert [item["digest"] for item in second.edges] == [edge.sha256]
    assert edge.base is not None
    assert (first.weights, second.weights) == (edge.base.weights, edge.target.weights)
    assert (first.manifest, second.manifest) == (edge.base.manifest, edge.target.manifest)
    assert (second.changed, second.delta_bytes, second.parent_from) == (edge.changed, edge.size, "source")
    assert second.sent_bytes > edge.size
    assert (first.changed, first.delta_bytes, first.parent_from) == (None, None, None)
    sizes = [len(tensor.words.tobytes()) for tensor in worlds.model(1).tensors.values()]
    assert first.full_bytes == sum(sizes)
    assert place.remote.find("v1") == [second.manifest]
    assert set(place.remote.versions()) >= {"v0", "v1", "v2", "v3", "sibling"}


def test_parent_from_source_or_store(empty: Place) -> None:
    """When the parent's directory was altered, deleted or interrupted it is rebuilt; the same edge comes out."""
    empty.publish_all(1, sibling=False)
    folders, root = empty.world.folders, empty.world.root
    altered = reset(root / "altered", empty.world.trees[1])
    data = bytearray((altered / "model-00002-of-00002.safetensors").read_bytes())
    data[-1] ^= 1
    (altered / "model-00002-of-00002.safetensors").write_bytes(data)
    truncated = reset(root / "truncated", empty.world.trees[1])
    (truncated / "model-00002-of-00002.safetensors").write_bytes(data[:-1])
    interrupted = reset(root / "interrupted", {**empty.world.trees[1], ".weightsync/": b"", ".weightsync/journal": b""})
    first = empty.publish(folders[2], "v2", "v1", folders[1])
    assert first.parent_from == "source"
    listed = empty.listing()
    origins = [altered, truncated, interrupted, root / "gone", folders[3], None]
    for origin in origins if isinstance(empty.store, VolumeStore) else origins[::5]:
        again = empty.publish(folders[2], "v2", "v1", origin)
        assert again.parent_from == "store"
        assert (again.edges, again.sent_bytes) == (first.edges, 0)
    assert empty.listing() == listed


def test_republishing_sends_nothing(empty: Place) -> None:
    """The same call again, with any number of threads, finds everything there."""
    first = empty.publish_all(1, sibling=False).published["v1"]
    listed = empty.listing()
    again = empty.publish(empty.world.folders[1], "v1", "v0", empty.world.folders[0], threads=2)
    assert again.sent_bytes == 0
    assert replace(again, seconds={}, sent_bytes=0) == replace(first, seconds={}, sent_bytes=0)
    assert empty.publish(empty.world.folders[0], "v0").sent_bytes == 0
    assert empty.listing() == listed


@pytest.mark.parametrize("change", ["added", "removed", "reshaped", "retyped"])
def test_row_tensors_differ_from_the_parent(empty: Place, dest: Path, change: str) -> None:
    """Then a Full edge is written instead of a delta, a note says which tensors, and the version can be pulled."""
    model = worlds.model(1)
    tensors = dict(model.tensors)
    if change == "added":
        tensors["z.new"] = worlds.Tensor("F32", (2,), np.array([1, 2], "<u4"))
    elif change == "removed":
        del tensors["d.norm"]
    else:
        old = tensors["d.norm"]
        tensors["d.norm"] = replace(old, shape=(32, 64)) if change == "reshaped" else replace(old, dtype="F16")
    source = replace(model, tensors=tensors).save(empty.world.root / f"differs-{change}")
    empty.publish(empty.world.folders[0], "v0")
    done = empty.publish(source, "v1", "v0", empty.world.folders[0])
    assert [edge["kind"] for edge in done.edges] == ["Full"]
    assert "'z.new'" in done.notes[0] or "'d.norm'" in done.notes[0]
    assert "Full edge" in done.notes[0]
    empty.pull("v1", dest)
    assert unlike(tree(dest), tree(source)) == []


def test_nothing_changed(empty: Place, dest: Path) -> None:
    """A checkpoint equal to its parent gets a name and no edge."""
    empty.publish(empty.world.folders[0], "v0")
    listed = empty.listing()
    done = empty.publish(empty.world.folders[0], "copy", "v0", empty.world.folders[0])
    assert (done.changed, done.edges, done.sent_bytes) == (0, [], 0)
    assert set(empty.listing()) - set(listed) == {f"{MODEL}/names/copy/{done.manifest}"}
    empty.pull("copy", dest)
    assert unlike(tree(dest), empty.world.trees[0]) == []


def test_full_edges_when_deltas_grow(empty: Place, dest: Path) -> None:
    """A Full edge is added when the deltas since the last one exceed the ratio, and a fresh pull starts from there."""
    folders = empty.world.folders
    full = int(str(empty.publish(folders[0], "v0").edges[0]["bytes"]))
    sizes = [edge.edge().size for edge in empty.world.edges]
    ratio = (sizes[0] + sizes[1] / 2) / full
    kinds = []
    for i in range(1, 4):
        done = empty.publish(folders[i], f"v{i}", f"v{i - 1}", folders[i - 1], full_ratio=ratio)
        kinds.append([edge["kind"] for edge in done.edges])
    assert kinds == [["Delta"], ["Delta", "Full"], ["Delta"]]
    assert [hop[:5] for hop in empty.pull("v3", dest).hops] == ["+Full", "+Delt"]
    assert unlike(tree(dest), empty.world.trees[3]) == []


@pytest.mark.parametrize("start", [None, "v0"])
def test_row_non_finite_values(empty: Place, dest: Path, start: str | None) -> None:
    """NaN with any payload and infinities are counted, among what an edge writes, and kept exactly."""
    model = worlds.model(1, worlds.ASSETS[0])
    for name, values in {"d.norm": [0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F7F], "h.scale": [0x7FC00001]}.items():
        words = model.tensors[name].words * 0
        words[: len(values)] = values
        model = model.put(name, words)
    finite = {name: tensor for name, tensor in model.tensors.items() if name in ("d.norm", "h.scale", "f.ids")}
    source = replace(model, tensors=finite).save(empty.world.root / "nan")
    base = {name: replace(tensor, words=tensor.words * 0) for name, tensor in finite.items()}
    old = replace(model, tensors=base).save(empty.world.root / "zero")
    assert empty.publish(old, "v0").non_finite == 0
    done = empty.publish(source, "v1", start, old if start else None)
    assert done.non_finite == 5
    empty.pull("v1", dest)
    assert unlike(tree(dest), tree(source)) == []


def test_one_file_as_source(empty: Place, dest: Path) -> None:
    """A single safetensors file is a checkpoint without small files."""
    folder = worlds.model(7, files=1).save(empty.world.root / "single")
    empty.publish(folder / "model.safetensors", "v0")
    empty.pull("v0", dest)
    assert unlike(tree(dest), tree(folder)) == []


def test_tensors_of_several_chunks_and_data_files(empty: Place, dest: Path) -> None:
    """Chunks and data files have borders; nothing is lost at them, forward or backward."""
    old = worlds.model(1, large=True)
    models = [old, old.changed(1)]
    folders = [model.save(empty.world.root / f"large-{i}") for i, model in enumerate(models)]
    empty.publish(folders[0], "v0", shard_bytes=4 << 20)
    done = empty.publish(folders[1], "v1", "v0", folders[0], shard_bytes=10_000, threads=2)
    assert len([path for path in empty.listing() if "/data/" in path]) >= 5
    assert done.changed
    empty.pull("v1", dest, threads=2)
    assert unlike(tree(dest), tree(folders[1])) == []
    assert empty.pull("v0", dest).hops[0].startswith("-Delta")
    assert unlike(tree(dest), tree(folders[0])) == []


def test_models_in_one_store_are_apart(empty: Place, dest: Path) -> None:
    """Two models of one store may use one version name; each is pulled as what it is, and knows nothing of the other."""
    other = replace(empty, model="another", published={})
    empty.publish(empty.world.folders[0], "v0")
    assert other.remote.versions() == {}
    assert other.remote.links() == []
    other.publish(empty.world.folders[1], "v0")
    for one, expected in ((empty, 0), (other, 1)):
        one.pull("v0", dest)
        assert unlike(tree(dest), empty.world.trees[expected]) == []
        shutil.rmtree(dest)


def test_volume_for_other_users(tiny: World, dest: Path) -> None:
    """What a publisher puts on a volume can be read, and what a pull makes can be read and written, by its owner."""
    local = Place(VolumeStore(tiny.root / "modes"), tiny)
    local.publish(tiny.folders[0], "v0")
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in (tiny.root / "modes").rglob("*") if path.is_file())
    local.pull("v0", dest)
    assert all(path.stat().st_mode & 0o600 == 0o600 for path in dest.iterdir())
