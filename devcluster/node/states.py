"""What is known of each container of one pod: frozen values, and how they follow one another.

`plan` reads these to decide, `podstatus` reads them to report, the worker replaces them as things
happen. Nothing here has a clock or touches a process; `now` is always an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from devcluster.node import pods
from devcluster.node.pods import Kind


class Phase(Enum):
    """Where a container stands."""

    NEW = "new"  # not started in this life of the agent
    STARTING = "starting"  # its process is being made
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True)
class Run:
    """One run of a container's process."""

    id: str
    started_at: float
    finished_at: float | None = None
    exit_code: int = 0
    reason: str = ""
    message: str = ""


@dataclass(frozen=True)
class Backoff:
    """How long the next restart waits, and since when that is so."""

    delay: float
    since: float


@dataclass(frozen=True)
class Problem:
    """Why a container could not even be started, in the kubelet's words, and when to try again."""

    reason: str
    message: str
    retry_at: float


@dataclass(frozen=True)
class Unhealthy:
    """A probe or hook that demands the container's end."""

    message: str
    grace: float | None  # the probe's own, if it states one


@dataclass(frozen=True)
class State:
    """One container of one pod."""

    name: str
    kind: Kind
    phase: Phase = Phase.NEW
    run: Run | None = None  # the present one or, if it ended, the last
    previous: Run | None = None  # the one before
    restarts: int = 0
    backoff: Backoff | None = None
    problem: Problem | None = None
    unhealthy: Unhealthy | None = None
    started: bool = False  # the postStart hook is through and the startup probe has succeeded
    ready: bool = False
    stop_by: float | None = None  # it was told to stop; when it will be killed
    restored: bool = False  # `run` is from before this life of the agent

    @property
    def active(self) -> bool:
        """Whether a process exists or is about to."""
        return self.phase in (Phase.STARTING, Phase.RUNNING)

    @property
    def succeeded(self) -> bool:
        """Whether its last run ended well."""
        return self.phase is Phase.ENDED and self.run is not None and self.run.exit_code == 0


States = Mapping[str, State]


def starting(state: State, run: Run, backoff: Backoff | None) -> State:
    """The container's process is being made; a further one counts as a restart."""
    again = state.run is not None
    return State(
        state.name,
        state.kind,
        Phase.STARTING,
        run,
        previous=state.run or state.previous,
        restarts=state.restarts + (1 if again else 0),
        backoff=backoff,
    )


def running(state: State, now: float, *, started: bool, ready: bool) -> State:
    """The process runs; whether it also counts as started and ready depends on its probes."""
    assert state.run is not None
    return replace(state, phase=Phase.RUNNING, run=replace(state.run, started_at=now), started=started, ready=ready)


def ended(state: State, now: float, exit_code: int, reason: str, message: str) -> State:
    """The process is gone."""
    assert state.run is not None
    run = replace(state.run, finished_at=now, exit_code=exit_code, reason=reason, message=message)
    return replace(
        state, phase=Phase.ENDED, run=run, started=False, ready=False, unhealthy=None, stop_by=None, problem=None
    )


def blocked(before: State, problem: Problem) -> State:
    """It could not be started: back to where it was before `starting`, with the reason."""
    return replace(before, problem=problem)


def fresh(pod: Mapping[str, Any]) -> dict[str, State]:
    """The states of a pod's containers before anything has run."""
    return {name: State(name, kind) for name, kind in pods.kinds(pod).items()}
