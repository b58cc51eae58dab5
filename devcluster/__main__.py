"""The command line: `python -m devcluster binaries` and `python -m devcluster up`."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from devcluster import binaries
from devcluster.processes import ComponentFailed
from devcluster.progress import say

WATCH_SECONDS = 1.0


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m devcluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("binaries", help="find, download or build etcd and Kubernetes; print the folder")
    up = commands.add_parser("up", help="run a cluster until Ctrl-C; print its KUBECONFIG")
    up.add_argument("--folder", type=Path, help="put its files here, and keep them (default: a temporary folder)")
    options = parser.parse_args(arguments)
    try:
        if options.command == "binaries":
            print(binaries.ensure())
        else:
            _up(options.folder)
    except (binaries.NoBinaries, ComponentFailed, OSError) as error:
        print(f"devcluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _up(folder: Path | None) -> None:
    """Keep a control plane and two nodes running until somebody wants it to end, or a component ends by itself."""
    from devcluster.controlplane import ControlPlane  # late: `binaries` needs none of it and shall take no time
    from devcluster.node.nodes import Nodes
    from devcluster.node.space import IMAGES

    programs = binaries.ensure()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    began = time.monotonic()
    with ControlPlane(folder=folder, programs=programs) as plane, Nodes(plane, IMAGES):
        say(f"up in {time.monotonic() - began:.1f} s at {plane.url}, logs in {plane.folder}; Ctrl-C ends it")
        print(f"export KUBECONFIG={plane.kubeconfig}", flush=True)
        try:
            while True:
                time.sleep(WATCH_SECONDS)
                plane.check()
        except KeyboardInterrupt:
            say("ending")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
