"""The key promise: whatever kills an apply, and whenever, running it again leaves exactly the old or the new version."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import worlds
from worlds import Child, Tree, World, killed_at_line, reset, stamps, tree, unlike

from weightsync.bundle import Bundle
from weightsync.checkpoint import Checkpoint
from weightsync.delta import patch
from weightsync.delta.apply import apply
from weightsync.delta.journal import Journal
from weightsync.delta.make import make_delta
from weightsync.delta.step import Step
from weightsync.delta.target import locked
from weightsync.errors import BaseMismatch, CheckpointError, DigestMismatch, TargetBusy, TargetError
from weightsync.parallel import Workers

CODE = ("delta/apply.py", "delta/patch.py", "delta/journal.py", "delta/target.py", "weightsync/files.py")
"""Whose every line is a place to die at."""

RANDOM_KILLS = 64
"""In each of eight cases, kills of recoveries not counted: 512 in all."""

WAYS = [(0, 1), (1, 0), (0, 3), (3, 0)]
"""From which version to which: one edge and a chain of three, forward and backward."""


@pytest.fixture(scope="module")
def chunky() -> Iterator[World]:
    """Give two versions with a tensor of more than one chunk."""
    with worlds.memory_folder() as folder:
        yield worlds.world(folder, large=True, steps=1, files=1)


@pytest.fixture
def target(tiny: World) -> Path:
    """Give the directory that is changed."""
    return tiny.root / "target"


def walk(target: Path, steps: list[Step], threads: int = 1) -> Callable[[], object]:
    """An apply, to be run here or in a child."""

    def act() -> object:
        with Workers(threads) as workers:
            return apply(target, steps, workers)

    return act


class Case:
    """One way over a world: its apply, the one that leads back, and what the directory must hold after either."""

    def __init__(self, made: World, target: Path, start: int, goal: int, threads: int = 1) -> None:
        self.target, self.old, self.new = target, made.trees[start], made.trees[goal]
        self.forth = walk(target, made.steps(start, goal), threads)
        self.back = walk(target, made.steps(goal, start), threads)

    def begin(self, content: Tree | None = None) -> None:
        reset(self.target, self.old if content is None else content)

    def settle(self, *, back: bool, where: object) -> None:
        """Run it again, one way or the other, and compare every file."""
        (self.back if back else self.forth)()
        found = unlike(tree(self.target), self.old if back else self.new)
        assert not found, f"killed at {where}, then run {'back' if back else 'again'}: {found}"


# ---- killed at any instant


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("start", "goal"), WAYS)
def test_random_kills(tiny: World, target: Path, start: int, goal: int, threads: int) -> None:
    """After SIGKILL at a random instant, also of recoveries, the last call leaves exactly what it was asked for."""
    case = Case(tiny, target, start, goal, threads)
    case.begin()
    killer = worlds.Killer(case.forth, start * 100 + goal * 10 + threads)
    kills = 0
    for attempt in range(6 * RANDOM_KILLS):
        if kills == RANDOM_KILLS:
            break
        case.begin()
        kills += killer.strike(case.forth)
        recoveries = killer.random.choice([0, 0, 0, 1, 2])
        for recover in killer.random.choices([case.forth, case.back], k=recoveries):
            killer.strike(recover)
        back = killer.random.random() < 0.5
        case.settle(back=back, where=f"attempt {attempt} after {recoveries} killed recoveries")
    assert kills == RANDOM_KILLS


@pytest.mark.parametrize("threads", [1, 2])
def test_random_interrupts(tiny: World, target: Path, threads: int) -> None:
    """After SIGINT at a random instant the call can be repeated or undone like after a kill."""
    case = Case(tiny, target, 0, 3, threads)
    case.begin()
    killer = worlds.Killer(case.forth, threads, signal.SIGINT)
    for attempt in range(30):
        case.begin()
        killer.strike(case.forth)
        case.settle(back=attempt % 2 == 0, where=f"attempt {attempt}")
    assert killer.struck > 5


def test_random_kills_inside_a_large_tensor(chunky: World) -> None:
    """A tensor of several chunks, one of them torn by the kill, comes out whole in either direction."""
    case = Case(chunky, chunky.root / "target", 0, 1, 2)
    case.begin()
    killer = worlds.Killer(case.forth, 8)
    for attempt in range(24):
        case.begin()
        killer.strike(case.forth)
        case.settle(back=attempt % 2 == 0, where=f"attempt {attempt}")
    assert killer.struck > 5


# ---- killed at every step


@pytest.mark.parametrize(("start", "goal"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("back", [False, True], ids=["repeated", "undone"])
def test_killed_at_every_line(tiny: World, target: Path, start: int, goal: int, back: bool) -> None:
    """A kill before any line is harmless: slots, stores, done bytes, assets, journal. Each case takes every fourth."""
    case = Case(tiny, target, start, goal)
    case.begin()
    for number in worlds.places(case.forth, CODE)[2 * start + back :: 4]:
        case.begin()
        assert killed_at_line(case.forth, CODE, number)
        case.settle(back=back, where=f"line {number}")


@pytest.mark.parametrize("back", [False, True], ids=["repeated", "undone"])
def test_killed_at_many_lines_of_a_chain(tiny: World, target: Path, back: bool) -> None:
    """A kill in any hop, or between two, is harmless when the whole chain is walked again or back."""
    case = Case(tiny, target, 0, 3)
    case.begin()
    for number in worlds.places(case.forth, CODE)[back::6]:
        case.begin()
        assert killed_at_line(case.forth, CODE, number)
        case.settle(back=back, where=f"line {number}")


def test_killed_at_many_lines_with_two_threads(tiny: World, target: Path) -> None:
    """With two records in flight a kill is as harmless."""
    case = Case(tiny, target, 0, 1, 2)
    case.begin()
    for number in worlds.places(case.forth, CODE)[::10]:
        case.begin()
        killed_at_line(case.forth, CODE, number)
        case.settle(back=number % 4 == 0, where=f"line {number}")


@pytest.fixture(scope="module")
def interrupted(tiny: World) -> Tree:
    """Give a directory whose apply from v0 to v1 died in the middle of a store, slot taken."""
    target = reset(tiny.root / "interrupted", tiny.trees[0])
    act = walk(target, tiny.steps(0, 1))
    stores = count_stores(act)
    reset(target, tiny.trees[0])
    assert torn_at(act, stores // 2)
    journal = Journal.open(target)
    assert journal is not None
    assert any(slot.head[0] for slot in journal.slots)
    assert 0 < journal.done.sum() < len(journal.done)
    return tree(target)


@pytest.mark.parametrize("recovery", ["repeated", "undone"])
@pytest.mark.parametrize("back", [False, True], ids=["then-repeated", "then-undone"])
def test_recovery_killed_at_every_line(tiny: World, target: Path, interrupted: Tree, recovery: str, back: bool) -> None:
    """A recovery, in either direction, may be killed before any line (here: one in eight) and be followed by either."""
    case = Case(tiny, target, 0, 1)
    recover = case.back if recovery == "undone" else case.forth
    case.begin(interrupted)
    for number in worlds.places(recover, CODE)[back::8]:
        case.begin(interrupted)
        assert killed_at_line(recover, CODE, number)
        case.settle(back=back, where=f"line {number} of the recovery")


# ---- killed in the middle of a store


class Torn(np.ndarray):
    """Mapped words whose `fatal`-th store writes half of its values and kills the process."""

    count = 0
    fatal: int | None = None

    def _strike(self, half: Callable[[], object]) -> None:
        if Torn.count == Torn.fatal:
            half()
            os.kill(os.getpid(), signal.SIGKILL)
        Torn.count += 1

    def __setitem__(self, key: Any, value: Any) -> None:
        plain, at = self.view(np.ndarray), np.arange(len(self))[key]
        values = np.broadcast_to(value, at.shape)
        self._strike(lambda: plain.__setitem__(at[: len(at) // 2], values[: len(at) // 2]))
        plain[key] = value

    def __iadd__(self, other: Any) -> Any:
        plain, half = self.view(np.ndarray), len(self) // 2
        self._strike(lambda: np.add(plain[:half], other[:half], out=plain[:half]))
        plain += other
        return self


def tear(act: Callable[[], object], fatal: int | None) -> Callable[[], int]:
    """`act` with a store to die in; gives the number of stores."""

    def torn() -> int:
        Torn.count, Torn.fatal = 0, fatal
        parts = patch._parts
        patch._parts = lambda *a: ((words.view(Torn), part) for words, part in parts(*a))  # type: ignore[assignment]
        act()
        return Torn.count

    return torn


def count_stores(act: Callable[[], object]) -> int:
    """How many stores into weights `act` makes."""
    child = Child(tear(act, None))
    assert child.wait() == 0
    return int(child.value)


def torn_at(act: Callable[[], object], number: int) -> bool:
    """Run `act` in a child that dies half-way in the given store."""
    return Child(tear(act, number)).wait() == -signal.SIGKILL


@pytest.mark.parametrize(("start", "goal"), WAYS)
@pytest.mark.parametrize("back", [False, True], ids=["repeated", "undone"])
def test_torn_in_every_store(tiny: World, target: Path, start: int, goal: int, back: bool) -> None:
    """A store of which half is done when the kill comes is made whole in either direction."""
    case = Case(tiny, target, start, goal)
    case.begin()
    stores = count_stores(case.forth)
    assert stores >= 8
    for number in range(stores):
        case.begin()
        assert torn_at(case.forth, number)
        case.settle(back=back, where=f"store {number}")


@pytest.mark.parametrize("recovery", ["repeated", "undone"])
def test_torn_in_every_store_of_a_recovery(tiny: World, target: Path, interrupted: Tree, recovery: str) -> None:
    """Writing saved words back may be torn too, and so may the recovery from that."""
    case = Case(tiny, target, 0, 1)
    recover = case.back if recovery == "undone" else case.forth
    case.begin(interrupted)
    stores = count_stores(recover)
    assert stores >= 2
    for number in range(stores):
        for again in (case.forth, case.back):
            case.begin(interrupted)
            assert torn_at(recover, number)
            torn_at(again, 0)
            case.settle(back=number % 2 == 0, where=f"store {number} of the recovery")


# ---- what others see of an interrupted directory


def test_interrupted_target_refuses_other_deltas(tiny: World, target: Path, interrupted: Tree, tmp_path: Path) -> None:
    """A delta that is not the interrupted one is refused by the edge's name, and nothing is touched."""
    other = worlds.edge(tiny.folders[1], tiny.sibling, tmp_path / "other")
    reset(target, interrupted)
    before = stamps(target)
    name = tiny.edges[0].edge().sha256[:16]
    for steps in (tiny.steps(1, 2), tiny.steps(3, 1), [Step.open(other)]):
        with pytest.raises(TargetError, match=f"interrupted in edge {name}"):
            walk(target, steps)()
    assert stamps(target) == before
    assert unlike(tree(target), interrupted) == []


def test_interrupted_target_is_not_read_as_a_version(
    tiny: World, target: Path, interrupted: Tree, tmp_path: Path
) -> None:
    """A possible mixture is never taken for a checkpoint: no delta is made from it."""
    reset(target, interrupted)
    bundle = Bundle(tmp_path / "out")
    bundle.start()
    with Workers(1) as workers, pytest.raises(CheckpointError, match="interrupted"):
        make_delta(Checkpoint.open(target), Checkpoint.open(tiny.folders[1]), bundle, workers, model="m")


@pytest.mark.parametrize("last", [1, 2, 3])
def test_one_edge_finishes_what_a_chain_began(tiny: World, target: Path, last: int) -> None:
    """When the interrupted edge of a chain is finished or undone alone, the files are that version's, not a mixture."""
    chain = walk(target, tiny.steps(0, 3))
    case = Case(tiny, target, last - 1, last)
    reset(target, tiny.trees[0])
    stores = count_stores(chain) // 3
    for back in (False, True):
        reset(target, tiny.trees[0])
        assert torn_at(chain, stores * (last - 1) + stores // 2)
        case.settle(back=back, where=f"hop {last}")


def test_two_at_once(tiny: World, target: Path) -> None:
    """Of two applies over one directory one is refused as busy, and the other's result is right."""
    reset(target, tiny.trees[0])
    ready, release = os.pipe(), os.pipe()

    def pause(_: int, done: list[int] = []) -> None:  # noqa: B006
        if not done:
            done.append(1)
            os.write(ready[1], b"x")
            os.read(release[0], 1)

    def first() -> object:
        with Workers(1) as workers:
            return apply(target, tiny.steps(0, 1), workers, progress=pause)

    child = Child(first)
    os.read(ready[0], 1)
    with pytest.raises(TargetBusy, match="another process"):
        walk(target, tiny.steps(0, 1))()
    with pytest.raises(TargetBusy), locked(target):
        pass
    os.write(release[1], b"x")
    assert child.wait() == 0
    assert unlike(tree(target), tiny.trees[1]) == []
    for end in (*ready, *release):
        os.close(end)


def test_many_at_once(tiny: World, target: Path) -> None:
    """Applies that race without any order leave the new version; the losers say busy or find nothing to do."""
    for _ in range(5):
        reset(target, tiny.trees[0])
        children = [Child(lambda: worlds.outcome(walk(target, tiny.steps(0, 3)))) for _ in range(4)]
        assert [child.wait() for child in children] == [0] * 4
        results = [child.value for child in children]
        assert all(isinstance(result, TargetBusy) or result.hops == 3 for result in results), results
        assert sum(not isinstance(result, TargetBusy) and result.walked == 3 for result in results) == 1, results
        assert unlike(tree(target), tiny.trees[3]) == []


@pytest.mark.parametrize("held", [2, 3])
def test_wrong_base_is_left_alone(tiny: World, target: Path, held: int) -> None:
    """A directory that holds no version of the chain is refused before anything is written."""
    reset(target, tiny.trees[held])
    before = stamps(target)
    with pytest.raises(BaseMismatch, match="nothing was written"):
        walk(target, tiny.steps(0, 1))()
    assert stamps(target) == before
    assert unlike(tree(target), tiny.trees[held]) == []


def test_damage_after_a_kill_is_noticed(tiny: World, target: Path, interrupted: Tree) -> None:
    """A file written to by somebody else between kill and recovery is reported with its tensor, not completed."""
    reset(target, interrupted)
    path = target / "model-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestMismatch, match=r"neither side .*tensor 'k\.fp4'"):
        walk(target, tiny.steps(0, 1))()
    assert path.read_bytes()[-1] == data[-1]
    with pytest.raises(CheckpointError, match="interrupted"):
        Checkpoint.open(target)
