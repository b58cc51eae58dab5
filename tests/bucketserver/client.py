"""Start the server as a subprocess and steer it: what fixtures and demonstrations use.

The server needs its own process because the Hub client may hold the interpreter's lock while it waits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any, Self


class BucketServer:
    """A running server. Use it as a context manager, or call `start` and `stop`.

    `tokens` maps access tokens to user names; None lets everybody do everything.
    """

    def __init__(self, tokens: dict[str, str] | None = None, *, port: int = 0, grants: bool = True) -> None:
        self._tokens, self._port, self._grants = tokens, port, grants
        self._process: subprocess.Popen[str] | None = None
        self.endpoint = ""

    def start(self) -> Self:
        """Start the process; returns when it listens."""
        package = Path(__file__).parent
        command = [sys.executable, "-m", package.name, "--port", str(self._port)]
        for token, user in (self._tokens or {}).items():
            command += ["--token", f"{token}={user}"]
        if not self._grants:
            command.append("--no-grants")
        environment = {**os.environ, "PYTHONPATH": str(package.parent)}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        self.endpoint = self._process.stdout.readline().strip()
        if not self.endpoint:
            raise RuntimeError(f"the bucket server ended with status {self._process.wait()}")
        return self

    def stop(self) -> None:
        """End the process; safe to call twice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def create(self, bucket: str, *, token: str | None = None, private: bool = True) -> None:
        """Make the bucket "owner/name"; an error when it is there."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._ask("POST", f"/api/buckets/{bucket}", {"visibility": "private" if private else "public"}, headers)

    def fail(self, match: str, action: str = "status", *, times: int | None = 1, **details: Any) -> None:
        """Switch a fault on for the next `times` requests (None: all) whose "METHOD /path" matches; see `Fault`."""
        self._ask("POST", "/_faults", {"match": match, "action": action, "times": times, **details})

    def clear(self) -> None:
        """Switch all faults off and forget the log."""
        self._ask("DELETE", "/_faults")
        self._ask("DELETE", "/_log")

    def log(self) -> list[tuple[str, str, int, int, int]]:
        """All requests: method, path with query, status (0: none given), bytes received, bytes sent."""
        return [(row[0], row[1], row[2], row[3], row[4]) for row in self._ask("GET", "/_log")]

    def revoke(self, token: str) -> None:
        """Make an access token invalid from now on."""
        self._ask("DELETE", f"/_tokens/{token}")

    def expire_storage_tokens(self) -> None:
        """Let all short-lived storage tokens that clients hold expire now."""
        self._ask("DELETE", "/_storage-tokens")

    def _ask(self, method: str, path: str, document: Any = None, headers: dict[str, str] | None = None) -> Any:
        data = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(self.endpoint + path, data, headers or {}, method=method)
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)
