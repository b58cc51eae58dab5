"""Find the programs of the control plane, or make them: one folder that has all of them.

In this order: the folder that WEIGHTSYNC_KUBE_BIN names, the cache, a download, a build from Go modules.
The cache only ever holds complete folders: they are made aside and renamed. Several processes may call
at once; one works, the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from devcluster import download, gobuild, versions
from devcluster.progress import say

VARIABLE = "WEIGHTSYNC_KUBE_BIN"
PROCESSORS = {"x86_64": "amd64", "aarch64": "arm64"}
STAGING = ".part-"


class NoBinaries(RuntimeError):
    """The programs are not there and cannot be made here."""


def ensure(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder that has all programs, made if need be."""
    found = find(environment)
    if found is not None:
        return found
    target = cached(environment)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.parent / "lock"):
        if not _complete(target):  # another process may have made it while we waited
            for stale in target.parent.glob(f"{STAGING}*"):
                shutil.rmtree(stale)
            shutil.rmtree(target, ignore_errors=True)
            _make(target)
    return target


def find(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that has all programs, None where it is yet to be made."""
    named = environment.get(VARIABLE)
    if named:
        folder = Path(named).absolute()
        missing = [name for name in versions.PROGRAMS if not _runs(folder / name)]
        if missing:
            raise NoBinaries(f"{VARIABLE} is {named}, which lacks {', '.join(missing)}")
        return folder
    target = cached(environment)
    return target if _complete(target) else None


def cached(environment: Mapping[str, str] = os.environ) -> Path:
    """Where in the cache the programs are, or would be."""
    home = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home()) / ".cache"
    recipe = hashlib.sha256()
    for source in (gobuild.SOURCE / "main.go", gobuild.SOURCE / "go.sum"):
        recipe.update(source.read_bytes())
    key = f"{versions.KUBERNETES}-etcd-{versions.ETCD}-{_processor()}-{recipe.hexdigest()[:8]}"
    return Path(home) / "weightsync" / "kube" / key


def _make(target: Path) -> None:
    """Download or build into a folder beside `target`, then give it that name."""
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=target.parent))
    try:
        tried = _download(staging)
        if tried is not None:
            say(f"{tried}; building instead")
            try:
                gobuild.build(staging)
            except gobuild.BuildFailed as error:
                raise NoBinaries(_ways(tried, str(error), target)) from error
        staging.chmod(0o755)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _download(folder: Path) -> str | None:
    """Download everything into `folder`, or say why not and leave it empty."""
    processor = _processor()
    checksums = versions.SHA256.get(processor)
    if checksums is None:
        return f"there are no official files for {processor}"

    def url(program: str) -> str:
        return versions.url(program, processor)

    for program in ("kubectl", "etcd"):  # one of each site
        if not download.reachable(url(program)):
            return f"{url(program).split('/')[2]} does not answer within {download.PROBE_SECONDS:.0f} s"
    try:
        download.download(url, checksums, folder)
    except download.DownloadFailed as error:
        for left in folder.iterdir():
            left.unlink()
        return str(error)
    return None


def _ways(download_says: str, build_says: str, target: Path) -> str:
    programs = ", ".join(versions.PROGRAMS)
    return f"""{programs} of Kubernetes {versions.KUBERNETES} are needed. One of these must work:
  1. {VARIABLE}=FOLDER, a folder that has them (not set)
  2. the cache, {target} (not there)
  3. a download: {download_says}
  4. a build with Go {gobuild.OLDEST[0]}.{gobuild.OLDEST[1]} or newer: {build_says}"""


def _processor() -> str:
    machine = platform.machine()
    return PROCESSORS.get(machine, machine)


def _complete(folder: Path) -> bool:
    return all(_runs(folder / name) for name in versions.PROGRAMS)


def _runs(program: Path) -> bool:
    return program.is_file() and os.access(program, os.X_OK)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold the lock file; the kernel lets go of it however we end."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is making the programs; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
