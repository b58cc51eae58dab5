"""Carry out what `plan` decided for the containers of one pod, and keep their states true.

One task per container that is being started or runs. Each step ends in a new State and a nudge to the
worker, which decides anew; nothing here decides whether something starts, restarts or stops.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from devcluster.node import container as containers
from devcluster.node import pods, states
from devcluster.node.api import UNREACHABLE, ApiError
from devcluster.node.container import Container, Files
from devcluster.node.environment import Missing, environment, references
from devcluster.node.fields import Facts, UnknownField
from devcluster.node.hooks import Outcome, Target, perform
from devcluster.node.host import Host
from devcluster.node.images import find
from devcluster.node.inside.spec import Launch, Mount
from devcluster.node.launching import base_variables, launch
from devcluster.node.mounts import hosts, termination_path, volume_mounts
from devcluster.node.plan import Stop
from devcluster.node.prober import probe_container
from devcluster.node.probes import Probe, Role, probes
from devcluster.node.references import References
from devcluster.node.spawn import Isolation, StartFailed
from devcluster.node.states import Problem, Run, State, Unhealthy
from devcluster.node.volumes import VolumeProblem, Volumes

log = logging.getLogger(__name__)
START_ERROR = 128  # the exit code container runtimes give a program that could not be executed


class NoImage(LookupError):
    """An image that the table of programs does not name."""


class Lives:
    """The containers of one pod."""

    def __init__(
        self,
        host: Host,
        volumes: Volumes,
        refs: References,
        folder: Path,
        initial: Mapping[str, State],
        changed: Callable[[], None],
    ) -> None:
        self._host, self._volumes, self._refs, self._folder = host, volumes, refs, folder
        self._changed = changed
        self.states: dict[str, State] = dict(initial)
        self.running: dict[str, Container] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stops: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, pod: Mapping[str, Any], facts: Facts) -> None:
        """Begin a life of a container."""
        before, now = self.states[name], self._host.clock()
        backoff = before.backoff
        if before.run is not None:
            backoff = self._host.rule.after_restart(backoff, before.run.finished_at or now, now)
        self._put(states.starting(before, Run(uuid.uuid4().hex, now), backoff))
        self._tasks[name] = task = asyncio.create_task(self._live(name, before, pod, facts))
        task.add_done_callback(_unexpected)

    def stop(self, stop: Stop, pod: Mapping[str, Any], facts: Facts) -> None:
        """Tell a container to end, or to end sooner."""
        state = self.states[stop.name]
        first = state.stop_by is None
        self._put(replace(state, stop_by=stop.deadline))
        if first:
            self._host.recorder.tell(pod, self._host.name, "Normal", "Killing", stop.why, stop.name)
        running = self.running.get(stop.name)
        if running is None:
            return  # it is being started; `_live` looks when it is
        if stop.name in self._stops:
            running.hasten(stop.deadline)
        else:
            hook = self._pre_stop(stop.name, pod, facts)
            self._stops[stop.name] = asyncio.create_task(running.stop(stop.deadline, self._host.clock, hook))

    async def kill(self) -> None:
        """End everything at once and without a word, as a node does that loses power."""
        tasks, running = [*self._tasks.values(), *self._stops.values()], list(self.running.values())
        for container in running:
            container.kill()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(container.gone() for container in running), return_exceptions=True)

    async def execute(self, name: str, argv: list[str], timeout: float) -> tuple[int, str]:
        """Run a program inside a running container."""
        return await self.running[name].execute(argv, timeout)

    def _put(self, state: State) -> None:
        self.states[state.name] = state
        self._changed()

    async def _live(self, name: str, before: State, pod: Mapping[str, Any], facts: Facts) -> None:
        """From the start to the end of one run; whatever goes wrong in here is an end of it, never a life without end."""
        try:
            await self._life(name, before, pod, facts)
        except Exception as error:
            log.exception("container %s of %s/%s", name, pods.namespace(pod), pods.name(pod))
            self._host.recorder.tell(pod, self._host.name, "Warning", "Failed", f"Error: {error!r}", name)
            ended = states.ended(self.states[name], self._host.clock(), START_ERROR, "StartError", repr(error))
            self._put(ended)

    async def _life(self, name: str, before: State, pod: Mapping[str, Any], facts: Facts) -> None:
        host, spec = self._host, pods.containers(pod)[name]
        try:
            files = self._files(name, self.states[name].restarts)
            what = await self._launch(name, pod, facts, files)
        except (NoImage, Missing, VolumeProblem, UnknownField, ValueError, OSError, ApiError, *UNREACHABLE) as error:
            reason = "ImagePullBackOff" if isinstance(error, NoImage) else "CreateContainerConfigError"
            host.recorder.tell(pod, host.name, "Warning", "Failed", f"Error: {error}", name)
            self._put(states.blocked(before, Problem(reason, str(error), host.clock() + host.retry)))
            return
        try:
            running = await containers.start(what, files, host.isolation, host.clock)
        except (StartFailed, OSError) as error:
            host.recorder.tell(pod, host.name, "Warning", "Failed", f"Error: {error}", name)
            self._put(states.ended(self.states[name], host.clock(), START_ERROR, "StartError", str(error)))
            return
        self.running[name] = running
        host.recorder.tell(pod, host.name, "Normal", "Started", f"Started container {name}", name)
        try:
            await self._run(name, spec, pod, facts, running)
        finally:
            running.kill()
            self.running.pop(name, None)
            stop = self._stops.pop(name, None)
            if stop:
                stop.cancel()

    async def _run(
        self, name: str, spec: Mapping[str, Any], pod: Mapping[str, Any], facts: Facts, running: Container
    ) -> None:
        """While it runs."""
        host, found = self._host, probes(spec)
        hook = ((spec.get("lifecycle") or {}).get("postStart")) or {}
        started = Role.STARTUP not in found and not hook
        ready = started and Role.READINESS not in found
        stop_by = self.states[name].stop_by
        self._put(
            replace(states.running(self.states[name], host.clock(), started=started, ready=ready), stop_by=stop_by)
        )
        if stop_by is not None:
            stop = self._pre_stop(name, pod, facts)
            self._stops[name] = asyncio.create_task(running.stop(stop_by, host.clock, stop))
        target = Target(spec, facts.pod_ip, running.execute, host.http)
        probing = asyncio.create_task(self._probe(name, pod, target, found, hook))
        try:
            words = spec.get("terminationMessagePolicy") == "FallbackToLogsOnError"
            end = await running.exit(words_on_error=words)
        finally:
            probing.cancel()
        reason = "Error" if end.code else "Completed"
        self._put(states.ended(self.states[name], host.clock(), end.code, reason, end.message))

    async def _probe(
        self, name: str, pod: Mapping[str, Any], target: Target, found: dict[Role, Probe], hook: Mapping[str, Any]
    ) -> None:
        """The postStart hook, then the probes."""
        host = self._host

        def tell(reason: str, message: str) -> None:
            host.recorder.tell(pod, host.name, "Warning", reason, message, name)

        def failure(probe: Probe, message: str) -> None:
            kind = probe.role.name.capitalize()
            tell("Unhealthy", f"{kind} probe failed: {message}")

        def verdict(probe: Probe, passed: bool) -> None:
            state = self.states[name]
            if probe.role is Role.READINESS:
                self._put(replace(state, ready=passed))
            elif not passed:
                why = f"Container {name} failed {probe.role.name.lower()} probe, will be restarted"
                self._put(replace(state, unhealthy=Unhealthy(why, probe.grace)))
            elif probe.role is Role.STARTUP:
                self._put(replace(state, started=True, ready=Role.READINESS not in found))

        if hook:
            outcome = await perform(dict(hook), target, timeout=600.0)
            if not outcome.passed:
                tell("FailedPostStartHook", outcome.message)
                self._put(replace(self.states[name], unhealthy=Unhealthy("FailedPostStartHook", None)))
                return
            if Role.STARTUP not in found:
                self._put(replace(self.states[name], started=True, ready=Role.READINESS not in found))
        await probe_container(found, target, verdict, failure)

    def _pre_stop(self, name: str, pod: Mapping[str, Any], facts: Facts) -> Callable[[float], Any]:
        """The container's preStop hook, as something to call with the seconds it may take."""
        spec, running = pods.containers(pod)[name], self.running[name]
        action = (spec.get("lifecycle") or {}).get("preStop")

        async def hook(timeout: float) -> None:
            if not action:
                return
            target = Target(spec, facts.pod_ip, running.execute, self._host.http)
            outcome: Outcome = await perform(action, target, timeout)
            if not outcome.passed:
                self._host.recorder.tell(
                    pod, self._host.name, "Warning", "FailedPreStopHook", f"PreStopHook failed: {outcome.message}", name
                )

        return hook

    async def _launch(self, name: str, pod: Mapping[str, Any], facts: Facts, files: Files) -> Launch:
        """What to execute, from the container's spec and everything it refers to."""
        host, spec = self._host, pods.containers(pod)[name]
        image = find(host.images, str(spec.get("image") or ""))
        if image is None:
            raise NoImage(f"no program stands for image {spec.get('image')!r} in this node's table of images")
        objects = await self._refs.objects(pods.namespace(pod), references(spec))
        base = base_variables(pod, image, host.cluster_variables)
        variables = environment(spec, facts, lambda kind, key: objects[kind, key], base)
        mounts = self._volumes.mounts(volume_mounts(spec, variables))
        own = (Mount(str(files.termination), termination_path(spec)), Mount(str(self._hosts(pod, facts)), "/etc/hosts"))
        root = self._folder / "containers" / name / "root"
        if host.isolation is Isolation.NONE:
            _link(root, (*mounts, own[0]))
        return launch(
            pod,
            spec,
            image,
            variables,
            (*mounts, *own),
            isolation=host.isolation,
            root=root,
            hidden=host.folder,
            switch_user=host.switch_user,
        )

    def _hosts(self, pod: Mapping[str, Any], facts: Facts) -> Path:
        path = self._folder / "hosts"
        if not path.exists():
            own = Path("/etc/hosts")
            path.write_text(hosts(pod, own.read_text() if own.exists() else "", facts.pod_ip))
        return path

    def _files(self, name: str, number: int) -> Files:
        """Where this run writes; only the run before it keeps its log."""
        folder = self._folder / "containers" / name
        (folder / "root").mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.log"):
            if int(old.stem) < number - 1:
                old.unlink()
        termination = folder / "termination"
        termination.write_bytes(b"")
        termination.chmod(0o666)
        return Files(folder / f"{number}.log", termination)


def _unexpected(task: asyncio.Task[None]) -> None:
    """A mistake in here must not pass in silence: the container would look as if it were being started."""
    if not task.cancelled() and task.exception():
        log.error("a container's task failed", exc_info=task.exception())


def _link(root: Path, mounts: tuple[Mount, ...]) -> None:
    """Stand-ins for mounts: symlinks below a folder of the container's own."""
    for mount in sorted(mounts, key=lambda mount: len(mount.target)):
        place = root / mount.target.lstrip("/")
        if not os.path.lexists(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(mount.source)
