"""The agent: one process that is the kubelet of every node of a development cluster.

Ties the parts together: informers in, a worker for each pod, heartbeats, the volume provisioner, the
servers. It holds which pods are where and nothing else; a pod's fate is in its worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from devcluster.node import control, pods, server
from devcluster.node.addresses import Addresses
from devcluster.node.api import Api
from devcluster.node.backoff import BackoffRule
from devcluster.node.events import Recorder
from devcluster.node.heartbeat import Heartbeat
from devcluster.node.host import Host
from devcluster.node.informer import Informer, Key, key_of
from devcluster.node.nodeobject import NodeSpec, allocatable
from devcluster.node.pods import Json
from devcluster.node.provisioner import Provisioner
from devcluster.node.settings import Settings
from devcluster.node.spawn import Isolation
from devcluster.node.worker import Worker

log = logging.getLogger(__name__)
NODE_IP = "127.0.0.1"  # all nodes are this machine, and one server answers for them


@dataclass
class Node:
    """A node of this agent; without a heartbeat it is down."""

    spec: NodeSpec
    host: Host
    heartbeat: asyncio.Task[None] | None = None
    workers: dict[str, Worker] = field(default_factory=dict)  # by uid
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    # Pods that need nothing more from here: their uids, and the count of lists, since a server that has
    # forgotten things may want it once more.
    done: dict[Key, tuple[str, int]] = field(default_factory=dict)


class Agent:
    """All nodes of a cluster."""

    def __init__(self, settings: Settings, isolation: Isolation, *, switch_user: bool) -> None:
        self._settings, self._isolation, self._switch_user = settings, isolation, switch_user
        self._folder = Path(settings.folder)
        self._nodes: dict[str, Node] = {}
        self._addresses = Addresses()
        self._clock = time.time
        self._port = 0
        self._stopping = asyncio.Event()
        self._pods: Informer

    def stop(self) -> None:
        """End: every process dies, Nodes and pods stay as they are on the API server."""
        self._stopping.set()

    async def run(self) -> None:
        """Until stopped."""
        s = self._settings
        files = (Path(s.ca_file), Path(s.certificate), Path(s.key))
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with Api(s.server, *files) as api, aiohttp.ClientSession(connector=connector) as http:
            recorder = Recorder(api, self._clock)
            for spec in s.nodes:
                self._nodes[spec.name] = Node(spec, self._host(spec, api, http, recorder))
            self._pods = Informer(api, "/api/v1/pods", self._pod_changed, query={"fieldSelector": "spec.nodeName!="})
            runner = await self._serve()
            try:
                await self._work(api, recorder)
            finally:
                for node in self._nodes.values():
                    await self._silence(node)
                await runner.cleanup()
                self._addresses.close()

    async def _work(self, api: Api, recorder: Recorder) -> None:
        forever = [
            self._pods.run(),
            self._tidy(),
            self._referenced(api, "ConfigMap", "configmaps").run(),
            self._referenced(api, "Secret", "secrets").run(),
            Provisioner(api, self._folder / "claims").run(),
            recorder.run(),
        ]
        tasks = [asyncio.create_task(work) for work in forever]
        for node in self._nodes.values():
            self._start_heartbeat(node, api)
        control_runner = await self._open_control()
        stopping: asyncio.Task[Any] = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # it ended by a mistake, which shall be seen
        finally:
            await control_runner.cleanup()
            for task in [*tasks, stopping]:
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)

    def _host(self, spec: NodeSpec, api: Api, http: aiohttp.ClientSession, recorder: Recorder) -> Host:
        s, address = self._settings, urllib.parse.urlsplit(self._settings.server)
        return Host(
            name=spec.name,
            ip=NODE_IP,
            allocatable=allocatable(spec),
            api=api,
            http=http,
            recorder=recorder,
            clock=self._clock,
            rule=BackoffRule(s.backoff_base, s.backoff_cap),
            retry=s.retry,
            images=s.images,
            cluster_variables={
                "KUBERNETES_SERVICE_HOST": address.hostname or "",
                "KUBERNETES_SERVICE_PORT": str(address.port or 443),
                "KUBERNETES_SERVICE_PORT_HTTPS": str(address.port or 443),
            },
            folder=self._folder / "pods",
            isolation=self._isolation,
            switch_user=self._switch_user,
        )

    # ---- pods

    def _pod_changed(self, key: Key, pod: Json | None) -> None:
        for node in self._nodes.values():
            known = next((w for w in node.workers.values() if key_of(w.pod) == key), None)
            if known and (pod is None or pods.uid(pod) != pods.uid(known.pod)):
                known.forget()
                node.tasks[pods.uid(known.pod)].cancel()
            if pod is None:
                node.done.pop(key, None)
        if pod is None:
            return
        node_of = self._nodes.get(str(pod["spec"].get("nodeName")))
        if node_of and node_of.heartbeat:
            self._adopt(node_of, pod)

    def _adopt(self, node: Node, pod: Json) -> None:
        uid = pods.uid(pod)
        if uid in node.workers:
            node.workers[uid].update(pod, self._pods.lists)
        elif node.done.get(key_of(pod)) != (uid, self._pods.lists):
            address = NODE_IP if pod["spec"].get("hostNetwork") else self._addresses.take()
            worker = Worker(node.host, pod, address)
            node.workers[uid] = worker
            node.tasks[uid] = asyncio.create_task(self._follow(node, uid, worker, address))

    async def _follow(self, node: Node, uid: str, worker: Worker, address: str) -> None:
        """Run a worker to its end."""
        try:
            await worker.run()
            node.done[key_of(worker.pod)] = (uid, self._pods.lists)
        except Exception:
            log.exception("pod %s/%s", pods.namespace(worker.pod), pods.name(worker.pod))
        finally:
            self._addresses.give_back(address)
            node.workers.pop(uid, None)
            node.tasks.pop(uid, None)

    async def _tidy(self) -> None:
        """Once the pods are known: remove what earlier agents left of pods that are gone."""
        await self._pods.listed.wait()
        folder = self._folder / "pods"
        known = {pods.uid(pod) for pod in self._pods.objects.values()}
        for left in folder.iterdir() if folder.exists() else ():
            if left.name not in known:
                shutil.rmtree(left, ignore_errors=True)
        await asyncio.Event().wait()

    def find(self, namespace: str, pod: str) -> Worker | None:
        """A pod that is here."""
        everyone = (worker for node in self._nodes.values() for worker in node.workers.values())
        return next((w for w in everyone if key_of(w.pod) == (namespace, pod)), None)

    def _referenced(self, api: Api, kind: str, plural: str) -> Informer:
        """Tell workers of changes in what they refer to; the content is fetched by those who need it."""

        def changed(key: Key, _: Json | None) -> None:
            for node in self._nodes.values():
                for worker in node.workers.values():
                    if pods.namespace(worker.pod) == key[0] and worker.refers_to(kind, key[1]):
                        worker.refresh()

        return Informer(api, f"/api/v1/{plural}", changed, metadata_only=True)

    # ---- nodes

    def _start_heartbeat(self, node: Node, api: Api) -> None:
        beat = Heartbeat(api, node.spec, self._clock, ip=NODE_IP, port=self._port, interval=self._settings.heartbeat)
        node.heartbeat = asyncio.create_task(beat.run())

    async def node_down(self, name: str) -> None:
        """Make a node fall silent and all its processes die, as if it lost power."""
        await self._silence(self._nodes[name])

    async def node_up(self, name: str) -> None:
        """Let a node come back: it finds its pods on the API server and their processes gone."""
        node = self._nodes[name]
        if node.heartbeat:
            return
        self._start_heartbeat(node, node.host.api)
        for pod in list(self._pods.objects.values()):
            if pod["spec"].get("nodeName") == name:
                self._adopt(node, pod)

    async def _silence(self, node: Node) -> None:
        tasks = list(node.tasks.values())
        if node.heartbeat:
            tasks.append(node.heartbeat)
            node.heartbeat = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def state(self) -> Json:
        """What is here: nodes, pods, processes."""
        return {
            "isolation": self._isolation.value,
            "nodes": {
                name: {
                    "up": node.heartbeat is not None,
                    "pods": {
                        f"{pods.namespace(w.pod)}/{pods.name(w.pod)}": {n: c.pid for n, c in w.lives.running.items()}
                        for w in node.workers.values()
                    },
                }
                for name, node in self._nodes.items()
            },
        }

    # ---- servers

    async def _serve(self) -> web.AppRunner:
        s = self._settings
        runner = web.AppRunner(server.application(self.find, self._clock), access_log=None)
        await runner.setup()
        context = server.tls(Path(s.ca_file), Path(s.certificate), Path(s.key))
        await web.TCPSite(runner, NODE_IP, 0, ssl_context=context).start()
        self._port = runner.addresses[0][1]
        return runner

    async def _open_control(self) -> web.AppRunner:
        """Opened last: that it answers means the agent works."""
        runner = web.AppRunner(control.application(self), access_log=None)
        await runner.setup()
        path = self._settings.control_socket
        path.unlink(missing_ok=True)
        os.chdir(path.parent)  # a socket's path may have no more than 108 bytes
        await web.UnixSite(runner, path.name).start()
        return runner
