"""Start, stop and break a control plane: etcd, API server, controller manager and scheduler on this machine.

Each one has its own ports, certificates and folder, so any number can run side by side. Nothing of it is
meant to be kept: the data is in a temporary folder and never waits for the disk.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from devcluster import binaries, components, kubeconfig
from devcluster.access import Access, ApiError
from devcluster.certs import Authority, Credentials, new_key, write_key
from devcluster.history import History
from devcluster.ports import LOOPBACK, Port
from devcluster.processes import Component, Spawner

ETCD, API, MANAGER, SCHEDULER = "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"
READY_SECONDS = 60.0
POLL_SECONDS = 0.05
# How long each may take to end in order. There is nothing to lose that would be worth more.
GRACE_SECONDS = 5.0


class ControlPlane(Access):
    """A control plane of one's own. Use it once, as a context manager or with `start` and `stop`.

    `folder` must be empty or missing, and is kept; without it a temporary one is used and removed at the end.
    `flags` adds to the command lines of components, by their names. `history` is needed for
    `lose_last_second`, and costs etcd a short halt four times a second.
    """

    def __init__(
        self,
        *,
        folder: Path | None = None,
        programs: Path | None = None,
        flags: Mapping[str, Sequence[str]] | None = None,
        history: bool = False,
    ) -> None:
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="devcluster-")
        self._ports = [Port() for _ in range(3)]
        api_port, etcd_port, peer_port = (port.number for port in self._ports)
        where = folder.absolute() if folder else Path(self._temporary.name if self._temporary else "")
        super().__init__(f"https://{LOOPBACK}:{api_port}", where, programs or binaries.ensure())
        self._layout = components.Layout(where, self.programs, api_port, etcd_port, peer_port)
        self._flags = flags or {}
        self._spawner = Spawner()
        self._authority: Authority | None = None
        self._components: dict[str, Component] = {}
        self._history: History | None = None
        self._wants_history = history
        self._faults = threading.RLock()

    # ---- life

    def start(self) -> Self:
        """Start everything; returns when the API server answers and the controllers work."""
        try:
            self._prepare()
            self._boot()
            if self._wants_history:
                self._history = History(self._components[ETCD], self._layout.etcd_data, self._faults)
                self._history.start()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End everything, users of the data before its keeper; safe to call twice."""
        if self._history is not None:
            self._history.stop()
        with self._faults:
            for names in ((SCHEDULER, MANAGER), (API,), (ETCD,)):
                ending = [self._components[name] for name in names if name in self._components]
                for component in ending:
                    component.terminate()
                for component in ending:
                    component.stop(GRACE_SECONDS)
        self._spawner.close()
        for port in self._ports:
            port.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def check(self) -> None:
        """Raise ComponentFailed, with the end of its log, when a component does not run."""
        for component in self._components.values():
            component.check()

    @property
    def pids(self) -> dict[str, int]:
        """The processes that run, by component."""
        found = {name: component.pid for name, component in self._components.items()}
        return {name: pid for name, pid in found.items() if pid is not None}

    def command(self, name: str) -> list[str]:
        """The command line of a component."""
        return list(self._components[name].command)

    # ---- identities

    def issue(self, stem: str, user: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()) -> Credentials:
        """Sign a client certificate, for a server at `hosts` too, as `stem`.crt, .key and .kubeconfig in the folder."""
        if self._authority is None:
            raise RuntimeError("the control plane is not started")
        credentials = self._authority.issue(stem, user, groups, hosts)
        kubeconfig.write(self.folder / f"{stem}.kubeconfig", self.url, self.ca_file, credentials, user)
        return credentials

    def issue_node(self, name: str, addresses: Sequence[str] = (LOOPBACK,)) -> Credentials:
        """Sign what a kubelet would have: the identity of the Node `name`, and a server certificate for its API."""
        return self.issue(f"node-{name}", f"system:node:{name}", ["system:nodes"], [name, *addresses])

    # ---- faults

    def pause_api(self) -> None:
        """Freeze the API server: connections are accepted and nothing is answered."""
        with self._faults:
            self._components[API].freeze()

    def resume_api(self) -> None:
        """Let the frozen API server go on where it was."""
        with self._faults:
            self._components[API].thaw()

    def restart_api(self) -> None:
        """End the API server in order and start it again at the same port; returns when it is ready."""
        self.restart(API)

    def kill(self, name: str) -> None:
        """Kill a component without notice. It stays away until `restart`."""
        with self._faults:
            self._components[name].kill()

    def restart(self, name: str) -> None:
        """Start a component, after ending it if it runs; returns when the API server is ready."""
        with self._faults:
            self._components[name].stop(GRACE_SECONDS)
            self._components[name].start()
            self._until_ready()

    def lose_last_second(self) -> float:
        """Fail like a machine that loses power before its disk has written what etcd took for written.

        All components are killed and start again on etcd's data as they were at least a second ago, and
        rarely more than a second and a half. Returns how many seconds were lost. What was written
        before is there, what was written in them is not, and their resource versions are given out anew.
        """
        if self._history is None:
            raise RuntimeError("only with ControlPlane(history=True)")
        with self._faults:
            chosen = self._history.a_second_ago()
            for component in self._components.values():
                component.kill()
            lost = time.monotonic() - chosen.taken
            self._history.restore(chosen)
            self._start_all()
        return lost

    # ---- how

    def _prepare(self) -> None:
        """Write all files that the components read, and choose their command lines."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(self.folder.iterdir()):
            raise FileExistsError(f"{self.folder} is not empty")
        layout, self._authority = self._layout, Authority(self.folder)
        write_key(layout.token_key, new_key())
        self._authority.issue("etcd", "etcd", hosts=[LOOPBACK])
        names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost", LOOPBACK]
        self._authority.issue("api-server", "kube-apiserver", hosts=names)
        self._authority.issue("api-server-etcd", "kube-apiserver")
        self._authority.issue("api-server-node", "kube-apiserver-kubelet-client")
        self._authority.issue("node-agent", "devcluster:node-agent", ["system:masters"], hosts=[LOOPBACK])
        self.issue("controller-manager", "system:kube-controller-manager")
        self.issue("scheduler", "system:kube-scheduler")
        self.issue("admin", "admin", ["system:masters"])
        (self.folder / "admin.kubeconfig").rename(self.kubeconfig)
        commands = {
            ETCD: components.etcd(layout),
            API: components.api_server(layout),
            MANAGER: components.controller_manager(layout),
            SCHEDULER: components.scheduler(layout),
        }
        for name, command in commands.items():
            log = self.folder / f"{name}.log"
            self._components[name] = Component(name, [*command, *self._flags.get(name, ())], log, self._spawner)

    def _boot(self) -> None:
        self._start_all()
        # The controllers work when they have made this one, and a pod cannot be created before.
        self._until("/api/v1/namespaces/default/serviceaccounts/default", MANAGER)

    def _start_all(self) -> None:
        self._components[ETCD].start()
        self._components[API].start()
        self._until_ready()
        self._components[MANAGER].start()
        self._components[SCHEDULER].start()

    def _until_ready(self) -> None:
        self._until("/readyz", API)

    def _until(self, path: str, awaited: str) -> None:
        """Wait until `path` can be read; a component that ends meanwhile is an error at once."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            with suppress(ApiError, OSError):
                self.request("GET", path, timeout=2)
                return
            for name in (ETCD, API, awaited):
                self._components[name].check()
            if time.monotonic() > deadline:
                raise self._components[awaited].failure(f"is not ready after {READY_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)
