"""What an agent is told when it starts: one value, as a JSON file that `Nodes` writes. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from devcluster.node.images import Image
from devcluster.node.nodeobject import NodeSpec, cpu_node, gpu_node


@dataclass(frozen=True)
class Settings:
    """An agent's settings."""

    server: str
    folder: str  # logs, volumes, the control socket
    ca_file: str  # of the API server's certificate and of those that may read logs
    certificate: str  # the agent's own, as a client and as a server
    key: str
    nodes: tuple[NodeSpec, ...] = field(default_factory=lambda: (cpu_node(), gpu_node()))
    images: Mapping[str, Image] = field(default_factory=dict)
    backoff_base: float = 1.0  # seconds; the kubelet's is 10
    backoff_cap: float = 30.0  # the kubelet's is 300
    heartbeat: float = 2.0
    retry: float = 1.0
    isolation: str = "auto"  # or "namespaces", "user-namespace", "none": see `isolation.enter`
    switch_user: bool = True  # honour runAsUser and fsGroup, where the agent is root
    log_level: str = "INFO"

    @property
    def control_socket(self) -> Path:
        """Where faults are asked for."""
        return control_socket(Path(self.folder))

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=2)


def control_socket(folder: Path) -> Path:
    """The control socket of the agent that works in a folder."""
    return folder / "control.sock"


def load(text: str) -> Settings:
    """Read what `dump` wrote, or a person: what is missing has its default."""
    fields: dict[str, Any] = json.loads(text)
    if "nodes" in fields:
        fields["nodes"] = tuple(NodeSpec(**{**n, "taints": tuple(n.get("taints", ()))}) for n in fields["nodes"])
    fields["images"] = {name: _image(image) for name, image in fields.get("images", {}).items()}
    return Settings(**fields)


def _image(fields: Mapping[str, Any]) -> Image:
    lists = {name: tuple(fields[name]) for name in ("entrypoint", "args") if name in fields}
    return Image(**{**fields, **lists})
