"""A Hub bucket that fails in the ways the Hub and networks do: the real client against a server with faults."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bucketserver.client import BucketServer
from integration.stores import TOKEN, count, untouched, wanted
from weightsync.errors import StoreConflict, StoreCorrupt, StoreDenied, StoreNotFound, StoreUnavailable
from weightsync.store import HubStore, Store

LOOKUP = "POST .*/paths-info"
CHUNKS = "GET /xorb-data/"
BATCH = "POST .*/batch"


@pytest.fixture
def content() -> bytes:
    """Give content of several chunks."""
    return os.urandom(400_000)


# ---- the Hub or the network fails for a while, or for good


@pytest.mark.parametrize(
    "fault", [{"status": 503}, {"status": 500}, {"action": "cut", "after": -1}, {"action": "cut", "after": 3}]
)
def test_short_failures_are_waited_out(
    hub: Store, server: BucketServer, waits: list[float], out: Path, fault: dict[str, Any]
) -> None:
    """A server that fails twice at each step and then recovers costs time, not the operation."""
    content = os.urandom(100_000)
    for step in (LOOKUP, BATCH):
        server.fail(step, times=2, **fault)
    assert hub.put({"m/a": content}) == len(content)
    for step in (LOOKUP, "HEAD", CHUNKS):
        server.fail(step, times=2, **fault)
    hub.get([wanted("m/a", content, out / "dest")])
    assert (out / "dest").read_bytes() == content
    assert waits


def everything(hub: Store, out: Path) -> list[Callable[[], object]]:
    """One call of each method."""
    return [
        lambda: hub.put({"m/new": b"x"}),
        lambda: hub.get([wanted("m/a", b"one", out / "dest")]),
        lambda: hub.read("m/a"),
        lambda: hub.list("m/"),
        lambda: hub.delete(["m/a"]),
    ]


def test_long_failures_are_unavailable_in_the_servers_words(
    hub: Store, server: BucketServer, waits: list[float], out: Path
) -> None:
    """When the Hub stays down every method says `StoreUnavailable`, with address and words; tries do not multiply."""
    hub.put({"m/a": b"one"})
    server.fail("/api/buckets/", status=503, times=None)
    for ask in everything(hub, out):
        waits.clear()
        with pytest.raises(StoreUnavailable, match=f"{hub.url}: .* 503 injected fault"):
            ask()
        assert sum(waits) <= 23  # what the client waits by itself, once
    assert untouched(out)


@pytest.mark.parametrize("step", ["GET /cas/", CHUNKS])
def test_chunk_storage_that_stays_down_is_unavailable(hub: Store, server: BucketServer, out: Path, step: str) -> None:
    """When only the chunks cannot be fetched the answer is the same, and the destination is as it was."""
    hub.put({"m/a": b"one"})
    server.fail(step, status=503, times=None)
    for ask in (lambda: hub.get([wanted("m/a", b"one", out / "dest")]), lambda: hub.read("m/a")):
        with pytest.raises(StoreUnavailable, match="503 Service Unavailable"):
            ask()
    assert untouched(out)


def test_an_upload_that_fails_leaves_nothing_visible(hub: Store, server: BucketServer) -> None:
    """When chunks cannot be stored the put is `StoreUnavailable`, no object appears, and a later put works."""
    server.fail("(PUT|POST) /(xorb|cas)", status=503, times=None)
    with pytest.raises(StoreUnavailable, match="storing 1 objects failed"):
        hub.put({"m/a": b"one"})
    server.clear()
    assert hub.list("") == []
    assert hub.put({"m/a": b"one"}) == 3


def test_throttling_is_obeyed(hub: Store, server: BucketServer, waits: list[float]) -> None:
    """A 429 is waited out for as long as the server says, and one that stays is `StoreUnavailable`."""
    server.fail(LOOKUP, status=429, headers={"Retry-After": "7"})
    hub.put({"m/a": b"one"})
    assert waits == [8]  # the client adds a second
    server.fail("/tree/", status=429, times=None)
    with pytest.raises(StoreUnavailable, match="429"):
        hub.list("m/")


def test_a_server_that_is_gone_is_unavailable(waits: list[float], out: Path) -> None:
    """A refused connection is `StoreUnavailable` for every method."""
    store = HubStore("alice/b", token=TOKEN, endpoint="http://127.0.0.1:9")
    for ask in everything(store, out):
        with pytest.raises(StoreUnavailable, match=r"refused.*Try again later"):
            ask()
    assert untouched(out)


def test_offline_mode_is_named(hub: Store, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    """With the client's offline switch on, the error says which variable to unset instead of blaming the Hub."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StoreUnavailable, match="Unset HF_HUB_OFFLINE"):
        hub.list("m/")
    assert waits == []


def test_answers_that_make_no_sense_are_unavailable(hub: Store, server: BucketServer) -> None:
    """A proxy's 200 that is not the Hub's answer is a fault of the hub, not a crash."""
    hub.put({"m/a": b"one"})
    server.fail("/tree/", "flip", at=0)
    with pytest.raises(StoreUnavailable, match="listing"):
        hub.list("m/")


# ---- rights


def test_a_wrong_or_revoked_token_is_denied(server: BucketServer, waits: list[float], out: Path) -> None:
    """A token that stops being valid is `StoreDenied` for every method: bucket and remedy are named, the token is not."""
    with BucketServer({"hf_short": "alice"}) as mine:
        mine.create("alice/b", token="hf_short")
        store = HubStore("alice/b", token="hf_short", endpoint=mine.endpoint)
        store.put({"m/a": b"one"})
        mine.revoke("hf_short")
        for ask in everything(store, out):
            with pytest.raises(
                StoreDenied, match=r"401 Invalid credentials.*bucket alice/b .*HF_TOKEN.*secret"
            ) as caught:
                ask()
            assert "hf_short" not in str(caught.value)
    assert untouched(out)
    assert waits == []


def test_a_token_that_expires_between_look_and_upload_is_denied(hub: Store, server: BucketServer) -> None:
    """Also when the transfer layer is the first to be refused, the error is `StoreDenied` and nothing appears."""
    server.fail("xet-write-token", status=401, times=None)
    with pytest.raises(StoreDenied, match="right to write"):
        hub.put({"m/a": b"one"})
    assert hub.list("") == []


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_download_is_denied(hub: Store, server: BucketServer, out: Path, status: int) -> None:
    """A storage token that is refused in mid-transfer is `StoreDenied` with the right that is needed."""
    hub.put({"m/a": b"one"})
    server.fail("GET /cas/", status=status, times=None)
    with pytest.raises(StoreDenied, match="right to read"):
        hub.get([wanted("m/a", b"one", out / "dest")])
    assert untouched(out)


def test_storage_tokens_that_expire_are_replaced(hub: Store, server: BucketServer, out: Path) -> None:
    """The short-lived tokens behind a transfer are no concern of the user: the next call gets new ones."""
    hub.put({"m/a": b"one"})
    server.expire_storage_tokens()
    hub.get([wanted("m/a", b"one", out / "dest")])
    server.expire_storage_tokens()
    assert hub.put({"m/b": b"two"}) == 3
    assert (out / "dest").read_bytes() == b"one"


def test_a_batch_without_the_right_to_write_is_denied(hub: Store, server: BucketServer) -> None:
    """A 403 at the last step is `StoreDenied`, at once, and nothing is visible."""
    server.fail(BATCH, status=403, times=None)
    with pytest.raises(StoreDenied, match=r"403 injected fault.*right to write"):
        hub.put({"m/a": b"one"})
    assert count(server, "/batch") == 1
    assert hub.list("") == []


def test_a_bucket_that_may_not_be_seen_is_not_found_and_says_both(hub: Store, server: BucketServer) -> None:
    """The Hub shows a foreign private bucket as missing, so the message names both remedies."""
    bucket = hub.url.removeprefix("hf://buckets/").rsplit("/", 2)[0]
    foreign = HubStore(bucket, token="hf_bob", endpoint=server.endpoint)
    with pytest.raises(StoreNotFound, match=f"Create bucket {bucket}, correct its name, or use a token"):
        foreign.list("")


def test_a_bucket_that_vanishes_before_the_upload_is_not_found(hub: Store, server: BucketServer) -> None:
    """The transfer layer's bare 404 becomes `StoreNotFound` that names the bucket."""
    server.fail("xet-write-token", status=404, times=None)
    with pytest.raises(StoreNotFound, match="Create bucket alice/"):
        hub.put({"m/a": b"one"})


# ---- wrong and missing bytes


def test_a_transfer_cut_once_goes_on(hub: Store, server: BucketServer, out: Path, content: bytes) -> None:
    """A connection closed in mid-file is made good without the caller noticing."""
    hub.put({"m/a": content})
    server.fail(CHUNKS, "cut", after=100_000)
    hub.get([wanted("m/a", content, out / "dest")])
    assert (out / "dest").read_bytes() == content
    assert count(server, CHUNKS) == 2


def test_a_transfer_that_is_always_cut_is_unavailable(
    hub: Store, server: BucketServer, out: Path, content: bytes
) -> None:
    """When no transfer ever completes the destination is as it was."""
    hub.put({"m/a": content})
    server.fail(CHUNKS, "cut", after=100_000, times=None)
    with pytest.raises(StoreUnavailable):
        hub.get([wanted("m/a", content, out / "dest")])
    assert untouched(out)


def test_a_flipped_byte_is_fetched_again(hub: Store, server: BucketServer, out: Path, content: bytes) -> None:
    """Wrong bytes, which the client does not notice, are noticed, and only the wrong object is fetched again."""
    hub.put({"m/a": content, "m/b": b"fine"})
    server.fail(CHUNKS, "flip", at=50_000)
    items = [wanted("m/a", content, out / "dest"), wanted("m/b", b"fine", out / "b")]
    hub.get(items)
    assert (out / "dest").read_bytes() == content
    assert (out / "b").read_bytes() == b"fine"
    assert count(server, CHUNKS) in (2, 3)  # both objects may lie in one stored piece


def test_bytes_that_stay_wrong_never_reach_the_destination(
    hub: Store, server: BucketServer, out: Path, content: bytes
) -> None:
    """When the second try is wrong too it is `StoreCorrupt`, by `get` and by `read`, and there is no third."""
    hub.put({"m/a": content})
    server.fail(CHUNKS, "flip", at=50_000, times=None)
    with pytest.raises(StoreCorrupt, match=r"m/a .*second try"):
        hub.get([wanted("m/a", content, out / "dest")])
    assert untouched(out)
    assert count(server, CHUNKS) == 2
    with pytest.raises(StoreCorrupt, match=r"m/a .*second try"):
        hub.read("m/a", sha256=wanted("m/a", content, out).sha256)


def test_an_understated_size_is_not_taken_for_the_object(
    hub: Store, server: BucketServer, out: Path, content: bytes
) -> None:
    """A listing with too small a size, for which the client returns truncated files, is noticed by every method."""
    item = wanted("m/a", content, out / "dest")
    hub.put({"m/a": content})
    server.fail(LOOKUP, "understate", by=1000)
    hub.get([item])  # once: the second try is right
    assert (out / "dest").read_bytes() == content
    (out / "dest").write_bytes(b"held")
    server.clear()
    server.fail(LOOKUP, "understate", by=1000, times=None)
    with pytest.raises(StoreCorrupt, match="m/a"):
        hub.get([item])
    assert count(server, CHUNKS) == 0  # an object of another size, which may be huge, is not even fetched
    with pytest.raises(StoreCorrupt, match="m/a"):
        hub.read("m/a", sha256=item.sha256)
    with pytest.raises(StoreConflict, match="399000 bytes where 400000"):
        hub.put({"m/a": content})
    assert untouched(out)


def test_an_object_that_vanishes_between_look_and_download_is_not_found(
    hub: Store, server: BucketServer, out: Path
) -> None:
    """A clean-up at the wrong moment is `StoreNotFound`, not a half-made file."""
    hub.put({"m/a": b"one"})
    server.fail("HEAD", status=404, headers={"X-Error-Code": "EntryNotFound"}, times=None)
    with pytest.raises(StoreNotFound, match="gone"):
        hub.get([wanted("m/a", b"one", out / "dest")])
    assert untouched(out)


def test_a_silent_hub_is_unreachable(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    """A server that takes the connection and never answers ends in StoreUnavailable, not in waiting for ever."""
    monkeypatch.setattr("weightsync.store.hub.SILENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = HubStore("alice/silent", token=TOKEN, endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            store.list("")
        with pytest.raises(StoreUnavailable):
            store.put({"a": b"1"})
    assert time.monotonic() - began < 30
