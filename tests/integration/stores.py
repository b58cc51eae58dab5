"""What tests of stores share: a Hub client without memory of earlier tests, and writers in other processes."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bucketserver.client import BucketServer
from weightsync.store import Download, HubStore, Store, VolumeStore

TOKEN = "hf_alice"

_WRITER = """
import json, sys
from weightsync.errors import WeightsyncError
from weightsync.store import open_store
url, token, endpoint, items = json.loads(sys.stdin.readline())
store = open_store(url, token=token, endpoint=endpoint)
store.list("")  # imports and connections are not what is raced
print("ready", flush=True)
sys.stdin.readline()
try:
    print(store.put({path: text.encode() for path, text in items.items()}))
except WeightsyncError as error:
    print(type(error).__name__)
"""


@dataclass(frozen=True)
class Backend:
    """A store of one kind, how to reach it from another process, and one that does not exist."""

    store: Store
    absent: Store
    address: tuple[str, str | None, str | None]

    def race(self, *items: Mapping[str, str]) -> list[str]:
        """Let processes put `items` at the same moment; what each printed: bytes sent, or the error's name."""
        command = [sys.executable, "-c", _WRITER]
        pipe = subprocess.PIPE
        writers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in items]
        for writer, each in zip(writers, items, strict=True):
            _say(writer, json.dumps([*self.address, each]))
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            _say(writer, "go")
        return [writer.communicate(timeout=60)[0].strip() for writer in writers]


def _say(writer: subprocess.Popen[str], line: str) -> None:
    assert writer.stdin is not None
    writer.stdin.write(line + "\n")
    writer.stdin.flush()


def volume_backend(folder: Path) -> Backend:
    """A volume in `folder`."""
    root = folder / "volume"
    root.mkdir()
    return Backend(VolumeStore(root), VolumeStore(folder / "absent"), (str(root), None, None))


def hub_backend(server: BucketServer, bucket: str) -> Backend:
    """A new bucket with a prefix."""
    server.create(bucket, token=TOKEN)
    store = HubStore(bucket, "a/prefix", token=TOKEN, endpoint=server.endpoint)
    absent = HubStore("alice/absent", token=TOKEN, endpoint=server.endpoint)
    return Backend(store, absent, (store.url, TOKEN, server.endpoint))


def fresh_client(monkeypatch: pytest.MonkeyPatch, home: Path) -> list[float]:
    """Give the Hub client an empty home and short waits; returns the seconds it would have waited.

    What it does between waits is unchanged. Its storage layer reads its settings when a session begins.
    """
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read on import, which comes before the store's here
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_BASE_DELAY", "10ms")
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "3")
    for name in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    from huggingface_hub.utils import _http, _xet

    waits: list[float] = []
    monkeypatch.setattr(_http, "time", types.SimpleNamespace(**{**vars(time), "sleep": waits.append}))
    forget_session: Callable[[], None] = _xet.abort_xet_session
    forget_session()
    return waits


def wanted(path: str, content: bytes, dest: Path) -> Download:
    """The download of an object that must hold `content`."""
    return Download(path, dest, hashlib.sha256(content).hexdigest(), len(content))


def names_in(folder: Path) -> list[str]:
    """All names in a folder, hidden ones too."""
    return sorted(path.name for path in folder.iterdir())


def count(server: BucketServer, part: str) -> int:
    """Requests so far whose method and path hold `part`."""
    return sum(part in f"{method} {path}" for method, path, *_ in server.log())


def untouched(folder: Path) -> bool:
    """Whether the file "dest" is as the fixture `out` made it, and no temporary is left."""
    return names_in(folder) == ["dest"] and (folder / "dest").read_bytes() == b"held"


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of its own with `size` bytes; the test is skipped where that may not be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
