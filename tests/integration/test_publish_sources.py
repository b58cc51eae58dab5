"""What a publisher is given: sources and parents that are missing, broken, other than they should be, or moving."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds import MODEL, World, outcome, reset, tree

from integration.places import Place, clean
from weightsync import publish as publishing
from weightsync.delta import diff
from weightsync.errors import CheckpointError, InputError, SourceChanged, StoreConflict, StoreNotFound
from weightsync.store import VolumeStore, names

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture
def place(tiny: World) -> Place:
    """Give a volume with v0."""
    shutil.rmtree(tiny.root / "volume", ignore_errors=True)
    return Place(VolumeStore(tiny.root / "volume"), tiny).publish_all(0, sibling=False)


@pytest.fixture
def source(tiny: World) -> Path:
    """Give a copy of v1's checkpoint, to be spoiled."""
    return reset(tiny.root / "source", tiny.trees[1])


def refused(place: Place, source: Path, error: type[Exception], match: str, version: str = "v1") -> None:
    """Check that publishing fails so, with and without a parent, and puts nothing into the store."""
    before = place.listing()
    for parent in ("v0", None):
        with pytest.raises(error, match=match):
            place.publish(source, version, parent, place.world.folders[0] if parent else None)
    assert place.listing() == before


# ---- sources that are no checkpoint


def test_row_source_missing(place: Place, tiny: World) -> None:
    """A source that is not there, or is empty, is named."""
    refused(place, tiny.root / "no-such-place", CheckpointError, "no-such-place")
    refused(place, reset(tiny.root / "empty", {}), CheckpointError, "empty: holds no safetensors file")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_row_source_unreadable(place: Place, source: Path) -> None:
    """A source that this user may not read is named."""
    (source / SECOND).chmod(0o000)
    place.world.root.chmod(0o777)
    Path(place.store.url).chmod(0o755)
    error = outcome(lambda: place.publish(source, "v1", "v0"), uid=65534)
    assert isinstance(error, CheckpointError)
    assert re.search(f"{SECOND}.*Permission denied", str(error))


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated by a byte": (lambda data: data[:-1], "truncated"),
    "truncated in the header": (lambda data: data[:40], "truncated"),
    "truncated to nothing": (lambda data: b"", "truncated"),
    "longer": (lambda data: data + b"\0", "followed by other bytes"),
    "not safetensors": (lambda data: b"PK\3\4" + data, "not a safetensors file"),
    "header no JSON": (lambda data: data[:8] + b"!" + data[9:], "not JSON"),
    "header no UTF-8": (lambda data: data[:12] + b"\xff" + data[13:], "UTF-8"),
    "hole between tensors": (lambda data: data.replace(b"[0,", b"[2,", 1), "hole|takes|overlaps|span"),
    "wrong shape": (lambda data: data.replace(b'"shape":[1000]', b'"shape":[1001]', 1), "takes 1001 bytes"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_row_source_truncated_or_no_safetensors(place: Place, source: Path, kind: str) -> None:
    """A broken file is refused with its name and the byte where it goes wrong."""
    spoil, words = BROKEN[kind]
    good = (source / FIRST).read_bytes()
    bad = spoil(good)
    assert bad != good
    (source / FIRST).write_bytes(bad)
    refused(place, source, CheckpointError, rf"{FIRST}: byte \d+.*({words})")


def test_row_duplicate_tensor_names(place: Place, source: Path) -> None:
    """A name in two files, or twice in one header, is refused with both places."""
    (source / "model.safetensors.index.json").unlink()
    shutil.copy(source / FIRST, source / "zz.safetensors")
    refused(place, source, CheckpointError, rf"'a\.embed' is in both {FIRST} \(byte \d+\) and zz\.safetensors")
    (source / "zz.safetensors").unlink()
    data = (source / FIRST).read_bytes().replace(b'"c.attn"', b'"a.embed"', 1)
    padded = data.replace(b" " * 2, b" ", 1) if b"  " in data[:600] else data
    size = int.from_bytes(data[:8], "little") + len(padded) - len(data) + 1
    (source / FIRST).write_bytes(size.to_bytes(8, "little") + padded[8:])
    refused(place, source, CheckpointError, rf"{FIRST}: byte 8.*'a\.embed' occurs twice")


def test_index_that_names_missing_files(place: Place, source: Path) -> None:
    """An index that names a file that is not there, or one outside, is refused by its name."""
    index = source / "model.safetensors.index.json"
    good = index.read_text()
    (source / SECOND).rename(source / "renamed.bin")
    refused(place, source, CheckpointError, f"index.json: names {SECOND}, which is not there")
    for bad, words in ((good.replace(SECOND, f"../{SECOND}"), "names '../"), ("[]", "weight_map"), ("{", "weight_map")):
        index.write_text(bad)
        refused(place, source, CheckpointError, words)


# ---- sources that change


def spoiling(monkeypatch: pytest.MonkeyPatch, name: str, call: int, act: Callable[[], object]) -> None:
    """Do something in the middle of a pass over the checkpoints: at the given call of a function of it."""
    original = getattr(diff, name)
    calls = iter(range(1 << 30))

    def wrapped(*arguments: Any) -> Any:
        if next(calls) == call:
            act()
        return original(*arguments)

    monkeypatch.setattr(diff, name, wrapped)


def rewrite(path: Path, *, keep_time: bool = False) -> None:
    """Change the last value of a file in place."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def swap(path: Path) -> None:
    """Put another file of the same content in its place."""
    shutil.copy(path, path.with_name("new"))
    path.with_name("new").rename(path)


CHANGES: dict[str, Callable[[Path], object]] = {"rewritten": rewrite, "replaced": swap, "removed": Path.unlink}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("parent", ["v0", None])
@pytest.mark.parametrize("call", [0, 4, 7])
def test_row_source_changes_while_it_is_read(
    place: Place, source: Path, monkeypatch: pytest.MonkeyPatch, change: str, parent: str | None, call: int
) -> None:
    """A file that is rewritten, replaced or removed at any moment of the pass is named, and nothing is published."""
    before = place.listing()
    spoiling(monkeypatch, "chunk_digest", call, lambda: CHANGES[change](source / SECOND))
    with pytest.raises(SourceChanged, match=SECOND):
        place.publish(source, "v1", parent, place.world.folders[0] if parent else None)
    assert place.listing() == before


def test_source_changes_between_two_passes(place: Place, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delta and full copy of one version are of the same bytes, even if the times of the files say nothing."""
    before = place.listing()
    original = publishing.make_full

    def later(*arguments: Any, **options: Any) -> Any:
        rewrite(source / SECOND, keep_time=True)
        return original(*arguments, **options)

    monkeypatch.setattr(publishing, "make_full", later)
    with pytest.raises(SourceChanged, match="changed while it was read"):
        place.publish(source, "v1", "v0", place.world.folders[0], full_ratio=0)
    assert place.listing() == before


def test_parent_changes_while_it_is_read(place: Place, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that is rewritten between proof and comparison is rebuilt from the store: never a wrong delta."""
    old = reset(place.world.root / "old", place.world.trees[0])
    spoiling(monkeypatch, "compare", 0, lambda: [rewrite(old / file) for file in (FIRST, SECOND)])
    done = place.publish(source, "v1", "v0", old)
    assert done.parent_from == "store"
    assert done.edges[0]["digest"] == place.world.edges[0].edge().sha256


def test_row_source_differs_on_retry(place: Place, source: Path) -> None:
    """A name that stands for something else is never given again, and the message names the file and the tensor."""
    place.publish(source, "v1", "v0")
    rewrite(source / FIRST)
    refused(place, source, SourceChanged, rf"'v1'.*already published.*'k\.fp4' of {FIRST}.*choose a new name")
    reset(source, {**place.world.trees[1], "config.json": b"other"})
    refused(place, source, SourceChanged, r"already published.*config\.json differ")


def test_one_name_for_two_manifests(place: Place, source: Path) -> None:
    """If a store came to hold one name for two versions, it is reported instead of picking one."""
    done = place.publish(source, "v1", "v0")
    with place.extra({names.name_path(MODEL, "v0", done.manifest): b""}):
        with pytest.raises(StoreConflict, match=r"two publishers|2 manifests"):
            place.pull("v0", place.world.root / "never")
        with pytest.raises(StoreConflict, match=r"two publishers|2 manifests"):
            place.publish(place.world.folders[2], "v2", "v0")


# ---- parents


def test_row_parent_missing(place: Place, source: Path) -> None:
    """A parent that was not published, by name or digest, is an error that names it; nothing is stored."""
    before = place.listing()
    for parent in ("v9", "0" * 64):
        with pytest.raises(StoreNotFound, match=parent):
            place.publish(source, "v1", parent)
    assert place.listing() == before


def test_row_parent_of_another_model(place: Place, source: Path) -> None:
    """Versions of another model are no parents, not even if their manifest was copied over."""
    other = replace(place, model="another", published={})
    foreign = other.publish(place.world.folders[0], "v0").manifest
    with pytest.raises(StoreNotFound):
        place.publish(source, "v1", foreign)
    copied = place.store.read(names.manifest_path("another", foreign))
    with place.extra({names.manifest_path(MODEL, foreign): copied}), pytest.raises(InputError, match="'another'"):
        place.publish(source, "v1", foreign)
    assert place.remote.find("v1") == []


def test_parent_that_cannot_be_rebuilt(place: Place, source: Path) -> None:
    """When neither the parent's directory nor the store can give its weights, the error says so; nothing is stored."""
    data = next(path for path in place.listing() if "/data/" in path)
    with place.spoiled(data, "gone"):
        before = place.listing()
        with pytest.raises(InputError, match="no way from nothing"):
            place.publish(source, "v1", "v0", place.world.root / "gone")
        assert place.listing() == before
        done = place.publish(source, "v1", "v0", place.world.folders[0])
        assert done.parent_from == "source"


def test_parent_published_under_many_names(place: Place, source: Path) -> None:
    """A parent is named by any of its names or its digest, and the same edge comes out."""
    same = place.publish(place.world.folders[0], "also-v0", "v0")
    first = place.publish(source, "v1", "also-v0", place.world.folders[0])
    again = place.publish(source, "v1", f"sha256:{same.manifest}", place.world.folders[0])
    assert again.edges == first.edges
    assert again.sent_bytes == 0


@pytest.mark.parametrize("name", ["", "V1", "a/b", "../v1", "v1-", "a" * 254, "v 1", "ü"])
def test_names_that_cannot_be(place: Place, source: Path, name: str) -> None:
    """A version's name that no store can hold is refused before anything is read or written."""
    refused(place, source, InputError, "cannot name a version", version=name)


def test_ignored_files_are_listed(place: Place, source: Path) -> None:
    """Files that do not travel are said so, and a pull does not have them."""
    (source / "notes.md").write_bytes(b"x")
    (source / "runs").mkdir()
    done = place.publish(source, "v1", "v0", place.world.folders[0])
    assert done.ignored == ["notes.md", "runs/"]
    dest = place.world.root / "ignored"
    place.pull("v1", dest)
    assert clean(dest, place.world.trees[1]) == []
    assert "notes.md" not in tree(dest)
