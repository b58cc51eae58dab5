"""Ask a running agent for faults and look into its pods: for tests and demos, from any process.

Speaks to the agent's control socket and knows nothing of who started it.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

from devcluster.node.settings import control_socket

Json = dict[str, Any]


class NodeError(RuntimeError):
    """The agent's refusal."""


class NodesClient:
    """The nodes of the agent that works in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def kill_container(self, namespace: str, pod: str, container: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a container's first process; SIGKILL takes all of the container."""
        self._ask("kill", namespace=namespace, pod=pod, container=container, signal=int(number))

    def crash_pod(self, namespace: str, pod: str) -> None:
        """Kill every container of a pod at once. The pod remains, and its restart policy decides."""
        self._ask("kill", namespace=namespace, pod=pod)

    def node_down(self, name: str) -> None:
        """Make a node fall silent; all its processes die and what they had in memory is lost."""
        self._ask("down", node=name)

    def node_up(self, name: str) -> None:
        """Let a node come back, as after a reboot."""
        self._ask("up", node=name)

    def execute(self, namespace: str, pod: str, container: str, *argv: str, timeout: float = 30.0) -> str:
        """Run a program inside a container; returns what it wrote, raises NodeError if it fails."""
        answer = self._ask("exec", namespace=namespace, pod=pod, container=container, argv=list(argv), timeout=timeout)
        if answer["code"]:
            raise NodeError(f"{' '.join(argv)} ended with {answer['code']}: {answer['output']}")
        return str(answer["output"])

    def state(self) -> Json:
        """Nodes, their pods and the processes of these."""
        return self._ask("state")

    def pids(self, namespace: str, pod: str) -> dict[str, int]:
        """The first process of each running container of a pod; empty if there is none here."""
        nodes = self.state()["nodes"].values()
        return next((node["pods"][f"{namespace}/{pod}"] for node in nodes if f"{namespace}/{pod}" in node["pods"]), {})

    def _ask(self, verb: str, **body: Any) -> Json:
        connection = _UnixConnection(control_socket(self.folder))
        try:
            connection.request("POST", f"/{verb}", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        if response.status >= 400:
            raise NodeError(text)
        answer: Json = json.loads(text)
        return answer


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        # By way of its folder: a socket's own path may have no more than 108 bytes.
        folder = os.open(self._path.parent, os.O_PATH)
        try:
            self.sock.connect(f"/proc/self/fd/{folder}/{self._path.name}")
        finally:
            os.close(folder)
