"""Files that are no files, streams that are closed, and ends that come from outside."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from worlds import World, reset, tree, unlike

from integration.places import Place
from weightsync.cli import main
from weightsync.store import VolumeStore

COMMAND = [sys.executable, "-m", "weightsync.cli"]


def copied(source: Path, dest: Path) -> Path:
    """A folder to spoil."""
    shutil.rmtree(dest, ignore_errors=True)
    return Path(shutil.copytree(source, dest))


@pytest.mark.parametrize("part", ["edges", "manifests", "blobs", "data"])
@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_special_files_in_a_delta(tiny: World, part: str, kind: str) -> None:
    """A pipe or a device where a file of a delta belongs is wrong input: nobody waits for it or reads it to no end."""
    delta = copied(tiny.edges[0].root, tiny.root / "special")
    for path in (delta / part).iterdir():
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
    assert subprocess.run([*COMMAND, "verify", str(delta)], timeout=30, check=False).returncode == 42


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model-00001-of-00002.safetensors"])
def test_special_files_in_a_checkpoint(tiny: World, name: str) -> None:
    """The same of a checkpoint."""
    place = copied(tiny.folders[0], tiny.root / "special")
    (place / name).unlink(missing_ok=True)
    os.mkfifo(place / name)
    assert subprocess.run([*COMMAND, "inspect", str(place)], timeout=30, check=False).returncode == 42


@pytest.mark.parametrize("at", ["fetch", "fetch/data", "fetch/blobs"])
def test_links_in_the_library_folder(tiny: World, target: Path, at: str) -> None:
    """A pull writes nothing through a link that was laid into its folder."""
    place = Place(VolumeStore(tiny.root / "linked-store"), tiny).publish_all()
    elsewhere = tiny.root / "elsewhere"
    reset(elsewhere, {".tmp-precious": b"x"})
    link = target / ".weightsync" / at
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(elsewhere)
    arguments = ["pull", str(target), "--store", place.store.url, "--model", place.remote.model, "--version", "v1"]
    assert main([*arguments, "--quiet"]) == 42
    assert unlike(tree(elsewhere), {".tmp-precious": b"x"}) == []
    shutil.rmtree(place.store.url)


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams(tiny: World, target: Path, closed: str) -> None:
    """Commands work without standard streams, and no file takes the number of one."""
    line = f'exec "$@" {closed}'
    arguments = ["apply", str(target), str(tiny.edges[0].root)]
    done = subprocess.run(["sh", "-c", line, "sh", *COMMAND, *arguments], check=False)
    assert done.returncode == 0
    assert unlike(tree(target), tiny.trees[1]) == []


def test_full_output(tiny: World, target: Path) -> None:
    """Output that cannot be written is a trouble of this machine, not a difference that was found."""
    with Path("/dev/full").open("w") as full:
        arguments = ["apply", str(target), str(tiny.edges[0].root), "--json"]
        done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 74
    assert "Traceback" not in done.stderr
    assert unlike(tree(target), tiny.trees[1]) == []


def test_termination_cleans_up(tiny: World, tmp_path: Path) -> None:
    """SIGTERM, with which Kubernetes ends every Job, leaves no temporary folder behind."""
    source = tiny.root / "large"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    header = b'{"a":{"dtype":"U8","shape":[400000000],"data_offsets":[0,400000000]}}'
    with (source / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 400_000_000)
    arguments = ["publish", str(source), "--store", str(tiny.root / "large-store"), "--model", "m", "--version", "v"]
    process = subprocess.Popen([*COMMAND, *arguments, "--threads", "1"], env={**os.environ, "TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob("weightsync-*/full/data/*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) in (143, 0)
    assert list(tmp_path.iterdir()) == []
    shutil.rmtree(source)
