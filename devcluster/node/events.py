"""Tell people what happens to their pods: Events, as `kubectl describe` shows them.

Best effort. Nothing waits for an Event, none is retried, and a burst beyond the queue is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from devcluster.node import pods
from devcluster.node.api import UNREACHABLE, Api, ApiError
from devcluster.node.pods import Json

log = logging.getLogger(__name__)
QUEUE = 1000


def event(
    pod: Mapping[str, Any], node: str, kind: str, reason: str, message: str, container: str | None, now: float
) -> Json:
    """An Event about a pod, or one container of it."""
    where = "initContainers" if container and pods.kinds(pod).get(container) is not pods.Kind.MAIN else "containers"
    involved: Json = {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": pods.namespace(pod),
        "name": pods.name(pod),
        "uid": pods.uid(pod),
    }
    if container:
        involved["fieldPath"] = f"spec.{where}{{{container}}}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{pods.name(pod)}.{uuid.uuid4().hex[:16]}", "namespace": pods.namespace(pod)},
        "involvedObject": involved,
        "type": kind,
        "reason": reason,
        "message": message[:1000],
        "source": {"component": "kubelet", "host": node},
        "reportingComponent": "kubelet",
        "reportingInstance": node,
        "firstTimestamp": pods.timestamp(now),
        "lastTimestamp": pods.timestamp(now),
        "count": 1,
    }


class Recorder:
    """Writes Events, one after the other, in the background."""

    def __init__(self, api: Api, clock: Callable[[], float]) -> None:
        self._api, self._clock = api, clock
        self._queue: asyncio.Queue[Json] = asyncio.Queue(QUEUE)
        self._said: dict[tuple[str, str | None, str], str] = {}

    def tell(
        self, pod: Mapping[str, Any], node: str, kind: str, reason: str, message: str, container: str | None = None
    ) -> None:
        """Say something about a pod, unless it is exactly what was said last for that reason."""
        key = (pods.uid(pod), container, reason)
        if kind == "Warning" and self._said.get(key) == message:
            return
        self._said[key] = message
        with suppress(asyncio.QueueFull):
            self._queue.put_nowait(event(pod, node, kind, reason, message, container, self._clock()))

    def forget(self, uid: str) -> None:
        """A pod is gone."""
        for key in [key for key in self._said if key[0] == uid]:
            del self._said[key]

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            item = await self._queue.get()
            try:
                await self._api.create(f"/api/v1/namespaces/{item['metadata']['namespace']}/events", item)
            except (ApiError, *UNREACHABLE) as error:
                log.debug("event lost: %s", error)
