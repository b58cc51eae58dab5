"""One pod on one node: asks `plan` what to do, has `lives` do it, writes the status, ends the pod.

A loop that is nudged by everything that can change the answer (the pod object, a process, a probe, a
due time) and each time decides from the whole state, so it does not matter what nudged it, nor how
often, nor what was missed while the API server was away.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from contextlib import suppress
from typing import Any

from devcluster.node import pods
from devcluster.node.api import UNREACHABLE, ApiError
from devcluster.node.ending import Ending, ending
from devcluster.node.fields import Facts, UnknownField
from devcluster.node.host import Host
from devcluster.node.informer import version_of
from devcluster.node.lives import Lives
from devcluster.node.payloads import Ref, needs
from devcluster.node.plan import plan
from devcluster.node.pods import Json
from devcluster.node.podstatus import Place, differs, patch_of, pod_status
from devcluster.node.references import References
from devcluster.node.restore import restored
from devcluster.node.spawn import Isolation
from devcluster.node.volumes import VolumeProblem, Volumes

log = logging.getLogger(__name__)
PROBLEMS = (VolumeProblem, UnknownField, ApiError, *UNREACHABLE)


class Worker:
    """The life of one pod."""

    def __init__(self, host: Host, pod: Json, ip: str) -> None:
        self._host, self.pod, self._ip = host, pod, ip
        self.folder = host.folder / pods.uid(pod)
        self._refs = References(host.api, host.clock)
        namespaces = host.isolation is Isolation.NAMESPACES
        self._volumes = Volumes(host.api, self._refs, self.folder, can_mount=namespaces, switch_user=host.switch_user)
        self._wake = asyncio.Event()
        self.lives = Lives(host, self._volumes, self._refs, self.folder, restored(pod, host.clock()), self._wake.set)
        self._ending: Ending | None = None
        self._prepared = False
        self._stale = False  # the volumes' files may be old
        self._reported = pods.is_terminal(pod)  # a pod that was over before has nothing to tell
        self._mute = self._reported
        self._lists = 0
        self._over = False  # nothing of it runs, or will
        self._gone = False  # the API server has forgotten it
        self._side: set[asyncio.Task[None]] = set()
        self._busy: set[str] = set()

    @property
    def _facts(self) -> Facts:
        return Facts(self.pod, self._ip, self._host.ip, self._host.allocatable)

    def update(self, pod: Json, lists: int) -> None:
        """The pod object changed; an older copy is ignored, unless all was listed anew and may be older now."""
        if lists == self._lists and int(version_of(pod)) < int(version_of(self.pod)):
            return
        self._lists = lists
        for field in ("labels", "annotations"):
            self._stale |= pod["metadata"].get(field) != self.pod["metadata"].get(field)
        self.pod = pod
        self._wake.set()

    def forget(self) -> None:
        """The pod was removed from the API server without waiting for this node; cancel `run` next."""
        self._gone = True
        self._wake.set()

    def refers_to(self, kind: str, name: str) -> bool:
        """Whether a ConfigMap or Secret is in one of the pod's volumes."""
        wanted = Ref(kind, name)
        return any(wanted in needs(volume) for volume in self.pod["spec"].get("volumes") or ())

    def refresh(self) -> None:
        """Something the volumes hold may have changed."""
        self._stale = True
        self._wake.set()

    async def run(self) -> None:
        """Until the pod is gone from the API server."""
        try:
            while True:
                self._wake.clear()
                due = self._step()
                if self._over and self._reported:
                    self._volumes.remove()
                    if self.pod["metadata"].get("deletionTimestamp") and await self._delete():
                        self._gone = True
                        return
                timeout = None if due is None else max(0.0, due - self._host.clock())
                if self._gone:
                    return
                # not `wait_for`: on Python 3.11 it swallows a cancel that comes together with the event
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout):
                        await self._wake.wait()
        finally:
            await self._abandon()

    def _step(self) -> float | None:
        """Decide and act once; returns when to do so again at the latest."""
        host, lives, now = self._host, self.lives, self._host.clock()
        known = self._ending
        self._ending = ending(self.pod, lives.states, now, known)
        if self._ending and not known:
            log.info("pod %s/%s ends: %s", pods.namespace(self.pod), pods.name(self.pod), self._ending.cause.value)
        due = []
        chosen = plan(self.pod, lives.states, now, self._ending, host.rule)
        if self._prepared or self._ending:
            for name in chosen.start:
                lives.start(name, self.pod, self._facts)
            for stop in chosen.stop:
                lives.stop(stop, self.pod, self._facts)
            due.append(chosen.wake_at)
        else:
            self._aside("prepare", self._prepare())
        self._over = chosen.over
        if self._prepared and not self._ending:
            renew = self._refs.renew_at
            if self._stale or (renew is not None and now >= renew):
                self._stale = False
                self._aside("refresh", self._refresh())
            due.append(renew)
        if not self._mute:
            self._reported = not differs(self._status(), self.pod.get("status") or {})
            if not self._reported:
                self._aside("report", self._report())
        return min((at for at in due if at is not None), default=None)

    def _status(self) -> Json:
        place = Place(self._host.ip, self._ip if self._prepared else None)
        return pod_status(self.pod, self.lives.states, self._host.clock(), self._ending, self._host.rule, place)

    def _aside(self, what: str, work: Any) -> None:
        """Do something in the background, one of a kind at a time; the loop looks again when it is done."""
        if what in self._busy:
            work.close()
            return
        self._busy.add(what)

        async def run() -> None:
            try:
                await work
            finally:
                self._busy.discard(what)
                self._wake.set()

        task = asyncio.create_task(run())
        self._side.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._side.discard(task)
        if not task.cancelled() and task.exception():
            log.error("pod %s/%s", pods.namespace(self.pod), pods.name(self.pod), exc_info=task.exception())

    async def _prepare(self) -> None:
        """Folder and volumes, which everything else waits for."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            await self._volumes.prepare(self.pod, self._facts)
        except PROBLEMS as error:
            self._tell("FailedMount", error)
            await asyncio.sleep(self._host.retry)
        else:
            self._prepared = True

    async def _refresh(self) -> None:
        try:
            await self._volumes.refresh(self.pod, self._facts)
        except PROBLEMS as error:
            self._tell("FailedMount", error)
            await asyncio.sleep(self._host.retry)
            # What is missing will be told when it appears; a server that was away tells nothing.
            self._stale = not isinstance(error, VolumeProblem)

    async def _report(self) -> None:
        """Write the status as it is now."""
        body = patch_of(self.pod, self._status())
        try:
            lists = self._lists
            answer = await self._host.api.patch(pods.path(self.pod) + "/status", body)
            if lists == self._lists:
                self.update(answer, lists)
        except ApiError as error:
            log.info("status of %s/%s: %s", pods.namespace(self.pod), pods.name(self.pod), error)
            await asyncio.sleep(self._host.retry)
        except UNREACHABLE:
            await asyncio.sleep(self._host.retry)

    async def _delete(self) -> bool:
        """Let the API server forget the pod; False if that has to be tried again."""
        options: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": pods.uid(self.pod)},
        }
        try:
            await self._host.api.delete(pods.path(self.pod), options)
        except ApiError as error:
            if error.code in (404, 409):
                return True
            log.info("deleting %s/%s: %s", pods.namespace(self.pod), pods.name(self.pod), error)
        except UNREACHABLE:
            pass
        else:
            return True
        await asyncio.sleep(self._host.retry)
        self._wake.set()
        return False

    async def _abandon(self) -> None:
        """Stop everything at once. What is on disk stays if only the node is gone, as after a power cut."""
        for task in self._side:
            task.cancel()
        await self.lives.kill()
        self._volumes.unmount()
        if self._gone:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._host.recorder.forget(pods.uid(self.pod))

    def _tell(self, reason: str, error: BaseException) -> None:
        message = str(error) or type(error).__name__
        self._host.recorder.tell(self.pod, self._host.name, "Warning", reason, message)
