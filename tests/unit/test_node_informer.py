"""A local copy of a collection stays true through restarts, expired places and lost events; nodes and pods' addresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import aiohttp
import pytest

from devcluster.node import informer
from devcluster.node.addresses import Addresses
from devcluster.node.api import Api, ApiError
from devcluster.node.informer import Informer
from devcluster.node.nodeobject import gpu_node, lease, missing_metadata, node_object, node_status
from devcluster.node.settings import Settings, load

Json = dict[str, Any]


def item(name: str, version: int) -> Json:
    """Give an object."""
    return {"metadata": {"namespace": "n", "name": name, "resourceVersion": str(version)}}


class FakeApi:
    """Plays a script: what each list gives, and what each watch gives or fails with."""

    def __init__(self, script: list[Any]) -> None:
        self.script = script
        self.watched_from: list[str] = []

    async def list(self, path: str, query: dict[str, str], *, metadata_only: bool = False) -> Json:
        """Give the next list."""
        version, *items = self._next("list")
        return {"metadata": {"resourceVersion": str(version)}, "items": items}

    async def watch(
        self, path: str, query: dict[str, str], seconds: int, *, metadata_only: bool = False
    ) -> AsyncIterator[Json]:
        """Give the next events, then end or fail."""
        self.watched_from.append(query["resourceVersion"])
        for step in self._next("watch"):
            if isinstance(step, Exception):
                raise step
            yield {"type": step[0], "object": step[1]}

    def _next(self, kind: str) -> Any:
        if not self.script:
            raise asyncio.CancelledError
        what, content = self.script.pop(0)
        assert what == kind, f"asked to {kind}, expected to {what}"
        if isinstance(content, Exception):
            raise content
        return content


def play(monkeypatch: pytest.MonkeyPatch, *script: Any) -> tuple[list[tuple[str, str | None]], FakeApi]:
    """Run an informer through a script; returns what it told."""
    monkeypatch.setattr(informer, "RETRY_SECONDS", 0)
    told: list[tuple[str, str | None]] = []

    def changed(key: tuple[str, str], found: Json | None) -> None:
        told.append((key[1], found["metadata"]["resourceVersion"] if found else None))

    api = FakeApi(list(script))

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await Informer(cast(Api, api), "/pods", changed).run()

    asyncio.run(main())
    return told, api


def test_list_then_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that ends in order is resumed where it was, bookmarks included."""
    told, api = play(
        monkeypatch,
        ("list", [5, item("a", 3)]),
        ("watch", [("ADDED", item("b", 6)), ("MODIFIED", item("a", 7)), ("BOOKMARK", item("", 9))]),
        ("watch", [("DELETED", item("b", 10))]),
    )
    assert told == [("a", "3"), ("b", "6"), ("a", "7"), ("b", None)]
    assert api.watched_from[:2] == ["5", "9"]


EXPIRED = {"code": 410, "reason": "Expired", "message": "too old", "metadata": {"resourceVersion": "0"}}
TROUBLE: dict[str, Callable[[], Any]] = {
    "410 as an answer": lambda: ApiError(410, "Expired", "too old"),
    "410 as an event": lambda: [("ERROR", EXPIRED)],
    "a lost connection": lambda: [aiohttp.ClientPayloadError()],
    "a line cut in two": lambda: [ValueError()],
    "a refused connection": lambda: ConnectionRefusedError(),
}


@pytest.mark.parametrize("trouble", TROUBLE.values(), ids=TROUBLE.keys())
def test_trouble_leads_to_a_new_list(monkeypatch: pytest.MonkeyPatch, trouble: Callable[[], Any]) -> None:
    """Of which all is told, what is gone included: also when the server has forgotten something."""
    told, api = play(
        monkeypatch,
        ("list", [5, item("gone", 1), item("same", 2), item("older", 4)]),
        ("watch", trouble()),
        ("list", ConnectionRefusedError()),
        ("list", [4, item("same", 2), item("older", 3), item("new", 4)]),
        ("watch", []),
    )
    assert told[3:] == [("gone", None), ("same", "2"), ("older", "3"), ("new", "4")]
    assert api.watched_from[-1] == "4"


def test_addresses() -> None:
    """Unique among pods and among agents, and not used again at once."""
    one, two = Addresses(), Addresses()
    try:
        first, second = one.take(), one.take()
        assert first != second
        assert one.network != two.network
        assert first.split(".")[1] == str(one.network)
        one.give_back(first)
        assert one.take() not in (first, second)
    finally:
        one.close()
        two.close()
    again = Addresses()
    assert again.network == one.network
    again.close()


def test_gpu_node() -> None:
    """Capacity, labels and taint as the usual operators leave them."""
    spec = gpu_node(gpus=4)
    node = node_object(spec)
    assert node["metadata"]["labels"]["nvidia.com/gpu.count"] == "4"
    assert node["spec"]["taints"] == [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
    status = node_status(spec, {}, 10.0, ip="127.0.0.1", port=1, version="v1", started=1.0)
    assert status["allocatable"]["nvidia.com/gpu"] == "4"
    assert {c["type"]: c["status"] for c in status["conditions"]}["Ready"] == "True"
    assert missing_metadata(spec, node) is None
    del node["metadata"]["labels"]["nvidia.com/gpu.count"]
    assert missing_metadata(spec, node) == {"metadata": {"labels": {"nvidia.com/gpu.count": "4"}}}


def test_a_node_that_comes_back_changes_its_condition_once() -> None:
    """The time of the transition is kept while the node stays ready."""
    spec, old = gpu_node(), {"conditions": [{"type": "Ready", "status": "Unknown", "lastTransitionTime": "x"}]}
    first = node_status(spec, old, 10.0, ip="i", port=1, version="v", started=1.0)
    second = node_status(spec, first, 20.0, ip="i", port=1, version="v", started=1.0)
    ready = [next(c for c in status["conditions"] if c["type"] == "Ready") for status in (first, second)]
    assert [c["lastTransitionTime"] for c in ready] == ["1970-01-01T00:00:10Z"] * 2
    assert ready[1]["lastHeartbeatTime"] == "1970-01-01T00:00:20Z"


def test_lease() -> None:
    """Owned by the node; the version it was read at goes along."""
    made = lease(gpu_node("g"), "uid", 1.25, 8, {"metadata": {"resourceVersion": "3"}})
    assert made["metadata"]["ownerReferences"][0]["uid"] == "uid"
    assert made["metadata"]["resourceVersion"] == "3"
    assert made["spec"]["renewTime"] == "1970-01-01T00:00:01.250000Z"


def test_settings_survive_their_file() -> None:
    """What is written is read; what a person leaves out has its default."""
    settings = Settings("https://s", "/f", "ca", "c", "k")
    assert load(settings.dump()) == settings
    text = '{"server": "s", "folder": "f", "ca_file": "a", "certificate": "c", "key": "k", "images": {"i": {"args": ["x"]}}}'
    assert load(text).images["i"].args == ("x",)
    assert [node.name for node in load(text).nodes] == ["node-cpu", "node-gpu"]
