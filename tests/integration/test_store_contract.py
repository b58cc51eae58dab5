"""What every store promises, tested on each kind of store by the same tests."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from integration.stores import Backend, fresh_client, hub_backend, names_in, volume_backend, wanted
from weightsync.errors import InputError, StoreConflict, StoreCorrupt, StoreNotFound, TargetError
from weightsync.store import Download, Store

HOSTILE = [
    "",
    "/etc/x",
    "../x",
    "a/../../x",
    "a/..",
    "./x",
    "a//x",
    "a/",
    "a\\..\\x",
    "a\0x",
    "a\nx",
    "a/.tmp-1",
    "\ud800",
    "x" * 256,
]


@pytest.fixture(params=["volume", "hub"])
def backend(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Give an empty store of each kind."""
    if request.param == "volume":
        return volume_backend(tmp_path)
    fresh_client(monkeypatch, tmp_path / "home")
    return hub_backend(request.getfixturevalue("server"), f"alice/contract-{time.monotonic_ns()}")


@pytest.fixture
def store(backend: Backend) -> Store:
    """Give the empty store itself."""
    return backend.store


def listed(store: Store, prefix: str = "") -> dict[str, int]:
    return {entry.path: entry.bytes for entry in store.list(prefix)}


def test_what_goes_in_comes_out(store: Store, tmp_path: Path) -> None:
    """Bytes and files, large, small and empty, come back byte for byte, by `get` and by `read`."""
    large, small = os.urandom(3_000_001), b"\0small\xff"
    (tmp_path / "large").write_bytes(large)
    (tmp_path / "void").write_bytes(b"")
    sent = store.put({"m/data/large": tmp_path / "large", "m/small": small, "m/void": tmp_path / "void", "m/none": b""})
    assert sent == len(large) + len(small)
    contents = {"m/data/large": large, "m/small": small, "m/void": b"", "m/none": b""}
    store.get([wanted(path, content, tmp_path / "out" / path) for path, content in contents.items()])
    for path, content in contents.items():
        assert (tmp_path / "out" / path).read_bytes() == content
        assert store.read(path, sha256=wanted(path, content, tmp_path).sha256) == content


def test_putting_again_sends_and_changes_nothing(store: Store) -> None:
    """A retry of the same put leaves young objects exactly as they are."""
    store.put({"m/a": b"one", "m/b": b""})
    before = store.list("")
    time.sleep(0.02)
    assert store.put({"m/a": b"one", "m/b": b""}) == 0
    assert store.list("") == before


def test_old_objects_are_made_young_with_their_content(store: Store) -> None:
    """An object older than the limit gets a new time and keeps its content, with no bytes sent."""
    store.put({"m/a": b"one", "m/empty": b""})
    before = {entry.path: entry.modified for entry in store.list("")}
    time.sleep(0.02)
    assert store.put({"m/a": b"two", "m/empty": b""}, refresh_after=0) == 0
    after = {entry.path: entry.modified for entry in store.list("")}
    assert after["m/a"] > before["m/a"]
    assert after["m/empty"] > before["m/empty"]
    assert store.read("m/a") == b"one"


def test_nothing_is_overwritten(store: Store) -> None:
    """Other content of the same size is left alone, of another size it is a conflict; the old content stays."""
    store.put({"m/a": b"one"})
    assert store.put({"m/a": b"two"}) == 0
    with pytest.raises(StoreConflict, match=r"m/a exists.*3 bytes.*4"):
        store.put({"m/a": b"four"}, refresh_after=0)
    with pytest.raises(StoreConflict, match="m/a exists"):
        store.put({"m/a": b""})
    assert store.read("m/a") == b"one"


def test_two_writers_of_the_same_objects_both_succeed(backend: Backend) -> None:
    """Processes that publish the same thing at the same moment both succeed, and each object is whole."""
    items = {"m/data/x": "x" * 200_000, "m/empty": "", **{f"m/blobs/{n}": str(n) for n in range(8)}}
    results = backend.race(items, items, items)
    assert all(result.isdigit() for result in results), results
    assert listed(backend.store) == {path: len(text) for path, text in items.items()}
    for path, text in items.items():
        assert backend.store.read(path) == text.encode()


def test_wrong_content_never_reaches_the_destination(store: Store, tmp_path: Path) -> None:
    """Bytes with another digest or size are refused, the file at the destination stays and no temporary is left."""
    store.put({"m/a": b"stored", "m/empty": b""})
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "held").write_bytes(b"held")
    for path, content in (("m/a", b"wanted"), ("m/a", b"longer than that"), ("m/a", b""), ("m/empty", b"x")):
        with pytest.raises(StoreCorrupt, match=path):
            store.get([wanted(path, content, folder / "held")])
        assert (folder / "held").read_bytes() == b"held"
        assert names_in(folder) == ["held"]


def test_a_destination_is_replaced_not_written_into(store: Store, tmp_path: Path) -> None:
    """Who has the old file open goes on reading the old bytes: the new ones come by rename."""
    store.put({"m/a": b"new content"})
    dest = tmp_path / "dest"
    dest.write_bytes(b"old")
    with dest.open("rb") as old:
        store.get([wanted("m/a", b"new content", dest)])
        assert old.read() == b"old"
    assert dest.read_bytes() == b"new content"


def test_missing_objects_are_named_and_nothing_appears(store: Store, tmp_path: Path) -> None:
    """Fetching or reading what is not there says which object, and leaves no file for it."""
    store.put({"m/a": b"one"})
    for path in ("m/b", "m/a/b", "m"):
        with pytest.raises(StoreNotFound, match=f"{path} is not in"):
            store.get([Download(path, tmp_path / "out" / "dest", "0" * 64, 3)])
        with pytest.raises(StoreNotFound, match=f"{path} is not in"):
            store.read(path)
    assert not (tmp_path / "out" / "dest").exists()


def test_a_store_that_is_not_there_says_so(backend: Backend, tmp_path: Path) -> None:
    """Reading from a directory or bucket that does not exist is `StoreNotFound` with its address, not an empty store."""
    absent = backend.absent
    for ask in (
        lambda: absent.list(""),
        lambda: absent.list("m/"),
        lambda: absent.read("m/a"),
        lambda: absent.get([Download("m/a", tmp_path / "dest", "0" * 64, 0)]),
        lambda: absent.delete(["m/a"]),
    ):
        with pytest.raises(StoreNotFound, match="absent"):
            ask()


def test_reading_is_limited_and_checked(store: Store) -> None:
    """`read` refuses what is larger than its limit or has another digest."""
    store.put({"m/a": b"12345"})
    assert store.read("m/a", limit=5) == b"12345"
    with pytest.raises(StoreCorrupt, match="5 bytes, more than the 4 allowed"):
        store.read("m/a", limit=4)
    with pytest.raises(StoreCorrupt, match="m/a"):
        store.read("m/a", sha256="0" * 64)


def test_listing_is_by_folder_and_in_order(store: Store) -> None:
    """A listing holds what lies below the folder, at any depth and in path order, and no similar names."""
    start = time.time()
    paths = ["m/edges/b", "m/edges/a", "m/edges/c/d", "m/edges-x", "m/edges.y/z", "m/edges2/a", "n/edges/a", "m/é"]
    store.put({path: path.encode() for path in paths})
    assert [entry.path for entry in store.list("m/edges/")] == ["m/edges/a", "m/edges/b", "m/edges/c/d"]
    assert [entry.path for entry in store.list("")] == sorted(paths)
    assert listed(store, "m/edges/")["m/edges/c/d"] == 11
    assert all(start - 2 <= entry.modified <= time.time() + 2 for entry in store.list(""))
    assert store.list("m/nothing/") == []
    assert store.list("m/edges/a/") == []
    with pytest.raises(InputError, match="ends in '/'"):
        store.list("m/edges")


def test_deleting_is_complete_and_repeatable(store: Store) -> None:
    """What is named goes, also beside names that are gone already; the rest stays."""
    store.put({"m/a": b"1", "m/b": b"2", "m/c/d": b""})
    store.delete(["m/a", "m/never", "nowhere/x", "m/c/d", "m/c", "m/b/x"])
    assert listed(store) == {"m/b": 1}
    store.delete(["m/a"])
    store.delete([])
    assert listed(store) == {"m/b": 1}
    assert store.put({"m/a": b"again"}) == 5


@pytest.mark.parametrize("path", HOSTILE)
def test_hostile_paths_are_refused_before_anything_happens(store: Store, tmp_path: Path, path: str) -> None:
    """A path that could leave the store or hide in it is wrong input for every method, and does nothing."""
    dest = tmp_path / "dest"
    for ask in (
        lambda: store.put({"m/fine": b"x", path: b"x"}),
        lambda: store.get([Download(path, dest, "0" * 64, 1)]),
        lambda: store.read(path),
        lambda: store.delete(["m/fine", path]),
    ):
        with pytest.raises(InputError, match="cannot be an object's path"):
            ask()
    assert listed(store) == {}
    assert not dest.exists()


def test_sources_that_cannot_be_read_are_wrong_input(store: Store, tmp_path: Path) -> None:
    """A missing file or a folder is refused by name, before anything is stored."""
    for source in (tmp_path / "missing", tmp_path):
        with pytest.raises(InputError, match=str(source)):
            store.put({"m/a": b"x", "m/b": source})
    assert listed(store) == {}


def test_destinations_that_cannot_be_written_are_not_the_stores_fault(store: Store, tmp_path: Path) -> None:
    """A local path that cannot be made is `TargetError`, so that nobody waits for the store to recover."""
    store.put({"m/a": b"one"})
    (tmp_path / "file").write_bytes(b"in the way")
    (tmp_path / "folder").mkdir()
    for dest in (tmp_path / "file" / "dest", tmp_path / "folder"):
        with pytest.raises(TargetError, match="cannot write m/a"):
            store.get([wanted("m/a", b"one", dest)])
    assert names_in(tmp_path / "folder") == []
