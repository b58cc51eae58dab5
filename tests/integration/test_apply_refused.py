"""Deltas that are damaged, forged or made for something else: refused before anything is written, or undone."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import worlds
import zstandard
from worlds import World, outcome, reset, stamps, tree, unlike

from integration.applying import copy, refuses, walk
from weightsync.bundle import Bundle
from weightsync.checkpoint import Checkpoint
from weightsync.codec import Mode, encode
from weightsync.codec.difference import Dense
from weightsync.delta.diff import write_delta
from weightsync.delta.reader import Delta
from weightsync.delta.step import Step
from weightsync.delta.writer import DeltaWriter
from weightsync.errors import BaseMismatch, DigestMismatch, FormatError, InputError, Unsupported
from weightsync.manifest import Data
from weightsync.parallel import Workers

FIRST = "model-00001-of-00002.safetensors"


def forged(tiny: World, name: str, data: list[Data], **fields: object) -> Bundle:
    """The first edge with other data, digests of files and edge consistent."""
    original = tiny.edges[0]
    bundle = Bundle(tiny.root / name)
    for part in ("blobs", "manifests"):
        shutil.copytree(original.root / part, bundle.root / part, dirs_exist_ok=True)
    files = tuple(Data(file.sha256, file.bytes) for file in data)
    bundle.put_edge(replace(original.edge(), data=files, **fields))  # type: ignore[arg-type]
    return bundle


@pytest.fixture(scope="module")
def lying(tiny: World) -> Bundle:
    """Give an edge from v0 to v1 whose last record leads to other words than v1's."""
    bad = reset(tiny.root / "bad", tiny.trees[1])
    data = bytearray((bad / FIRST).read_bytes())
    data[-1] += 1  # of k.fp4, the last tensor
    (bad / FIRST).write_bytes(data)
    folder = tiny.root / "lying" / "data"
    with DeltaWriter(folder) as writer, Workers(1) as workers:
        write_delta(Checkpoint.open(tiny.folders[0]), Checkpoint.open(bad), writer, workers)
        files = writer.finish()
    return forged(tiny, "lying", files)


@pytest.mark.parametrize("threads", [1, 2])
def test_wrong_words_are_undone(tiny: World, target: Path, lying: Bundle, threads: int) -> None:
    """Data that decodes to something else than the manifest says is found out, and every store is undone."""
    with pytest.raises(DigestMismatch, match=r"'k\.fp4'.*everything was undone"):
        walk(target, [Step.open(lying)], threads)
    assert unlike(tree(target), tiny.trees[0]) == []


def test_wrong_words_backwards_are_undone(tiny: World, target: Path, lying: Bundle) -> None:
    """The same on the way back."""
    reset(target, tiny.trees[1])
    with pytest.raises(DigestMismatch, match="everything was undone"):
        walk(target, [Step.open(lying, reverse=True)])
    assert unlike(tree(target), tiny.trees[1]) == []


def caught(act: Callable[[], object]) -> None:
    """Run what must find wrong words."""
    with pytest.raises(DigestMismatch):
        act()


@pytest.mark.parametrize("back", [False, True], ids=["repeated", "undone"])
def test_wrong_words_and_a_kill(tiny: World, target: Path, lying: Bundle, back: bool) -> None:
    """An apply of wrong data that was killed half-way can be undone, and repeating it undoes it like the first call."""
    act: Callable[[], object] = lambda: walk(target, [Step.open(lying)])  # noqa: E731
    for number in worlds.places(lambda: caught(act), ("delta/patch.py",))[::8]:
        reset(target, tiny.trees[0])
        assert worlds.killed_at_line(act, ("delta/patch.py",), number)
        if back:
            walk(target, [Step.open(lying, reverse=True)])
        else:
            caught(act)
        assert unlike(tree(target), tiny.trees[0]) == [], f"line {number}"


def test_wrong_words_in_a_later_hop(tiny: World, target: Path, lying: Bundle) -> None:
    """When the second edge of a chain is wrong the directory is some version, weights and small files together."""
    reset(target, tiny.trees[2])
    with pytest.raises(DigestMismatch):
        walk(target, [*tiny.steps(2, 1), Step.open(lying, reverse=True)])
    found = tree(target)
    assert [] in (unlike(found, tiny.trees[1]), unlike(found, tiny.trees[2])), (
        unlike(found, tiny.trees[1]),
        unlike(found, tiny.trees[2]),
    )


def test_wrong_words_never_make_a_copy(tiny: World, target: Path, lying: Bundle) -> None:
    """A copy that comes out wrong does not appear."""
    dest = tiny.root / "wrong-copy"
    before = {path.name for path in tiny.root.iterdir()}
    with pytest.raises(DigestMismatch):
        copy(target, dest, [Step.open(lying)])
    assert {path.name for path in tiny.root.iterdir()} == before


def damage_of(kind: str, data: Path, other: Path) -> None:
    """Spoil a data file."""
    content = bytearray(data.read_bytes())
    if kind == "flipped":
        content[len(content) // 2] ^= 1
    elif kind == "truncated":
        del content[-1:]
    elif kind == "longer":
        content += b"\0"
    elif kind == "replaced":
        content = bytearray(other.read_bytes())
    data.unlink()
    if kind != "missing":
        data.write_bytes(content)


@pytest.mark.parametrize("kind", ["flipped", "truncated", "longer", "replaced", "missing"])
@pytest.mark.parametrize("part", ["data", "blobs", "manifests", "edges"])
def test_row_corrupt_or_truncated_delta(tiny: World, target: Path, kind: str, part: str) -> None:
    """A damaged file of any part of a delta is refused before anything is written, and named."""
    bundle = Bundle(reset(tiny.root / "damaged", tree(tiny.edges[0].root)))
    found = bundle.root / part
    needed = tiny.steps(0, 1)[0].goal.manifest.schema if part == "blobs" else ""
    path = found / needed if needed else next(found.iterdir())
    damage_of(kind, path, next((tiny.edges[1].root / part).iterdir()))
    before = stamps(target)
    with pytest.raises(InputError, match=str(bundle.root)):
        walk(target, [Step.open(bundle)])
    assert stamps(target) == before


def test_row_data_of_another_edge(tiny: World, target: Path) -> None:
    """Data made for another base, under an edge whose digests all fit, changes nothing in the end."""
    source = tiny.edges[1]
    file = next(source.data_folder.iterdir())
    bundle = forged(tiny, "other-data", [Data(file.stem, file.stat().st_size)])
    shutil.copytree(source.data_folder, bundle.data_folder, dirs_exist_ok=True)
    before = tree(target)
    with pytest.raises((FormatError, DigestMismatch)):
        walk(target, [Step.open(bundle)])
    assert unlike(tree(target), before) == []


def test_row_delta_for_another_base(tiny: World, target: Path) -> None:
    """A delta that starts from other weights is refused, and the message says from which."""
    refuses(target, tiny.steps(1, 2), BaseMismatch, "starts from .*nothing was written")
    refuses(target, tiny.steps(3, 2), BaseMismatch, "nothing was written")


def test_row_replayed_delta(tiny: World, target: Path) -> None:
    """A delta applied twice does nothing the second time, and is refused once the directory has gone on."""
    walk(target, tiny.steps(0, 1))
    before = stamps(target)
    assert walk(target, tiny.steps(0, 1)).walked == 0
    assert stamps(target) == before
    walk(target, tiny.steps(1, 2))
    refuses(target, tiny.steps(0, 1), BaseMismatch, "nothing was written")


def limited(act: Callable[[], object], room: int) -> object:
    """What `act` gives in a child that gets no more than `room` bytes of memory."""

    def child() -> object:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
        return act()

    return outcome(child)


def test_row_decompression_bomb(tiny: World, target: Path) -> None:
    """A stream that would expand to a gigabyte is refused without the memory for it, and nothing is changed."""
    bitmap = encode(Mode.BITMAP, 2, [Dense(np.arange(3072, dtype=np.uint16) % 2, 1536)])
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 30))
    bomb = replace(bitmap, coded=(frame[: bitmap.raw[0] - 1], *bitmap.coded[1:]))
    step = tiny.steps(0, 1)[0]
    assert step.delta.records["mode"].tolist()[1] == Mode.BITMAP
    with DeltaWriter(tiny.root / "bomb" / "data") as writer:
        writer.add(bomb, [(1, 0)])
        files = writer.finish()
    delta = Delta.open([tiny.root / "bomb" / "data" / f"{files[0].sha256}.safetensors"], step.goal.schema)
    before = tree(target)
    result = limited(lambda: walk(target, [replace(step, delta=delta)], contents={}), 256 << 20)
    assert isinstance(result, DigestMismatch)
    assert "compressed stream is damaged" in str(result)
    assert unlike(tree(target), before) == []


def test_opening_a_delta_needs_little_memory(tiny: World) -> None:
    """Documents of some kilobytes are read without asking for the largest size that one may have."""
    assert limited(lambda: len(tiny.steps(0, 1)), 256 << 20) == 1


def test_unusable_edges(tiny: World, target: Path) -> None:
    """A Full edge has nowhere to start in place, and an edge that requires an unknown feature is not guessed at."""
    before = stamps(target)
    full = worlds.edge(tiny.folders[1], tiny.folders[1], tiny.root / "full", full=True)
    strange = forged(tiny, "strange", [], requires=("telepathy",))
    for bundle, match in ((full, "Full edge.*--output"), (strange, "telepathy.*newer version")):
        with pytest.raises(Unsupported, match=match):
            walk(target, [Step.open(bundle)])
    assert stamps(target) == before
