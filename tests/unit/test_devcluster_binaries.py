"""How the programs of the development cluster are found or made, with a stand-in for Go and for the network."""

from __future__ import annotations

import hashlib
import http.server
import io
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from devcluster import binaries, download, versions

GO = """#!/bin/sh
# Knows `go version` and `go build ... -o FILE .`, writes down each build and takes its time for it.
if [ "$1" = version ]; then echo "go version go{version} linux/amd64"; exit; fi
echo built >> "$GO_LOG"
echo a/package
sleep {seconds}
while [ "$1" != -o ]; do shift; done
[ {status} = 0 ] || {{ echo "cannot compile this"; exit {status}; }}
printf '#!/bin/sh\\necho hyper' > "$2"; chmod +x "$2"
"""
OFFLINE = "from devcluster import download, __main__ as m; download.reachable = lambda *_: False; raise SystemExit(m.main(['binaries']))"
ROOT = Path(__file__).parent.parent.parent


class Machine:
    """A machine with a cache of its own, whose Go is a script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"HOME": str(folder), "PATH": f"{folder}/bin:/usr/bin:/bin", "GO_LOG": str(folder / "log")}

    def go(self, version: str = "1.26.1", seconds: float = 0, status: int = 0) -> None:
        file = self.folder / "bin" / "go"
        file.parent.mkdir(exist_ok=True)
        file.write_text(GO.format(version=version, seconds=seconds, status=status))
        file.chmod(0o755)

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", OFFLINE]
        return subprocess.Popen(
            command, cwd=ROOT, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def builds(self) -> int:
        log = self.folder / "log"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def left(self) -> list[str]:
        return sorted(path.name for path in (self.folder / ".cache" / "weightsync" / "kube").glob("*"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.go()
    return made


def programs(folder: Path, *, without: str = "") -> Path:
    folder.mkdir()
    for name in versions.PROGRAMS:
        if name != without:
            (folder / name).touch(mode=0o755)
    return folder


def test_the_variable_wins(tmp_path: Path):
    folder = programs(tmp_path / "mine")
    assert binaries.ensure({binaries.VARIABLE: str(folder), "HOME": str(tmp_path)}) == folder


def test_a_folder_that_lacks_one_is_refused_by_name(tmp_path: Path):
    folder = programs(tmp_path / "mine", without="kubectl")
    with pytest.raises(binaries.NoBinaries, match=r"mine, which lacks kubectl"):
        binaries.ensure({binaries.VARIABLE: str(folder), "HOME": str(tmp_path)})


def test_the_cache_is_where_xdg_says(tmp_path: Path):
    cached = binaries.cached({"XDG_CACHE_HOME": str(tmp_path), "HOME": "/nowhere"})
    assert cached.parent == tmp_path / "weightsync" / "kube"
    assert cached.name.startswith(f"{versions.KUBERNETES}-etcd-{versions.ETCD}-")


def test_built_once_and_found_again_fast(machine: Machine):
    first = machine.start()
    out, err = first.communicate()
    assert first.returncode == 0, err
    assert "does not answer" in err
    assert "building from Go modules" in err
    folder = Path(out.strip())
    assert sorted(path.name for path in folder.iterdir()) == sorted([*versions.PROGRAMS, "hyper"])

    began = time.monotonic()
    assert binaries.ensure({"HOME": str(machine.folder)}) == folder
    assert time.monotonic() - began < 0.1
    assert machine.builds() == 1


def test_two_at_once_build_once(machine: Machine):
    machine.go(seconds=1)
    both = [machine.start(), machine.start()]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert machine.builds() == 1
    assert sum("waiting for it" in err for _, err in outputs) == 1


def test_a_failed_build_shows_its_end_and_leaves_nothing(machine: Machine):
    machine.go(status=3)
    _, err = machine.start().communicate()
    assert "cannot compile this" in err
    assert machine.left() == ["lock"]


def test_an_interrupted_build_leaves_nothing_half(machine: Machine):
    machine.go(seconds=5)
    process = machine.start()
    while not machine.builds():
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert not binaries.find({"HOME": str(machine.folder)})

    machine.go()
    process = machine.start()
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert not [name for name in machine.left() if name.startswith(binaries.STAGING)]


@pytest.mark.parametrize("version", ["1.24.9", None], ids=["too old", "no Go"])
def test_where_nothing_works_all_four_ways_are_named(machine: Machine, version: str | None):
    if version:
        machine.go(version)
    else:
        (machine.folder / "bin" / "go").unlink()
    process = machine.start()
    out, err = process.communicate()
    assert process.returncode == 1
    assert out == ""
    for words in (binaries.VARIABLE, "the cache", "dl.k8s.io does not answer", "Go 1.25 or newer"):
        assert words in err
    assert ("go1.24, older than go1.25" if version else "no go command on PATH") in err
    assert "Traceback" not in err


# ---- downloads, from a server on this machine


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    folder = tmp_path / "site"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


def archive(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path in (f"top/other/{name}", f"top/{name}"):
            info = tarfile.TarInfo(path)
            info.size = len(data) if path == f"top/{name}" else 0
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def test_downloads_files_and_archives(site: tuple[str, Path], tmp_path: Path):
    address, served = site
    (served / "etcd.tar.gz").write_bytes(archive("etcd", b"etcd itself"))
    (served / "kubectl").write_bytes(b"kubectl itself")
    sums = {file.name.split(".")[0]: hashlib.sha256(file.read_bytes()).hexdigest() for file in served.iterdir()}
    target = tmp_path / "target"
    target.mkdir()
    download.download(lambda name: f"{address}/{name}{'.tar.gz' if name == 'etcd' else ''}", sums, target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        "etcd": b"etcd itself",
        "kubectl": b"kubectl itself",
    }
    assert all(os.access(path, os.X_OK) for path in target.iterdir())


def test_a_file_that_is_not_the_pinned_one_is_not_kept(site: tuple[str, Path], tmp_path: Path):
    address, served = site
    (served / "kubectl").write_bytes(b"tampered with")
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(download.DownloadFailed, match="not the expected"):
        download.download(lambda name: f"{address}/{name}", {"kubectl": "0" * 64}, target)
    assert list(target.iterdir()) == []


def test_reachable_tells(site: tuple[str, Path]):
    address, served = site
    (served / "kubectl").touch()
    assert download.reachable(f"{address}/kubectl")
    assert not download.reachable(f"{address}/missing")


def test_who_does_not_answer_is_given_up_soon(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "urllib.request.urlopen", lambda *_, **__: time.sleep(5) or nullcontext(SimpleNamespace(status=200))
    )
    began = time.monotonic()
    assert not download.reachable("https://example.invalid/", seconds=0.2)
    assert time.monotonic() - began < 1


def test_every_program_has_a_checksum_and_an_address():
    for processor, sums in versions.SHA256.items():
        assert tuple(sums) == versions.PROGRAMS
        assert all(len(value) == 64 for value in sums.values())
        assert all(versions.url(name, processor).startswith("https://") for name in versions.PROGRAMS)


def test_the_build_is_of_the_same_versions():
    module = (ROOT / "devcluster" / "hyper" / "go.mod").read_text()
    assert f"k8s.io/kubernetes {versions.KUBERNETES}\n" in module
    assert f"go.etcd.io/etcd/server/v3 {versions.ETCD}\n" in module
