"""Fetch the official programs, each checked against its pinned checksum before it can be executed.

Must not wait long to find out that there is no way to the internet.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
import threading
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from devcluster.progress import step

PROBE_SECONDS = 3.0
STALL_SECONDS = 30.0
CHUNK = 1 << 20


class DownloadFailed(RuntimeError):
    """The file could not be had, or is not the one that was pinned."""


def reachable(url: str, seconds: float = PROBE_SECONDS) -> bool:
    """Whether `url` answers in time.

    In a thread, since a name server that does not answer is not covered by a socket's timeout. Asks for
    the file itself, so that proxies and redirects count.
    """
    answers: list[int] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds) as response:
                answers.append(response.status)
        except (OSError, ValueError):
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answers)


def download(url_of: Callable[[str], str], checksums: Mapping[str, str], folder: Path) -> None:
    """Put every program of `checksums` into `folder`, executable."""
    for program, checksum in checksums.items():
        url, target = url_of(program), folder / program
        if url.endswith(".tar.gz"):
            archive = folder / f"{program}.tar.gz"
            _fetch(url, checksum, archive)
            _unpack(archive, program, target)
            archive.unlink()
        else:
            _fetch(url, checksum, target)
        target.chmod(0o755)


def _fetch(url: str, checksum: str, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(url, timeout=STALL_SECONDS) as response, target.open("wb") as file:
            size = response.headers.get("Content-Length")
            with step(f"downloading {Path(url).name}", "B", int(size) if size else None) as counter:
                while chunk := response.read(CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
                    counter.update(len(chunk))
    except (OSError, ValueError) as error:
        raise DownloadFailed(f"{url}: {error}") from error
    if digest.hexdigest() != checksum:
        target.unlink()
        raise DownloadFailed(f"{url}: SHA-256 is {digest.hexdigest()}, not the expected {checksum}")


def _unpack(archive: Path, program: str, target: Path) -> None:
    """Take the one file called `program` out of the archive's top folder."""
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and member.name.count("/") == 1 and member.name.endswith(f"/{program}"):
                with target.open("wb") as file:
                    shutil.copyfileobj(tar.extractfile(member) or io.BytesIO(), file)
                return
    raise DownloadFailed(f"{archive.name} holds no {program}")
