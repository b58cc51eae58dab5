"""Real training steps of a real model: sizes, exactness, merging, and the way through both kinds of store."""

from __future__ import annotations

import filecmp
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import worlds
from worlds import World

from bucketserver.client import BucketServer
from integration.places import KINDS, Place, new_store, serving
from weightsync.bundle import Bundle
from weightsync.checkpoint import Checkpoint
from weightsync.delta.apply import apply
from weightsync.delta.make import make_delta, make_merge
from weightsync.delta.step import Step
from weightsync.parallel import Workers


def unlike(found: Path, expected: Path) -> list[str]:
    """Names of files that differ between two directories, hidden ones too."""
    names = {path.name for folder in (found, expected) for path in folder.iterdir()}
    return sorted(filecmp.cmpfiles(found, expected, names, shallow=False)[1]) + sorted(
        name for name in names if not ((found / name).is_file() and (expected / name).is_file())
    )


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """Give a folder in memory."""
    with worlds.memory_folder() as folder:
        yield folder


def edge(old: Path, new: Path, folder: Path) -> Bundle:
    """The delta between two checkpoints."""
    bundle = Bundle(folder)
    bundle.start()
    with Workers(2) as workers:
        make_delta(Checkpoint.open(old), Checkpoint.open(new), bundle, workers, model=worlds.MODEL)
    return bundle


@pytest.fixture(scope="module")
def chain(real_chain: tuple[Path, ...], real_sibling: Path, room: Path) -> World:
    """Give the chain with the deltas between its steps."""
    edges = [edge(a, b, room / f"edge-{i}") for i, (a, b) in enumerate(itertools.pairwise(real_chain))]
    return World(room, list(real_chain), [], edges, real_sibling)


@pytest.fixture
def copy(real_chain: tuple[Path, ...], room: Path) -> Iterator[Path]:
    """Give a copy of the base that may be changed."""
    target = room / "copy"
    target.mkdir()
    for path in real_chain[0].iterdir():
        shutil.copyfile(path, target / path.name)
    yield target
    shutil.rmtree(target)


def test_bytes_per_changed_value(chain: World) -> None:
    """A step that changes 0.2 % of the values costs at most 1.8 bytes for each, one that changes 1 % at most 1.4."""
    sparse = chain.edges[0].edge()
    dense = edge(chain.folders[0], chain.sibling, chain.root / "edge-sibling").edge()
    words = Checkpoint.open(chain.folders[0]).schema.total_words
    assert 0.0005 < sparse.changed / words < 0.005 < dense.changed / words < 0.05
    assert sparse.size / sparse.changed <= 1.8
    assert dense.size / dense.changed <= 1.4


def test_there_and_back(chain: World, copy: Path) -> None:
    """Applying a step's delta gives the step's files bit for bit; its reverse gives back the base's."""
    with Workers(2) as workers:
        apply(copy, [Step.open(chain.edges[0])], workers)
        assert unlike(copy, chain.folders[1]) == []
        apply(copy, [Step.open(chain.edges[0], reverse=True)], workers)
    assert unlike(copy, chain.folders[0]) == []


def test_merge_is_the_direct_difference(chain: World) -> None:
    """Four steps folded without the weights are the bytes of comparing first and last, and fewer than their sum."""
    bundle = Bundle(chain.root / "merged")
    bundle.start()
    steps = chain.steps(0, 4)
    with Workers(2) as workers:
        merged = make_merge(steps, bundle, workers).edge
    direct = edge(chain.folders[0], chain.folders[4], chain.root / "direct").edge()
    assert [data.sha256 for data in merged.data] == [data.sha256 for data in direct.data]
    assert merged.changed == direct.changed
    assert merged.target == direct.target
    assert merged.size < sum(step.edge.size for step in steps)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    """Give a bucket server."""
    with serving(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.mark.parametrize("kind", KINDS)
def test_through_a_store(chain: World, server: BucketServer, kind: str) -> None:
    """The chain and a sibling are published; a fresh pull of the last is its source; from there to the sibling by deltas."""
    place = Place(new_store(kind, chain.root, server), chain)
    place.published["v0"] = place.publish(chain.folders[0], "v0", threads=2)
    for i in range(1, 5):
        done = place.publish(chain.folders[i], f"v{i}", f"v{i - 1}", chain.folders[i - 1], threads=2)
        assert (done.parent_from, done.delta_bytes) == ("source", chain.edges[i - 1].edge().size)
        assert done.sent_bytes < done.full_bytes / 100
        place.published[f"v{i}"] = done
    place.published["sibling"] = place.publish(chain.sibling, "sibling", "v0", chain.folders[0], threads=2)
    dest = chain.root / f"pulled-{kind}"
    fresh = place.pull("v4", dest, threads=2)
    assert unlike(dest, chain.folders[4]) == []
    assert fresh.downloaded_bytes == place.cost("v0", "v1", "v2", "v3", "v4")
    switch = place.pull("sibling", dest, threads=2)
    assert unlike(dest, chain.sibling) == []
    assert [hop[0] for hop in switch.hops] == ["-", "-", "-", "-", "+"]
    assert switch.downloaded_bytes == place.cost("v1", "v2", "v3", "v4", "sibling")
    assert switch.downloaded_bytes < switch.full_bytes / 25
    shutil.rmtree(dest)
