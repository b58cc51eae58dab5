"""A Hub bucket as a store: what the real client is asked to do, and what happens on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bucketserver.client import BucketServer
from integration.stores import TOKEN, count, hub_backend, small_disk, untouched, wanted
from weightsync.errors import NoSpace, StoreDenied, StoreError, StoreUnavailable
from weightsync.store import HubStore, Store, files
from weightsync.store.hub_errors import Asked, translate

BATCH = "POST .*/batch"


# ---- batches


def test_a_batch_done_in_part_is_an_error_that_names_the_rest(hub: Store, server: BucketServer) -> None:
    """The client's 200 with failures inside is an error; the same call again does only what is missing."""
    server.fail(BATCH, "refuse", paths="m/b[12]$")
    objects = {"m/a": b"1", "m/b1": b"22", "m/b2": b"333"}
    with pytest.raises(StoreError, match=r"did not do 2 operations.*m/b1 \(Internal error\), .*m/b2") as caught:
        hub.put(objects)
    assert not isinstance(caught.value, StoreUnavailable | StoreDenied)
    assert [entry.path for entry in hub.list("")] == ["m/a"]
    assert hub.put(objects) == 5
    assert [entry.path for entry in hub.list("")] == sorted(objects)


def test_a_batch_that_is_refused_whole_is_an_error(hub: Store, server: BucketServer) -> None:
    """A 422 names what was refused, and the same call works when the Hub does."""
    server.fail(BATCH, "refuse")
    with pytest.raises(StoreError, match=r"did not do 1 operations .*m/a \(Internal error\)"):
        hub.put({"m/a": b"1"})
    assert hub.list("") == []
    assert hub.put({"m/a": b"1"}) == 1


def test_deleting_what_another_deletes_at_the_same_time_is_no_error(
    hub: Store, server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused deletion is an error only while the object is still there."""
    hub.put({"m/a": b"1", "m/b": b"2"})
    other = HubStore(*_address(hub), token=TOKEN, endpoint=server.endpoint)
    present = other._present
    looks: list[int] = []

    def late(paths: list[str]) -> object:
        found = present(paths)
        if not looks:
            looks.append(1)
            hub.delete(["m/a"])
        return found

    monkeypatch.setattr(other, "_present", late)
    other.delete(["m/a", "m/b"])
    assert hub.list("") == []
    hub.put({"m/c": b"3"})
    server.fail(BATCH, "refuse", paths="m/c")
    with pytest.raises(StoreError, match="m/c"):
        hub.delete(["m/c"])


def _address(hub: Store) -> tuple[str, str]:
    owner, name, *prefix = hub.url.removeprefix("hf://buckets/").split("/")
    return f"{owner}/{name}", "/".join(prefix)


def test_old_objects_are_refreshed_without_sending_them(hub: Store, server: BucketServer) -> None:
    """A refresh moves no chunk, and where the Hub refuses the copy the object is uploaded again."""
    content = os.urandom(400_000)
    hub.put({"m/a": content, "m/b": b"22"})
    before = {entry.path: entry.modified for entry in hub.list("")}
    server.clear()
    time.sleep(0.01)
    assert hub.put({"m/a": content}, refresh_after=0) == 0
    assert count(server, "/cas/") == 0
    server.fail(BATCH, "refuse", kind="copyFile")
    assert hub.put({"m/a": content, "m/b": b"22", "m/c": b"3"}, refresh_after=0) == len(content) + 3
    after = {entry.path: entry.modified for entry in hub.list("")}
    assert after["m/a"] > before["m/a"]
    assert after["m/b"] > before["m/b"]
    assert hub.read("m/a") == content


def test_the_age_of_an_object_is_that_of_its_upload(hub: Store, tmp_path: Path) -> None:
    """A file written long ago and stored now is young: a clean-up by age must not take it."""
    (tmp_path / "old").write_bytes(b"old")
    os.utime(tmp_path / "old", (1_000_000, 1_000_000))
    hub.put({"m/a": tmp_path / "old"})
    assert hub.list("")[0].modified == pytest.approx(time.time(), abs=10)


def test_more_objects_than_one_request_takes(hub: Store, server: BucketServer) -> None:
    """Over a thousand objects are stored, listed in pages and deleted, in few requests."""
    objects = {f"m/names/{n:04}/x": b"" for n in range(1100)}
    hub.put(objects)
    assert [entry.path for entry in hub.list("")] == sorted(objects)
    hub.delete(objects)
    assert hub.list("") == []
    assert len(server.log()) < 30


def test_a_listing_does_not_rely_on_the_servers_idea_of_a_folder(hub: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes match letter by letter on the Hub; should it drop the final "/", similar names still stay out."""
    from huggingface_hub import HfApi

    hub.put({"m/edges/a": b"", "m/edges-x": b"", "m/edges2/a": b""})
    ask = HfApi.list_bucket_tree

    def lax(api: HfApi, bucket: str, prefix: str, **how: Any) -> object:
        return ask(api, bucket, prefix.rstrip("/"), **how)

    monkeypatch.setattr(HfApi, "list_bucket_tree", lax)
    assert [entry.path for entry in hub.list("m/edges/")] == ["m/edges/a"]


def test_a_put_is_two_requests_and_an_upload(hub: Store, server: BucketServer) -> None:
    """What exists is asked once and everything new goes in one batch: requests to the Hub are counted per user."""
    server.clear()
    hub.put({f"m/{n}": str(n).encode() for n in range(20)})
    asked = [path.rsplit("/", 1)[1] for _, path, *_ in server.log() if path.startswith("/api/")]
    assert sorted(asked) == ["batch", "paths-info", "xet-write-token"]


# ---- this machine


def test_a_full_disk_is_not_the_hubs_fault(hub: Store, tmp_path: Path) -> None:
    """Without room at the destination it is `NoSpace` with both numbers, and the file there stays."""
    content = os.urandom(2_000_000)
    hub.put({"m/a": content})
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        (disk / "dest").write_bytes(b"held")
        with pytest.raises(NoSpace, match=r"2000000 bytes needed, \d+ bytes available"):
            hub.get([wanted("m/a", content, disk / "dest")])
        assert untouched(disk)


@pytest.mark.parametrize(
    "text", ["Task error: IO Error: No space left on device (os error 28)", "Quota exceeded (os error 122)"]
)
def test_the_transfer_layers_words_for_a_full_disk_are_understood(tmp_path: Path, text: str) -> None:
    """The transfer layer reports a full disk or quota only as text, which becomes `NoSpace`."""
    error = translate(RuntimeError(text), Asked("fetching", write=False, folder=tmp_path, needed=7), "hf://x", "a/b")
    assert isinstance(error, NoSpace)
    assert f"in {tmp_path}: 7 bytes needed" in str(error)
    assert isinstance(files.no_space(tmp_path / "missing", "x", 1), NoSpace)


_CHILD = """
import json, os, sys
from weightsync.store import open_store
store = open_store(sys.argv[1], token="hf_alice", endpoint=sys.argv[2])
store.put({"m/a": b"x" * 100_000})
store.read("m/a")
import hf_xet
settings = {name: str(value) for name, value in hf_xet.XetConfig().items()}
print(json.dumps([settings["reconstruction.download_buffer_size"], settings["reconstruction.download_buffer_limit"],
    settings["reconstruction.download_buffer_perfile_size"], settings["reconstruction.min_reconstruction_fetch_size"],
    settings["data.max_concurrent_file_ingestion"], settings["client.ac_max_upload_concurrency"]]))
"""


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, ["128000000", "192000000", "32000000", "64000000", "2", "4"]),
        (
            {"HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_SIZE": "5mb", "HF_XET_MAX_CONCURRENT_FILE_INGESTION": "3"},
            ["5000000", "192000000", "32000000", "64000000", "3", "4"],
        ),
    ],
)
def test_buffers_are_bounded_unless_the_user_decides(
    hub: Store, server: BucketServer, tmp_path: Path, given: dict[str, str], seen: list[str]
) -> None:
    """The transfer layer takes our bounds, the user's own settings win, and nothing is printed on the way."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {**inherited, "HF_HOME": str(tmp_path / "h"), "HF_HUB_DISABLE_TELEMETRY": "1", **given}
    command = [sys.executable, "-c", _CHILD, hub.url, server.endpoint]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == seen
    assert done.stderr == ""


def test_servers_without_upload_grants_are_served(waits: list[float], tmp_path: Path) -> None:
    """The older way to upload chunks, which clients fall back to, works too."""
    with BucketServer({TOKEN: "alice"}, grants=False) as server:
        store = hub_backend(server, "alice/old").store
        assert store.put({"m/a": b"one"}) == 3
        assert store.read("m/a") == b"one"
        assert count(server, "POST /cas/v1/xorbs/") == 1


def test_a_server_ends_with_its_parent() -> None:
    """A test run that is killed leaves no bucket server behind."""
    script = (
        "import os; from bucketserver.client import BucketServer; s = BucketServer().start();"
        "print(s._process.pid, flush=True); os._exit(0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", script]
    started = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=20)
    server = Path("/proc") / started.stdout.strip()
    deadline = time.monotonic() + 10
    while server.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not server.exists()
