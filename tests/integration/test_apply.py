"""Applying deltas: what is refused before anything is written, what is undone, what travels along, what stays."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import worlds
from worlds import World, outcome, reset, stamps, tree, unlike

from integration.applying import copy, refuses, walk
from integration.stores import small_disk
from weightsync.delta.apply import apply
from weightsync.delta.build import copy_and_apply
from weightsync.delta.step import Step
from weightsync.errors import BaseMismatch, CheckpointError, InputError, NoSpace, TargetError, WeightsyncError
from weightsync.parallel import Workers

NOBODY = 65534
FIRST = "model-00001-of-00002.safetensors"


# ---- targets that are not fit to be changed


def test_symbolic_link_to_weights(tiny: World, target: Path) -> None:
    """A file that is a link, as in a Hub cache, is refused: what it points to may be shared."""
    blob = tiny.root / "blob"
    (target / FIRST).rename(blob)
    (target / FIRST).symlink_to(blob)
    before = blob.read_bytes()
    refuses(target, tiny.steps(0, 1), TargetError, "not a plain file.*--output")
    assert blob.read_bytes() == before


def test_hard_link_to_weights(tiny: World, target: Path) -> None:
    """A file with another name elsewhere is refused: that name would change too."""
    other = tiny.root / "other-name"
    other.unlink(missing_ok=True)
    os.link(target / FIRST, other)
    refuses(target, tiny.steps(0, 1), TargetError, "2 hard links.*--output")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("closed", ["files", "folder"])
def test_read_only_target(tiny: World, target: Path, closed: str) -> None:
    """Without the right to write the files, or to make the journal beside them, the apply is refused."""
    for path in target.iterdir():
        path.chmod(0o444 if closed == "files" else 0o666)
    before = stamps(target)
    error = outcome(lambda: walk(target, tiny.steps(0, 1)), uid=NOBODY)
    assert isinstance(error, TargetError)
    assert re.search("not writable|cannot be written", str(error))
    assert str(target) in str(error)
    assert stamps(target) == before


def test_library_folder_is_a_link(tiny: World, target: Path) -> None:
    """A planted `.weightsync` link does not lead the journal elsewhere."""
    elsewhere = reset(tiny.root / "elsewhere", {})
    (target / ".weightsync").symlink_to(elsewhere)
    with pytest.raises(TargetError, match="symbolic link"):
        walk(target, tiny.steps(0, 1))
    assert tree(elsewhere) == {}
    (target / ".weightsync").unlink()
    assert unlike(tree(target), tiny.trees[0]) == []


@pytest.mark.parametrize("name", ["journal", ".tmp-journal"])
def test_file_of_the_library_folder_is_a_link(tiny: World, target: Path, name: str) -> None:
    """A planted link inside `.weightsync` never makes the apply write to where it points."""
    victim = tiny.root / "victim"
    victim.write_bytes(b"precious" * 1000)
    (target / ".weightsync").mkdir()
    (target / ".weightsync" / name).symlink_to(victim)
    try:
        walk(target, tiny.steps(0, 1))
    except WeightsyncError:
        assert unlike({k: v for k, v in tree(target).items() if ".weightsync" not in k}, tiny.trees[0]) == []
    assert victim.read_bytes() == b"precious" * 1000


@pytest.mark.parametrize("kind", ["missing", "file", "empty"])
def test_target_is_no_checkpoint(tiny: World, kind: str) -> None:
    """A target that is not there, not a directory or empty is refused by its path."""
    path = tiny.root / f"not-{kind}"
    if kind == "file":
        path.write_bytes(b"x")
    elif kind == "empty":
        path.mkdir(exist_ok=True)
    with pytest.raises((TargetError, CheckpointError), match=str(path)):
        walk(path, tiny.steps(0, 1))
    assert path.exists() == (kind != "missing")


def test_row_tensors_differ(tiny: World, target: Path) -> None:
    """A directory with other tensors is refused, and the message says which."""
    model = worlds.model(5)
    tensors = {name: tensor for name, tensor in model.tensors.items() if name != "d.norm"}
    reset(target, tree(replace(model, tensors=tensors).save(tiny.root / "other-tensors")))
    refuses(target, tiny.steps(0, 1), BaseMismatch, "'d.norm' only in the second")


# ---- chains


def test_position_in_a_chain(tiny: World, target: Path) -> None:
    """A chain is walked from wherever in it the directory stands, in either direction; at its end nothing happens."""
    for at, walked in ((0, 3), (1, 2), (2, 1), (3, 0)):
        reset(target, tiny.trees[at])
        before = stamps(target)
        done = walk(target, tiny.steps(0, 3))
        assert (done.hops, done.walked, done.recovered) == (3, walked, False)
        assert done.changed == sum(edge.edge().changed for edge in tiny.edges[at:])
        assert (stamps(target) == before) == (walked == 0)
        assert unlike(tree(target), tiny.trees[3]) == []
        reset(target, tiny.trees[at])
        assert walk(target, tiny.steps(3, 0)).walked == at
        assert unlike(tree(target), tiny.trees[0]) == []


@pytest.fixture(scope="module")
def disjoint(tiny: World) -> World:
    """Give versions whose edges touch different tensors, so that a gap in a chain shows in no record."""
    models = [worlds.model(1)]
    for step, name in enumerate(["b.up", "a.embed", "d.norm"]):
        models.append(models[-1].changed(step, only=name))
    root = tiny.root / "disjoint"
    folders = [model.save(root / f"v{i}") for i, model in enumerate(models)]
    edges = [worlds.edge(a, b, root / f"e{i}") for i, (a, b) in enumerate(pairwise(folders))]
    return World(root, folders, [tree(folder) for folder in folders], edges, folders[0])


@pytest.mark.parametrize("order", [(0, 2), (1, 0), (2, 0)])
def test_edges_that_do_not_meet(disjoint: World, order: tuple[int, int]) -> None:
    """A chain with a gap or out of order is refused before anything is written: it leads to no version."""
    target = disjoint.root / "target"
    for held in range(4):
        reset(target, disjoint.trees[held])
        before = stamps(target)
        with pytest.raises(InputError):
            walk(target, [Step.open(disjoint.edges[i]) for i in order])
        assert stamps(target) == before


def test_edges_that_do_not_meet_make_no_copy(disjoint: World) -> None:
    """The same for a copy."""
    dest = disjoint.root / "copy"
    with pytest.raises(InputError):
        copy(disjoint.folders[0], dest, [Step.open(disjoint.edges[i]) for i in (0, 2)])
    assert not dest.exists()


# ---- copies


def hub_cache(tiny: World, name: str) -> Path:
    """A directory of links to blobs named by their digests, as the Hub's cache has it."""
    blobs, snapshot = reset(tiny.root / name / "blobs", {}), reset(tiny.root / name / "snapshot", {})
    for i, (path, data) in enumerate(tiny.trees[0].items()):
        (blobs / str(i)).write_bytes(data)
        (blobs / str(i)).chmod(0o444)
        (snapshot / path).symlink_to(f"../blobs/{i}")
    return snapshot


@pytest.mark.parametrize("threads", [1, 2])
def test_copy_from_a_cache_of_links(tiny: World, threads: int) -> None:
    """A read-only cache of links is not changed, and its copy is the new version in plain, writable files."""
    source, dest = hub_cache(tiny, f"cache-{threads}"), tiny.root / f"copy-{threads}"
    before = stamps(source.parent)
    with Workers(threads) as workers:
        copy_and_apply(source, dest, tiny.steps(0, 3), workers)
    assert unlike(tree(dest), tiny.trees[3]) == []
    assert not any(path.is_symlink() or not path.stat().st_mode & 0o200 for path in dest.iterdir())
    assert stamps(source.parent) == before


def test_copy_of_the_goal(tiny: World) -> None:
    """A source that already is the last version is copied as it is."""
    copy(tiny.folders[1], tiny.root / "same", tiny.steps(0, 1))
    assert unlike(tree(tiny.root / "same"), tiny.trees[1]) == []


@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling"])
def test_copy_onto_something(tiny: World, target: Path, kind: str) -> None:
    """What stands where the copy should go is left alone."""
    dest = tiny.root / f"taken-{kind}"
    if kind == "file":
        dest.write_bytes(b"mine")
    elif kind == "folder":
        reset(dest, {"mine": b"mine"})
    else:
        dest.symlink_to(reset(tiny.root / "linked", {}) if kind == "link" else tiny.root / "nowhere")
    with pytest.raises(TargetError, match="exists already"):
        copy(target, dest, tiny.steps(0, 1))
    assert dest.is_symlink() == (kind in ("link", "dangling"))
    assert kind != "file" or dest.read_bytes() == b"mine"
    assert kind != "folder" or tree(dest) == {"mine": b"mine"}


def test_copy_of_another_version(tiny: World) -> None:
    """A source that holds no version of the chain gives an error and no directory."""
    before = {path.name for path in tiny.root.iterdir()}
    with pytest.raises(BaseMismatch, match="starts from"):
        copy(tiny.folders[3], tiny.root / "never", tiny.steps(0, 1))
    assert {path.name for path in tiny.root.iterdir()} == before


# ---- small files


@pytest.mark.parametrize(("start", "goal"), [(0, 3), (3, 0), (1, 2), (2, 1)])
def test_assets_travel_and_other_files_stay(tiny: World, target: Path, start: int, goal: int) -> None:
    """Changed, added and removed small files follow the weights both ways; a user's own files are not touched."""
    mine = {"notes.md": b"mine", "logs/": b"", "logs/run.txt": b"1", "other.json.bak": b"2"}
    reset(target, {**tiny.trees[start], **mine})
    kept = [target / name for name in mine if not name.endswith("/")]
    before = [path.stat().st_mtime_ns for path in kept]
    walk(target, tiny.steps(start, goal))
    assert unlike(tree(target), {**tiny.trees[goal], **mine}) == []
    assert [path.stat().st_mtime_ns for path in kept] == before


def test_assets_edited_by_the_user_are_replaced(tiny: World, target: Path) -> None:
    """Small files of the version are written even if the directory's own were changed, missing, or links elsewhere."""
    elsewhere = tiny.root / "shared-tokenizer.json"
    elsewhere.write_bytes(b"shared")
    (target / "config.json").write_bytes(b"edited")
    (target / "merges.txt").unlink()
    (target / "tokenizer.json").unlink()
    (target / "tokenizer.json").symlink_to(elsewhere)
    walk(target, tiny.steps(0, 1))
    assert unlike(tree(target), tiny.trees[1]) == []
    assert elsewhere.read_bytes() == b"shared"
    assert not (target / "tokenizer.json").is_symlink()


def test_assets_with_long_names(tiny: World) -> None:
    """A name of 255 bytes travels, in ASCII or not."""
    models = [worlds.model(1)]
    models.append(models[0].changed(1, {"重" * 83 + "x.json": b"{}", "y" * 251 + ".txt": b"y"}))
    folders = [model.save(tiny.root / f"long-{i}") for i, model in enumerate(models)]
    bundle = worlds.edge(*folders, tiny.root / "long-edge")
    walk(folders[0], [Step.open(bundle)])
    assert unlike(tree(folders[0]), tree(folders[1])) == []


def test_assets_that_cannot_be_written(tiny: World, target: Path) -> None:
    """When a folder is in a small file's place the error names it, and both ways stay open once it is gone."""
    for back in (False, True):
        reset(target, tiny.trees[0])
        (target / "chat.jinja").mkdir()
        with pytest.raises(TargetError, match=r"chat\.jinja"):
            walk(target, tiny.steps(0, 1))
        (target / "chat.jinja").rmdir()
        walk(target, tiny.steps(*((1, 0) if back else (0, 1))))
        assert unlike(tree(target), tiny.trees[0 if back else 1]) == []


# ---- full disks


NUMBERS = r"\d+ bytes.*\d+"
"""Needed and available."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system of two megabytes."""
    with small_disk(tmp_path / "disk", 2 << 20) as folder:
        yield folder


def fill_up(disk: Path, leave: int) -> Path:
    """Take all room but about so many bytes; removing the file gives it back."""
    filler = disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(disk).free - leave))
    return filler


def test_row_target_too_small_for_the_journal(tiny: World, disk: Path) -> None:
    """No room for the journal: refused with both numbers before any write."""
    target = reset(disk / "target", tiny.trees[0])
    fill_up(disk, 8192)
    before = stamps(target)
    with Workers(1) as workers, pytest.raises(NoSpace, match=f"journal.*{NUMBERS}"):
        apply(target, tiny.steps(0, 1), workers, contents=worlds.ASSETS[0])
    assert stamps(target) == before


LARGER = {**worlds.ASSETS[3], "added-v3.json": bytes(400_000)}


@pytest.mark.parametrize("back", [False, True], ids=["repeated", "undone"])
def test_disk_that_fills_up_before_the_assets(tiny: World, disk: Path, back: bool) -> None:
    """No room for a small file any more: nothing is lost, and with room the apply is finished or undone."""
    target = reset(disk / "target", tiny.trees[2])
    filler = fill_up(disk, 48 << 10)
    with Workers(1) as workers, pytest.raises(NoSpace):
        apply(target, tiny.steps(2, 3), workers, contents=LARGER)
    filler.unlink()
    walk(target, tiny.steps(*((3, 2) if back else (2, 3))))
    assert unlike(tree(target), tiny.trees[2 if back else 3]) == []


def test_row_target_too_small_for_assets(tiny: World, disk: Path) -> None:
    """That the small files will not fit is known, with both numbers, before the first write."""
    target = reset(disk / "target", tiny.trees[2])
    fill_up(disk, 48 << 10)
    before = stamps(target)
    with Workers(1) as workers, pytest.raises(NoSpace, match=NUMBERS):
        apply(target, tiny.steps(2, 3), workers, contents=LARGER)
    assert stamps(target) == before


def test_row_target_too_small_for_a_copy(tiny: World, disk: Path) -> None:
    """No room for the copy: refused with both numbers, and nothing is left of it."""
    filler = fill_up(disk, 40 << 10)
    with pytest.raises(NoSpace, match=f"copy.*{NUMBERS}"):
        copy(tiny.folders[0], disk / "copy", tiny.steps(0, 1))
    assert [path.name for path in disk.iterdir()] == ["filler"]
    filler.unlink()
    copy(tiny.folders[0], disk / "copy", tiny.steps(0, 1))
    assert unlike(tree(disk / "copy"), tiny.trees[1]) == []


def test_row_target_too_small_for_holes(tiny: World, disk: Path) -> None:
    """A sparse file whose holes do not fit is refused: a store into a hole would kill the process."""
    target = reset(disk / "target", {})
    zeros = worlds.model(1)
    zeros = zeros.put("a.embed", np.zeros_like(zeros.tensors["a.embed"].words))
    old, new = zeros.save(disk / "old"), zeros.changed(1).save(disk / "new")
    step = Step.open(worlds.edge(old, new, disk / "edge"))
    for name, data in tree(old).items():
        with (target / name).open("wb") as file:
            file.truncate(len(data))
            for at in range(0, len(data), 4096):
                if any(data[at : at + 4096]):
                    file.seek(at)
                    file.write(data[at : at + 4096])
    filler = fill_up(disk, 24 << 10)
    error = outcome(lambda: walk(target, [step]))
    assert isinstance(error, NoSpace)
    assert re.search(f"holes.*{NUMBERS}", str(error))
    assert unlike(tree(target), tree(old)) == []
    filler.unlink()
    walk(target, [step])
    assert unlike(tree(target), tree(new)) == []
