"""What to do with a pod's containers now: pure, from the pod and its containers' states to actions.

Covers the order of init containers, the gate a sidecar's startup probe is, restarts and their
back-off, kills that a probe demands, and the order in which an ending pod is stopped. It must not act;
the worker does, feeds back what came of it, and asks again, so every decision is remade from the state
and none is remembered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from devcluster.node import pods
from devcluster.node.backoff import BackoffRule
from devcluster.node.ending import Ending, due_at, may_restart
from devcluster.node.pods import Kind
from devcluster.node.states import Phase, State, States

LATE_GRACE = 2.0  # what a sidecar gets to end in when the others have used up the grace period


@dataclass(frozen=True)
class Stop:
    """End a container: its preStop hook, SIGTERM, and SIGKILL at the deadline."""

    name: str
    deadline: float
    why: str


@dataclass(frozen=True)
class Plan:
    """What to do at once, and when to ask again if nothing happens before."""

    start: tuple[str, ...] = ()
    stop: tuple[Stop, ...] = ()
    wake_at: float | None = None
    over: bool = False  # the pod is ending and nothing of it runs


def plan(pod: Mapping[str, Any], states: States, now: float, ending: Ending | None, rule: BackoffRule) -> Plan:
    """Decide for one pod."""
    return _wind_down(states, now, ending) if ending else _run(pod, states, now, rule)


def initialized(states: States) -> bool:
    """Whether the init containers are behind: a main container has been started in this life."""
    return any(s.kind is Kind.MAIN and (s.active or (s.run and not s.restored)) for s in states.values())


def restart_at(state: State, policy: str, rule: BackoffRule) -> float | None:
    """When a container that does not run may start: None for never, 0 for a first start."""
    if state.active:
        return None
    if state.problem:
        return state.problem.retry_at
    if state.phase is Phase.NEW or state.run is None:
        return 0.0
    if not may_restart(state.kind, policy, state.run.exit_code):
        return None
    return rule.restart_at(state.backoff, state.run.finished_at or 0.0)


def _run(pod: Mapping[str, Any], states: States, now: float, rule: BackoffRule) -> Plan:
    """Start what may start, in order, and stop what a probe condemned."""
    policy = pods.restart_policy(pod)
    due = [due_at(pod)]
    start = []
    for name in _startable(states):
        at = restart_at(states[name], policy, rule)
        if at is not None and at <= now:
            start.append(name)
        else:
            due.append(at)
    stop = tuple(
        Stop(s.name, now + (pods.grace(pod) if s.unhealthy.grace is None else s.unhealthy.grace), s.unhealthy.message)
        for s in states.values()
        if s.unhealthy and s.active and s.stop_by is None
    )
    return Plan(tuple(start), stop, min((at for at in due if at is not None), default=None))


def _startable(states: States) -> list[str]:
    """The containers whose turn it is or was: all before the first that still holds up the others."""
    past = initialized(states)
    names: list[str] = []
    for name, state in states.items():
        if state.kind is Kind.INIT:
            if past or state.succeeded:
                continue
            return [*names, name]
        names.append(name)
        if state.kind is Kind.SIDECAR and not past and not state.started:
            return names
    return names


def _wind_down(states: States, now: float, ending: Ending) -> Plan:
    """Stop the main and init containers together, then the sidecars, the last started first."""
    active = [s for s in states.values() if s.active]
    if not active:
        return Plan(over=True)
    late = ending.deadline if ending.immediate else max(ending.deadline, now + LATE_GRACE)
    first = [s for s in active if s.kind is not Kind.SIDECAR]
    if first and now < ending.deadline:
        turn = [(s, ending.deadline) for s in first]
    elif now < ending.deadline:
        turn = [(active[-1], late)]
    else:
        turn = [(s, ending.deadline if s.kind is not Kind.SIDECAR else late) for s in active]
    stop = tuple(
        Stop(s.name, deadline, f"Stopping container {s.name}")
        for s, deadline in turn
        if s.stop_by is None or (deadline < s.stop_by and deadline <= ending.deadline)
    )
    return Plan(stop=stop, wake_at=ending.deadline if now < ending.deadline else None)
