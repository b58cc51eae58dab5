"""Run the server by itself: prints its address and serves until it is stopped or its parent is gone.

python -m tests.bucketserver --port 0 [--token hf_x=user]... [--no-grants]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import time

from .routes import BucketHTTPServer
from .state import State


def _follow_parent(parent: int) -> None:
    """End this process when `parent` is no longer its parent: a killed test run must not leave servers behind."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def main() -> None:
    """Parse the command line and serve."""
    parent = os.getppid()  # before anything slow: a parent that dies later is noticed
    parser = argparse.ArgumentParser(prog="bucketserver", description="A stand-in for the Hub's storage buckets.")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; 0 picks a free one")
    parser.add_argument("--token", action="append", metavar="hf_TOKEN=USER", help="a user; without any, all may do all")
    parser.add_argument("--no-grants", action="store_true", help="let clients upload as those before hf_xet 1.8 did")
    options = parser.parse_args()
    tokens = dict(pair.split("=", 1) for pair in options.token) if options.token else None
    server = BucketHTTPServer(State(tokens, grants=not options.no_grants), options.port)
    print(server.endpoint, flush=True)
    threading.Thread(target=_follow_parent, args=(parent,), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
