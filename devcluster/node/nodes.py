"""Start the nodes of a control plane: the agent as a process of its own, which dies with this one."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import devcluster
from devcluster.access import Access
from devcluster.certs import Credentials
from devcluster.node.client import NodeError, NodesClient
from devcluster.node.images import Image
from devcluster.node.nodeobject import NodeSpec, cpu_node, gpu_node
from devcluster.node.settings import Settings
from devcluster.ports import LOOPBACK
from devcluster.processes import Component, Spawner

READY_SECONDS = 30.0
GRACE_SECONDS = 10.0
STEM = "node-agent"
# `python -m devcluster.node`, wherever it is started.
_MAIN = f"import sys; sys.path.insert(0, {str(Path(devcluster.__file__).parent.parent)!r}); from devcluster.node.__main__ import main; main()"


class Nodes(NodesClient):
    """The nodes of one control plane. Use it as a context manager.

    `images` is the table of what runs for which image, see `Image`. Further arguments are those of
    `Settings`: `backoff_base`, `heartbeat`, `isolation` and so on. A control plane may have several, if their
    nodes have other names and each its own `folder`.
    """

    def __init__(
        self,
        access: Access,
        images: Mapping[str, Image] | None = None,
        nodes: Sequence[NodeSpec] = (cpu_node(), gpu_node()),
        folder: Path | None = None,
        **more: Any,
    ) -> None:
        super().__init__(folder or folder_of(access))
        self._access = access
        credentials = _credentials(access)
        self.settings = Settings(
            server=access.url,
            folder=str(self.folder),
            ca_file=str(access.ca_file),
            certificate=str(credentials.certificate),
            key=str(credentials.key),
            nodes=tuple(nodes),
            images=dict(images or {}),
            **more,
        )
        self._spawner = Spawner()
        command = [sys.executable, "-c", _MAIN, str(self.folder / "settings.json")]
        self._agent = Component(STEM, command, self.folder / "agent.log", self._spawner)

    def start(self) -> Self:
        """Start the agent; returns when its nodes are ready for pods."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "settings.json").write_text(self.settings.dump())
        try:
            self.start_agent()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the agent and all its containers; safe to call twice."""
        self._agent.stop(GRACE_SECONDS)
        self._spawner.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The agent's process, while it runs."""
        return self._agent.pid

    def kill_agent(self) -> None:
        """Kill the agent without notice, and with it, by the kernel's hand, every container."""
        self._agent.signal(signal.SIGKILL)
        self._agent.wait(GRACE_SECONDS)

    def start_agent(self) -> None:
        """Start the agent anew after `kill_agent`; returns when its nodes are ready."""
        self._agent.start()
        deadline = time.monotonic() + READY_SECONDS
        while not self._ready():
            self._agent.check()
            if time.monotonic() > deadline:
                raise self._agent.failure(f"has no ready nodes after {READY_SECONDS:.0f} s")
            time.sleep(0.05)

    def _ready(self) -> bool:
        """Whether this agent answers, and every node is ready and free of the taint of those that are not."""
        try:
            self.state()
            return all(is_ready(self._access.request("GET", f"/api/v1/nodes/{n.name}")) for n in self.settings.nodes)
        except (OSError, NodeError, RuntimeError):
            return False


def is_ready(node: Mapping[str, Any]) -> bool:
    """Whether the scheduler would use a node."""
    conditions = {c["type"]: c["status"] for c in node.get("status", {}).get("conditions") or ()}
    taints = {taint["key"] for taint in node["spec"].get("taints") or ()}
    return conditions.get("Ready") == "True" and not any(t.startswith("node.kubernetes.io/") for t in taints)


def folder_of(access: Access) -> Path:
    """Where the agent of a control plane works."""
    return access.folder / "nodes"


def _credentials(access: Access) -> Credentials:
    """The agent's certificate: one the control plane has written, or one it signs now."""
    known = Credentials(access.folder / f"{STEM}.crt", access.folder / f"{STEM}.key")
    if known.certificate.exists():
        return known
    issue = getattr(access, "issue", None)
    if issue is None:
        raise RuntimeError("only the process that started the control plane can start its nodes")
    # One agent is the kubelet of several nodes and the provisioner of volumes too: no user of Kubernetes' own fits.
    issued: Credentials = issue(STEM, "devcluster:node-agent", ["system:masters"], [LOOPBACK])
    return issued
