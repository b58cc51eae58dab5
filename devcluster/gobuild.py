"""Build the programs from Go modules, for machines that reach a module proxy but not the official files.

The five programs become one file (see hyper/main.go): linked once instead of five times, 131 MB instead of
345, and the processes share its pages, 320 MB of memory instead of 500. hyper/go.sum pins every source.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import subprocess
from collections import deque
from pathlib import Path

from devcluster.processes import tied
from devcluster.progress import step
from devcluster.versions import KUBERNETES, PROGRAMS

SOURCE = Path(__file__).parent / "hyper"
OLDEST = (1, 25)
NAME = "hyper"


class BuildFailed(RuntimeError):
    """There is no usable Go, or it could not build."""


def build(folder: Path) -> None:
    """Put the programs into `folder`. Interrupted, it goes on where it was when called again: Go keeps a cache."""
    go = _go()
    # Killed with us, so that no build goes on that nobody waits for.
    command = [*tied(), go, "build", "-v", "-mod=readonly", "-buildvcs=false", "-trimpath"]
    command += ["-ldflags", _ldflags(), "-o", str(folder / NAME), "."]
    with step("building from Go modules (minutes the first time)", " packages") as counter:
        process = subprocess.Popen(
            command,
            cwd=SOURCE,
            env=os.environ | {"GOTOOLCHAIN": "local", "GOWORK": "off", "CGO_ENABLED": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        last: deque[str] = deque(maxlen=15)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                while True:
                    if not selector.select(timeout=0.5):
                        counter.refresh()  # the seconds go on while the linker is silent
                        continue
                    chunk = os.read(process.stdout.fileno(), 1 << 16)
                    if not chunk:
                        break
                    lines = chunk.decode(errors="replace").splitlines()
                    last.extend(lines)
                    counter.update(len(lines))
            status = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            process.stdout.close()
        if status:
            raise BuildFailed("go build failed:\n" + "\n".join(last))
    for program in PROGRAMS:
        (folder / program).symlink_to(NAME)


def _go() -> str:
    """The go command, when it is recent enough."""
    go = shutil.which("go")
    if go is None:
        raise BuildFailed("there is no go command on PATH")
    text = subprocess.run([go, "version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"go(\d+)\.(\d+)", text)
    if found is None:
        raise BuildFailed(f"{go} does not tell its version")
    if (int(found[1]), int(found[2])) < OLDEST:
        raise BuildFailed(f"{go} is {found[0]}, older than go{OLDEST[0]}.{OLDEST[1]}")
    return go


def _ldflags() -> str:
    """What makes the programs tell their version; without it clients and servers think they are v0.0.0."""
    major, minor, _ = KUBERNETES[1:].split(".")
    values = {"gitVersion": KUBERNETES, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return "-s -w " + " ".join(f"-X {package}.{name}={value}" for package in packages for name, value in values.items())
