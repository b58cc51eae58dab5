"""A namespace to try things in, for tests: short ways to create pods, to wait, to look into them.

Knows nothing of pytest; the fixtures are in `testing`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from devcluster.access import Access, ApiError
from devcluster.node.client import NodesClient
from devcluster.node.images import Image
from devcluster.node.launching import PATH
from devcluster.node.nodeobject import NodeSpec
from devcluster.node.nodes import Nodes

T = TypeVar("T")
Json = dict[str, Any]
# Any image will do where the pod says what to execute; this Python's programs are found.
IMAGES = {"*": Image(env={"PATH": f"{Path(sys.executable).parent}:{PATH}"})}
GROUPS = {"Job": "/apis/batch/v1", "Deployment": "/apis/apps/v1"}


@dataclass(frozen=True)
class Space:
    """A namespace of a cluster with nodes, and short ways to use it."""

    access: Access
    nodes: NodesClient
    name: str
    folder: Path

    def create(self, kind: str, name: str, **body: Any) -> Json:
        """Create an object."""
        return self.access.request("POST", self.path(kind), {"metadata": {"name": name}, **body})

    def get(self, kind: str, name: str) -> Json:
        """Read an object."""
        return self.access.request("GET", f"{self.path(kind)}/{name}")

    def list(self, kind: str, selector: str = "") -> list[Json]:
        """Read all objects of a kind that a label selector chooses."""
        query = f"?labelSelector={selector}" if selector else ""
        found: list[Json] = self.access.request("GET", self.path(kind) + query)["items"]
        return found

    def patch(self, kind: str, name: str, body: Json) -> Json:
        """Merge something into an object."""
        content = "application/merge-patch+json"
        return self.access.request("PATCH", f"{self.path(kind)}/{name}", body, content=content)

    def delete(self, kind: str, name: str, **options: Any) -> None:
        """Delete an object."""
        self.access.request("DELETE", f"{self.path(kind)}/{name}", options)

    def path(self, kind: str) -> str:
        """Where the objects of a kind are."""
        return f"{GROUPS.get(kind, '/api/v1')}/namespaces/{self.name}/{kind.lower()}s"

    def pod(self, name: str, *containers: Json, **spec: Any) -> Json:
        """Create a pod that does not take long to end."""
        return self.create("Pod", name, spec=pod_spec(*containers, **spec))

    def until(self, read: Callable[[], T], check: Callable[[T], Any], seconds: float = 20.0) -> T:
        """Read until it is as wanted; shows the last reading if it never is."""
        deadline = time.monotonic() + seconds
        while True:
            found = read()
            if check(found):
                return found
            assert time.monotonic() < deadline, f"still {found}"
            time.sleep(0.05)

    def until_pod(self, name: str, check: Callable[[Json], Any], seconds: float = 20.0) -> Json:
        """Wait until a pod is as wanted."""
        return self.until(lambda: self.get("Pod", name), check, seconds)

    def until_gone(self, kind: str, name: str, seconds: float = 20.0) -> None:
        """Wait until an object does not exist."""
        self.until(lambda: self._exists(kind, name), lambda exists: not exists, seconds)

    def run(self, pod: str, container: str, *argv: str) -> str:
        """Run a program inside a container; returns what it wrote."""
        return self.nodes.execute(self.name, pod, container, *argv).strip()

    def logs(self, pod: str, *options: str) -> str:
        """What `kubectl logs` prints."""
        return self.access.kubectl("logs", "-n", self.name, pod, *options)

    @property
    def own_node(self) -> str:
        """The name of the node that `with_own_node` starts."""
        return f"node-of-{self.name}"

    @contextmanager
    def with_own_node(self, **settings: Any) -> Iterator[Nodes]:
        """Start a node that nobody else uses: pods come there by `nodeName` only, since it is tainted."""
        spec = NodeSpec(self.own_node, taints=({"key": "private", "effect": "NoSchedule"},))
        with Nodes(self.access, IMAGES, [spec], folder=self.folder / "nodes", heartbeat=1.0, **settings) as nodes:
            yield nodes
        self.access.request("DELETE", f"/api/v1/nodes/{self.own_node}")

    def _exists(self, kind: str, name: str) -> bool:
        try:
            self.get(kind, name)
        except ApiError as error:
            if error.code != 404:
                raise
            return False
        return True


def pod_spec(*containers: Json, **spec: Any) -> Json:
    """Give a pod's spec; a container with `init` is an init container."""
    inits = [{k: v for k, v in c.items() if k != "init"} for c in containers if c.get("init")]
    mains = [c for c in containers if not c.get("init")]
    return {"initContainers": inits, "containers": mains, "terminationGracePeriodSeconds": 1, **spec}


def shell(name: str, script: str, **more: Any) -> Json:
    """Give a container that runs a shell script."""
    return {"name": name, "image": "any", "command": ["sh", "-ec", script], **more}


def sleeper(name: str = "main", **more: Any) -> Json:
    """Give a container that waits, and ends at once when it is told to."""
    return shell(name, "trap 'exit 0' TERM; while :; do sleep 1000 & wait $!; done", **more)


def state(pod: Json, container: str) -> Json:
    """Give a container's entry in a pod's status, empty before there is one."""
    status = pod.get("status") or {}
    entries = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    return next((entry for entry in entries if entry["name"] == container), {})


def phase(pod: Json) -> str:
    """Give a pod's phase."""
    return str((pod.get("status") or {}).get("phase"))


def is_true(thing: Json, condition: str) -> bool:
    """Whether a condition holds."""
    found = {c["type"]: c["status"] for c in (thing.get("status") or {}).get("conditions") or ()}
    return found.get(condition) == "True"
