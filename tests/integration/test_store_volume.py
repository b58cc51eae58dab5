"""A directory as a store: real files, real links, and what happens when disks, writers and permissions fail."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.stores import names_in, small_disk, volume_backend, wanted
from weightsync.errors import (
    NoSpace,
    StoreConflict,
    StoreCorrupt,
    StoreDenied,
    StoreError,
    StoreNotFound,
    StoreUnavailable,
)
from weightsync.store import Download, VolumeStore, files, open_store, volume

DAY = 24 * 3600.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Give a directory that does not exist yet."""
    return tmp_path / "root"


@pytest.fixture
def store(root: Path) -> VolumeStore:
    """Give the store in it."""
    return VolumeStore(root)


def everything(root: Path) -> list[str]:
    """All files below a root, hidden ones too."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def test_writers_of_different_content_have_one_winner(tmp_path: Path) -> None:
    """Of processes that put different sizes under one name at once exactly one succeeds; its object is whole."""
    backend = volume_backend(tmp_path)
    for turn in range(3):
        contents = ["x" * (100_000 + n) for n in range(4)]
        results = backend.race(*({f"m/{turn}": content} for content in contents))
        won = [n for n, result in enumerate(results) if result != "StoreConflict"]
        assert len(won) == 1, results
        assert results[won[0]] == str(100_000 + won[0])
        assert backend.store.read(f"m/{turn}") == contents[won[0]].encode()


def other_writer(monkeypatch: pytest.MonkeyPatch, root: Path, content: bytes, then: OSError | None = None) -> None:
    """Let another writer take the name just before this one links to it; `then` is what linking says instead."""
    link = os.link

    def late(source: str, target: str, **how: Any) -> None:
        (root / "m" / target).write_bytes(content)
        if then is not None:
            raise then
        link(source, target, **how)

    monkeypatch.setattr(os, "link", late)


@pytest.mark.parametrize("links", [True, False])
def test_a_name_taken_at_the_last_moment_is_not_overwritten(
    store: VolumeStore, root: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """The loser of a race leaves the winner's object alone, with hard links and without."""
    other_writer(monkeypatch, root, b"theirs", None if links else OSError(errno.EPERM, "no links here"))
    with pytest.raises(StoreConflict, match="6 bytes where 4"):
        store.put({"m/a": b"mine"})
    assert store.put({"m/b": b"same!!"}) == 0
    assert everything(root) == ["m/a", "m/b"]
    assert store.read("m/a") == store.read("m/b") == b"theirs"


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS])
def test_without_hard_links_objects_are_renamed_into_place(
    store: VolumeStore, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """File systems that refuse hard links work all the same."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert store.put({"m/a": b"mine"}) == 4
    assert store.put({"m/a": b"mine"}) == 0
    with pytest.raises(StoreConflict):
        store.put({"m/a": b"other"})
    assert store.read("m/a") == b"mine"
    assert everything(root) == ["m/a"]


def test_a_file_system_that_cannot_keep_writers_apart_is_refused(
    store: VolumeStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither links nor exclusive renames exist nothing is stored, and the message says why."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(volume, "_rename_noreplace", lambda *_: errno.EINVAL)
    with pytest.raises(StoreError, match="neither make hard links nor rename without replacing"):
        store.put({"m/a": b"mine"})
    assert everything(root) == []


def test_an_object_is_on_disk_before_its_name(store: VolumeStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content is forced to disk before the name appears, and the folder after it."""
    store.put({"m/first": b""})
    events: list[str] = []
    sync, link = os.fsync, os.link

    def note_sync(file: int) -> None:
        events.append("sync folder" if stat.S_ISDIR(os.fstat(file).st_mode) else f"sync {os.fstat(file).st_size}")
        sync(file)

    def note_link(*names: str, **how: Any) -> None:
        events.append("link")
        link(*names, **how)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "link", note_link)
    store.put({"m/a": b"12345"})
    assert events == ["sync 5", "link", "sync folder"]


_KILLED = """
import os, signal, sys
from pathlib import Path
from weightsync.store import VolumeStore, files
root, source, point = sys.argv[1:]
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
write, link = files.write_all, os.link
def half(file, data):
    write(file, data)
    die()
def linked(*names, **how):
    link(*names, **how)
    die()
if point == "in the content":
    files.write_all = half
elif point == "before the name":
    os.link = die
else:
    os.link = linked
VolumeStore(Path(root)).put({"m/a": Path(source)})
"""


@pytest.mark.parametrize("point", ["in the content", "before the name", "after the name"])
def test_a_killed_writer_leaves_nothing_half_done(store: VolumeStore, root: Path, tmp_path: Path, point: str) -> None:
    """After kill -9 an object is whole or not there, and the next writer finishes the work."""
    content = os.urandom(3 * files.BLOCK + 5)
    (tmp_path / "source").write_bytes(content)
    command = [sys.executable, "-c", _KILLED, str(root), str(tmp_path / "source"), point]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    there = point == "after the name"
    assert [(entry.path, entry.bytes) for entry in store.list("")] == ([("m/a", len(content))] if there else [])
    assert store.put({"m/a": tmp_path / "source"}) == (0 if there else len(content))
    assert store.read("m/a") == content


def test_stale_temporaries_are_removed_and_young_ones_kept(store: VolumeStore, root: Path) -> None:
    """A put clears temporaries older than a day from its folder; a writer at work is not disturbed, none is listed."""
    (root / "m").mkdir(parents=True)
    for name, age in ((".tmp-old", DAY + 60), (".tmp-young", DAY - 60)):
        (root / "m" / name).write_bytes(b"part")
        os.utime(root / "m" / name, (time.time() - age,) * 2)
    assert store.list("") == []
    store.put({"m/a": b"1"})
    assert names_in(root / "m") == [".tmp-young", "a"]
    assert [entry.path for entry in store.list("")] == ["m/a"]


def test_objects_are_made_young_only_when_old(store: VolumeStore, root: Path) -> None:
    """The refresh limit is an age: an object just under it keeps its time, one over it gets the present time."""
    store.put({"m/a": b"1", "m/b": b"2"})
    now = time.time()
    os.utime(root / "m/a", (now - 50, now - 50))
    os.utime(root / "m/b", (now - 70, now - 70))
    store.put({"m/a": b"1", "m/b": b"2"}, refresh_after=60)
    times = {entry.path: entry.modified for entry in store.list("")}
    assert times["m/a"] == pytest.approx(now - 50, abs=1)
    assert times["m/b"] == pytest.approx(now, abs=5)


def test_objects_are_readable_for_other_users(store: VolumeStore, root: Path) -> None:
    """Files have mode 0644 whatever the publisher's umask, so that pods under other users can read them."""
    root.mkdir()
    before = os.umask(0o077)
    try:
        store.put({"a": b"1"})
    finally:
        os.umask(before)
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o644


def test_a_full_disk_while_storing_says_what_was_missing(tmp_path: Path) -> None:
    """Without room a put is `NoSpace` with both numbers, what was there stays, and nothing half is left."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        store = VolumeStore(disk)
        store.put({"m/a": b"x" * 500_000})
        with pytest.raises(NoSpace, match=r"m/b .*: 900000 bytes needed, \d+ bytes available"):
            store.put({"m/b": b"y" * 900_000})
        assert everything(disk) == ["m/a"]
        assert store.put({"m/c": b"z" * 100_000}) == 100_000


def test_a_full_disk_while_fetching_says_what_was_missing(store: VolumeStore, tmp_path: Path) -> None:
    """Without room at the destination a get is `NoSpace`, and the file there stays."""
    content = b"x" * 2_000_000
    store.put({"m/a": content})
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        (disk / "dest").write_bytes(b"held")
        with pytest.raises(NoSpace, match=r"m/a .*: 2000000 bytes needed, \d+ bytes available"):
            store.get([wanted("m/a", content, disk / "dest")])
        assert (disk / "dest").read_bytes() == b"held"
        assert names_in(disk) == ["dest"]


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, NoSpace), (errno.EDQUOT, NoSpace), (errno.EIO, StoreUnavailable)]
)
def test_a_failing_write_leaves_nothing(
    store: VolumeStore, root: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    """A full disk or quota is `NoSpace`, another fault `StoreUnavailable` in the system's words; no file is left."""

    def fail(file: int, data: memoryview) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(kind, match="bytes needed" if kind is NoSpace else "Input/output error"):
        store.put({"m/a": b"12345"})
    assert everything(root) == []


@pytest.fixture
def read_only() -> Iterator[VolumeStore]:
    """Give a store with an object that this process, as another user if it is root, may only read."""
    with tempfile.TemporaryDirectory() as folder:
        store = VolumeStore(Path(folder))
        store.put({"m/a": b"one"})
        for path in (Path(folder), Path(folder, "m")):
            path.chmod(0o555)
        mine = os.geteuid()
        if mine == 0:
            os.seteuid(65534)
        try:
            yield store
        finally:
            os.seteuid(mine)
            for path in (Path(folder), Path(folder, "m")):
                path.chmod(0o755)


def test_a_read_only_store_can_be_read_but_not_changed(read_only: VolumeStore) -> None:
    """Without the right to write, reading works and every change is `StoreDenied` with what to check."""
    assert read_only.read("m/a") == b"one"
    assert [entry.path for entry in read_only.list("")] == ["m/a"]
    assert read_only.put({"m/a": b"one"}) == 0
    for change in (
        lambda: read_only.put({"m/b": b"two"}),
        lambda: read_only.put({"n/b": b"two"}),
        lambda: read_only.delete(["m/a"]),
    ):
        with pytest.raises(StoreDenied, match=r"Permission denied; check .* permissions"):
            change()
    assert read_only.read("m/a") == b"one"


def test_no_link_below_the_root_is_followed(store: VolumeStore, root: Path, tmp_path: Path) -> None:
    """Planted links lead no method outside: nothing there is read, listed, written, refreshed or removed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    os.utime(outside / "secret", (1, 1))
    store.put({"m/a": b"1"})
    (root / "m" / "folder").symlink_to(outside)
    (root / "m" / "file").symlink_to(outside / "secret")
    for path in ("m/folder/secret", "m/file"):
        for ask in (
            lambda path=path: store.read(path),
            lambda path=path: store.get([Download(path, tmp_path / "dest", "0" * 64, 6)]),
        ):
            with pytest.raises(StoreDenied, match="symbolic link"):
                ask()
    with pytest.raises(StoreDenied, match="symbolic link"):
        store.put({"m/folder/new": b"x"})
    with pytest.raises(StoreDenied, match="symbolic link"):
        store.delete(["m/folder/secret"])
    with pytest.raises(StoreDenied, match="symbolic link"):
        store.list("m/folder/")
    with pytest.raises(StoreConflict):
        store.put({"m/file": b"secret"}, refresh_after=0)
    assert [entry.path for entry in store.list("")] == ["m/a"]
    assert names_in(outside) == ["secret"]
    assert (outside / "secret").stat().st_mtime == 1
    assert not (tmp_path / "dest").exists()


def test_the_root_itself_may_be_a_link(store: VolumeStore, root: Path, tmp_path: Path) -> None:
    """Mounts are often reached through links, so the root is the one place where a link is followed."""
    store.put({"m/a": b"1"})
    (tmp_path / "link").symlink_to(root)
    linked = open_store(str(tmp_path / "link"))
    assert linked.put({"m/b": b"22"}) == 2
    assert store.read("m/b") == b"22"


def test_what_is_no_object_is_not_taken_for_one(store: VolumeStore, root: Path, tmp_path: Path) -> None:
    """Pipes, folders and foreign names are not listed, and asking for them neither hangs nor overwrites."""
    store.put({"m/a": b"1"})
    os.mkfifo(root / "m" / "pipe")
    (root / "m" / "with\\backslash").write_bytes(b"foreign")
    (root / "lost+found").mkdir(mode=0)
    assert [entry.path for entry in store.list("")] == ["m/a"]
    for path in ("m/pipe", "m"):
        with pytest.raises(StoreNotFound, match="no regular file"):
            store.read(path)
        with pytest.raises(StoreConflict, match="no file"):
            store.put({path: b"x"})
    with pytest.raises(StoreConflict, match="'a' is not a folder"):
        store.put({"m/a/b": b"x"})


def test_bytes_that_change_on_the_way_are_fetched_again(
    store: VolumeStore, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong bytes once are made good by a second try; an object that is wrong itself is `StoreCorrupt`."""
    store.put({"m/a": b"right"})
    readv = os.readv
    tries: list[int] = []

    def flip_first(file: int, buffers: list[memoryview]) -> int:
        count = readv(file, buffers)
        if not tries and count:
            tries.append(count)
            buffers[0][0] ^= 1
        return count

    monkeypatch.setattr(os, "readv", flip_first)
    store.get([wanted("m/a", b"right", tmp_path / "dest")])
    assert tries
    assert (tmp_path / "dest").read_bytes() == b"right"
    tries.clear()
    assert store.read("m/a", sha256=wanted("m/a", b"right", tmp_path).sha256) == b"right"
    (root / "m" / "a").write_bytes(b"wrong")
    with pytest.raises(StoreCorrupt):
        store.get([wanted("m/a", b"right", tmp_path / "dest")])


def test_a_root_that_is_a_file_is_said_in_the_systems_words(tmp_path: Path) -> None:
    """A root that cannot be a store is an error of ours with its path, for every method."""
    (tmp_path / "file").write_bytes(b"")
    store = VolumeStore(tmp_path / "file")
    for ask in (
        lambda: store.list(""),
        lambda: store.read("a"),
        lambda: store.put({"a": b""}),
        lambda: store.delete(["a"]),
    ):
        with pytest.raises(StoreUnavailable, match=str(tmp_path / "file")):
            ask()
