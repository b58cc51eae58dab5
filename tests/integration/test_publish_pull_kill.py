"""Publishers and pullers that are killed, race each other or run out of room, and the call that follows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import worlds
from worlds import MODEL, Child, World, killed_at_line, outcome, reset, stamps, tree

from bucketserver.client import BucketServer
from integration.places import KINDS, Place, clean, new_store, serving
from integration.stores import TOKEN
from weightsync import publish as publishing
from weightsync.delta.apply import apply
from weightsync.delta.target import locked
from weightsync.errors import SourceChanged, StoreConflict, StoreNotFound, StoreUnavailable, TargetBusy
from weightsync.parallel import Workers
from weightsync.publish import Published
from weightsync.staging import building
from weightsync.store import VolumeStore

MODULES = ("pull", "staging", "files", "delta/build", "delta/apply", "delta/target", "delta/patch")
CODE = tuple(f"weightsync/{module}.py" for module in MODULES)
KILLS = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    """Give a bucket server."""
    with serving(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture(scope="module")
def local(tiny: World) -> Place:
    """Give a volume that holds all of them."""
    return Place(VolumeStore(tiny.root / "local"), tiny).publish_all()


@pytest.fixture(scope="module")
def distant(server: BucketServer, tiny: World) -> Place:
    """Give a bucket that holds all of them."""
    return Place(new_store("hub", tiny.root, server), tiny).publish_all()


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, server: BucketServer, tiny: World) -> Place:
    """Give a store that holds v0 only."""
    return Place(new_store(request.param, tiny.root, server), tiny).publish_all(0, sibling=False)


@pytest.fixture
def dest(tiny: World) -> Path:
    """Give a place that is free."""
    for name in ("dest", ".dest.building"):
        shutil.rmtree(tiny.root / name, ignore_errors=True)
    return tiny.root / "dest"


# ---- publishers that die


def publish_v1(place: Place) -> Published:
    """A publication with both a delta and a full copy."""
    return place.publish(place.world.folders[1], "v1", "v0", place.world.folders[0], full_ratio=0)


def test_publisher_killed_at_every_put(tiny: World, local: Place) -> None:
    """Killed before or after any single object, a version is not there or whole; the retry writes the same names."""
    start, root = tiny.root / "start", tiny.root / "killed"
    shutil.rmtree(start, ignore_errors=True)
    Place(VolumeStore(start), tiny).publish_all(0, sibling=False)
    shutil.copytree(start, root)
    whole = Place(VolumeStore(root), tiny)
    publish_v1(whole)
    expected = whole.listing()
    puts = len(expected) - len(Place(VolumeStore(start), tiny).listing())
    assert puts > 8

    class Fatal(VolumeStore):
        count = 0

        def _put(self, *arguments: Any) -> int:
            sent = 0
            for moment in (0, 1):
                if Fatal.count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                sent = sent or (super()._put(*arguments) if moment == 0 else 0)
                Fatal.count += 1
            return sent

    unnamed = 0
    for number in range(2 * puts + 8):  # noqa: B007 - the store reads it
        shutil.rmtree(root)
        shutil.copytree(start, root)
        dying = replace(whole, store=Fatal(root))
        if Child(lambda dying=dying: publish_v1(dying)).wait() == 0:
            break
        check_and_retry(whole, expected)
        unnamed += 1
    assert unnamed >= 2 * puts


def check_and_retry(place: Place, expected: list[str]) -> None:
    """A version is absent or whole; publishing again makes it whole, under the same names."""
    assert set(place.listing()) <= set(expected)
    for turn in range(2):
        if turn or place.remote.find("v1"):
            dest = place.world.root / "check"
            shutil.rmtree(dest, ignore_errors=True)
            place.pull("v1", dest)
            assert clean(dest, place.world.trees[1]) == []
        if not turn:
            publish_v1(place)
    assert place.listing() == expected


def test_publisher_killed_at_random(tiny: World) -> None:
    """The same at random instants, also in the middle of writing an object."""
    start, root = tiny.root / "start-random", tiny.root / "killed-random"
    Place(VolumeStore(start), tiny).publish_all(0, sibling=False)
    shutil.copytree(start, root)
    place = Place(VolumeStore(root), tiny)
    publish_v1(place)
    expected = place.listing()
    killer = worlds.Killer(lambda: publish_v1(place), 1)
    for _ in range(KILLS):
        shutil.rmtree(root)
        shutil.copytree(start, root)
        killer.strike(lambda: publish_v1(place))
        check_and_retry(place, expected)
    assert killer.struck > KILLS // 4


@pytest.mark.parametrize(("batch", "moment"), [*((batch, "before") for batch in range(4)), (3, "after")])
def test_publisher_stopped_between_batches(place: Place, batch: int, moment: str) -> None:
    """In either store, whatever batch is the last to arrive, a version appears whole or not at all."""
    put, calls = place.store.put, iter(range(99))

    class Stopping:
        def __getattr__(self, name: str) -> Any:
            return getattr(place.store, name)

        def put(self, items: Any, **options: Any) -> int:
            number = next(calls)
            if number == batch and moment == "before":
                raise StoreUnavailable("stopped")
            sent = put(items, **options)
            if number == batch:
                raise StoreUnavailable("stopped")
            return sent

    with pytest.raises(StoreUnavailable, match="stopped"):
        publish_v1(replace(place, store=Stopping()))
    assert (place.remote.find("v1") == []) == ((batch, moment) != (3, "after"))
    publish_v1(place)
    listed = place.listing()
    assert publish_v1(place).sent_bytes == 0
    assert place.listing() == listed
    dest = place.world.root / "stopped"
    shutil.rmtree(dest, ignore_errors=True)
    place.pull("v1", dest)
    assert clean(dest, place.world.trees[1]) == []


# ---- pullers that die


def test_fresh_pull_killed_at_random(local: Place, dest: Path) -> None:
    """A directory appears whole or not at all, and repeating the pull makes it whole and leaves nothing beside it."""
    killer = worlds.Killer(lambda: local.pull("v3", dest, threads=2), 2)
    for _ in range(KILLS):
        shutil.rmtree(dest)
        killer.strike(lambda: local.pull("v3", dest, threads=2))
        if dest.exists():
            assert clean(dest, local.world.trees[3]) == []
        local.pull("v3", dest)
        assert clean(dest, local.world.trees[3]) == []
    assert killer.struck > KILLS // 4


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("start", [0, 2])
def test_pull_in_place_killed_at_random(local: Place, dest: Path, start: int, threads: int) -> None:
    """A directory whose pull was killed is brought to that version, or to any other, by the next pull."""
    others = {"v0": local.world.trees[0], "v3": local.world.trees[3], "sibling": tree(local.world.sibling)}
    reset(dest, local.world.trees[start])
    killer = worlds.Killer(lambda: local.pull("v3", dest, threads=threads), start + threads)
    for attempt in range(KILLS):
        reset(dest, local.world.trees[start])
        killer.strike(lambda: local.pull("v3", dest, threads=threads))
        if killer.random.random() < 0.3:
            killer.strike(lambda: local.pull("v0", dest))
        goal = killer.random.choice([*others, "v3"])
        local.pull(goal, dest)
        assert clean(dest, others[goal]) == [], f"attempt {attempt}, then {goal}"
    assert killer.struck > KILLS // 4


@pytest.mark.parametrize("fresh", [False, True], ids=["in-place", "fresh"])
def test_pull_killed_at_many_lines(local: Place, dest: Path, fresh: bool) -> None:
    """A kill before any line (here: one in eight) is made good by repeating the pull."""

    def begin() -> None:
        shutil.rmtree(dest, ignore_errors=True)
        if not fresh:
            reset(dest, local.world.trees[2])

    def act() -> object:
        return local.pull("v3", dest)

    begin()
    for number in worlds.places(act, CODE)[::8]:
        begin()
        assert killed_at_line(act, CODE, number)
        act()
        assert clean(dest, local.world.trees[3]) == [], f"line {number}"


_PULL = """
import json, sys
from pathlib import Path
from weightsync.parallel import Workers
from weightsync.pull import pull
from weightsync.remote import Remote
from weightsync.store import open_store
url, token, endpoint, model, version, dest = json.loads(sys.stdin.readline())
remote = Remote(open_store(url, token=token, endpoint=endpoint), model)
remote.versions()
print("ready", flush=True)
with Workers(1) as workers:
    pull(remote, version, Path(dest), workers)
"""


@pytest.mark.parametrize("fresh", [False, True], ids=["in-place", "fresh"])
def test_pull_from_the_hub_killed(distant: Place, server: BucketServer, dest: Path, fresh: bool) -> None:
    """The same with the Hub's client, which downloads in threads of its own."""
    for delay in (0.05, 0.15, 0.3):
        shutil.rmtree(dest, ignore_errors=True)
        if not fresh:
            reset(dest, distant.world.trees[0])
        command = [sys.executable, "-c", _PULL]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([distant.store.url, TOKEN, server.endpoint, MODEL, "v3", str(dest)]) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        time.sleep(delay)
        process.kill()
        process.communicate()
        distant.pull("v3", dest)
        assert clean(dest, distant.world.trees[3]) == []


def test_pull_finishes_an_interrupted_apply(local: Place, dest: Path) -> None:
    """What an apply with a delta's folder left half-way is finished from the store on the way to the version."""
    steps = local.world.steps(1, 0)

    def act() -> object:
        with Workers(1) as workers:
            return apply(dest, steps, workers)

    reset(dest, local.world.trees[1])
    lines = worlds.places(act, ("delta/patch.py",))
    reset(dest, local.world.trees[1])
    assert killed_at_line(act, ("delta/patch.py",), lines[len(lines) // 2])
    half = tree(dest)
    elsewhere = Place(VolumeStore(local.world.root / "elsewhere"), local.world).publish_all(0, sibling=False)
    with pytest.raises(StoreNotFound, match=f"interrupted in edge {steps[0].edge.sha256[:16]}.*weightsync apply"):
        elsewhere.pull("v0", dest)
    assert {name: data for name, data in tree(dest).items() if name in half} == half
    done = local.pull("v3", dest)
    assert done.recovered
    assert clean(dest, local.world.trees[3]) == []


# ---- races


@pytest.mark.parametrize("same", [True, False], ids=["same", "different"])
def test_two_publishers_of_one_version(place: Place, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishers of one checkpoint agree; of two under one name at most one wins, and the name is never left standing for both."""
    sources = [place.world.folders[1], place.world.folders[1] if same else place.world.sibling]
    barrier, upload = threading.Barrier(2), publishing._upload

    def together(*arguments: Any) -> int:
        barrier.wait(timeout=60)
        return upload(*arguments)

    monkeypatch.setattr(publishing, "_upload", together)

    def act(source: Path) -> object:
        try:
            return place.publish(source, "v1", "v0", place.world.folders[0])
        except (SourceChanged, StoreConflict) as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(act, sources))
    dest = place.world.root / "raced"
    shutil.rmtree(dest, ignore_errors=True)
    if same:
        assert all(isinstance(result, Published) for result in results)
        place.pull("v1", dest)
        assert clean(dest, place.world.trees[1]) == []
        return
    won = [result for result in results if isinstance(result, Published)]
    assert len(won) < 2
    assert place.remote.find("v1") == [result.manifest for result in won]
    if won:
        place.pull("v1", dest)
        assert tree(dest) in (place.world.trees[1], tree(place.world.sibling))


def test_publishers_in_processes(tiny: World) -> None:
    """Processes that publish one checkpoint at once all succeed and write what one would have written."""
    alone, many = (Place(VolumeStore(tiny.root / name), tiny).publish_all(0, sibling=False) for name in ("one", "many"))
    publish_v1(alone)
    children = [Child(lambda: publish_v1(many).manifest) for _ in range(4)]
    assert [child.wait() for child in children] == [0] * 4
    assert len({child.value for child in children}) == 1
    assert many.listing() == alone.listing()


@contextmanager
def worked_on(dest: Path, fresh: bool) -> Iterator[None]:
    """Hold a directory as another process would, and give up."""
    with suppress(InterruptedError), building(dest) if fresh else locked(dest):
        yield
        raise InterruptedError


@pytest.mark.parametrize("fresh", [False, True], ids=["in-place", "fresh"])
def test_pull_while_another_works_there(local: Place, dest: Path, fresh: bool) -> None:
    """A directory that another process changes or makes is busy, and left to it."""
    if not fresh:
        reset(dest, local.world.trees[0])
    before = stamps(dest)
    with worked_on(dest, fresh), pytest.raises(TargetBusy, match="another process"):
        local.pull("v3", dest)
    assert stamps(dest) == before


def test_pulls_in_processes(local: Place, dest: Path) -> None:
    """Processes that pull into one new directory at once leave it whole; the losers say busy, or find it done."""
    for _ in range(5):
        shutil.rmtree(dest, ignore_errors=True)
        children = [Child(lambda: outcome(lambda: local.pull("v3", dest))) for _ in range(4)]
        assert [child.wait() for child in children] == [0] * 4
        results = [child.value for child in children]
        assert all(isinstance(result, TargetBusy) or result.weights for result in results), results
        assert clean(dest, local.world.trees[3]) == []
