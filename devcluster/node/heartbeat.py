"""Keep a node registered and alive in the API server's eyes: its Node, its status, its Lease.

Every round looks at what is there, so a deleted Node is registered anew and an outage needs no care.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from devcluster.node.api import UNREACHABLE, Api, ApiError
from devcluster.node.nodeobject import (
    LEASE_NAMESPACE,
    NodeSpec,
    lease,
    missing_metadata,
    node_object,
    node_status,
)
from devcluster.node.pods import Json
from devcluster.node.podstatus import differs

log = logging.getLogger(__name__)
STATUS_SECONDS = 60.0  # how often the status is written although only its heartbeat times differ
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{LEASE_NAMESPACE}/leases"


class Heartbeat:
    """One node's registration."""

    def __init__(
        self, api: Api, spec: NodeSpec, clock: Callable[[], float], *, ip: str, port: int, interval: float
    ) -> None:
        self._api, self._spec, self._clock = api, spec, clock
        self._ip, self._port, self._interval = ip, port, interval
        self._started = clock()
        self._written = 0.0
        self._lease: Json | None = None  # as it was written last; read anew after a refusal
        self.registered = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled, which is how the node falls silent."""
        while True:
            try:
                await self._beat()
                self.registered.set()
            except (ApiError, *UNREACHABLE) as error:
                log.info("heartbeat of %s: %s", self._spec.name, error)
            await asyncio.sleep(self._interval)

    async def _beat(self) -> None:
        path = f"/api/v1/nodes/{self._spec.name}"
        node = await self._api.find(path)
        if node is None:
            node = await self._api.create("/api/v1/nodes", node_object(self._spec))
        patch = missing_metadata(self._spec, node)
        if patch:
            node = await self._api.patch(path, patch)
        await self._renew(node)
        await self._tell(path, node)

    async def _renew(self, node: Json) -> None:
        known, self._lease = self._lease or await self._api.find(f"{LEASES}/{self._spec.name}"), None
        seconds = max(1, round(self._interval * 4))
        body = lease(self._spec, node["metadata"]["uid"], self._clock(), seconds, known)
        if known is None:
            self._lease = await self._api.create(LEASES, body)
        else:
            self._lease = await self._api.replace(f"{LEASES}/{self._spec.name}", body)

    async def _tell(self, path: str, node: Json) -> None:
        now, old = self._clock(), node.get("status") or {}
        version = (await self._api.get("/version"))["gitVersion"] if not self._written else _version(old)
        status = node_status(self._spec, old, now, ip=self._ip, port=self._port, version=version, started=self._started)
        if now - self._written >= STATUS_SECONDS or differs(_timeless(status), _timeless(old)):
            await self._api.patch(path + "/status", {"status": status})
            self._written = now


def _version(status: Json) -> str:
    return str((status.get("nodeInfo") or {}).get("kubeletVersion") or "")


def _timeless(status: Json) -> Json:
    """A status without the times that change with every heartbeat."""
    conditions = [
        {key: value for key, value in condition.items() if key not in ("lastHeartbeatTime", "lastTransitionTime")}
        for condition in status.get("conditions") or ()
    ]
    return {**status, "conditions": conditions}
