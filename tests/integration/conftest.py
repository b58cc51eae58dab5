"""Fixtures that several integration tests share; `stores`, `places` and `applying` hold what needs no fixture."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import worlds
from worlds import World, reset

from bucketserver.client import BucketServer
from integration.stores import TOKEN, fresh_client, hub_backend
from weightsync.store import Store


@pytest.fixture(scope="session")
def running_bucket_server() -> Iterator[BucketServer]:
    """Give a bucket server with the users alice and bob, started once."""
    with BucketServer({TOKEN: "alice", "hf_bob": "bob"}) as server:
        yield server


@pytest.fixture
def server(running_bucket_server: BucketServer) -> BucketServer:
    """Give the bucket server without faults and with an empty log."""
    running_bucket_server.clear()
    return running_bucket_server


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """Give a Hub client of its own to the test, and the seconds it would have waited between tries."""
    return fresh_client(monkeypatch, tmp_path / "home")


@pytest.fixture
def hub(server: BucketServer, waits: list[float]) -> Store:
    """Give a folder in a new bucket as a store."""
    return hub_backend(server, f"alice/hub-{time.monotonic_ns()}").store


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Give a folder with the file "dest", which holds b"held"."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "dest").write_bytes(b"held")
    return folder


@pytest.fixture(scope="module")
def tiny() -> Iterator[World]:
    """Give four versions, a sibling, and the edges between them, in memory."""
    with worlds.memory_folder() as folder:
        yield worlds.world(folder)


@pytest.fixture
def target(tiny: World) -> Path:
    """Give a directory that holds v0."""
    return reset(tiny.root / "target", tiny.trees[0])
