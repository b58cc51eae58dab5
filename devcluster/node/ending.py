"""Whether a pod is to end, why, and by when: the half of the pod's fate that the rest of `plan` obeys.

Once a pod is ending nothing in it starts again. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from devcluster.node import pods
from devcluster.node.pods import Kind
from devcluster.node.states import Phase, State, States


class Cause(Enum):
    """Why a pod ends."""

    DELETED = "deleted"
    OVERDUE = "overdue"  # activeDeadlineSeconds
    COMPLETE = "complete"  # its main containers have ended and none will run again
    INIT_FAILED = "init failed"
    DECLARED = "declared"  # somebody else wrote a terminal phase: an eviction, a lost node


@dataclass(frozen=True)
class Ending:
    """A pod's end: what ended it and when whatever still runs is killed."""

    cause: Cause
    since: float
    deadline: float

    @property
    def immediate(self) -> bool:
        """Whether there is no grace at all."""
        return self.deadline <= self.since


def ending(pod: Mapping[str, Any], states: States, now: float, known: Ending | None) -> Ending | None:
    """The pod's end, if it has one. One that is known stands; a deletion takes over, and can only hasten it."""
    grace = pods.deletion_grace(pod)
    if grace is not None:
        if known is None or known.cause is not Cause.DELETED:
            before = known.deadline if known else now + grace
            return Ending(Cause.DELETED, now, min(before, now + grace))
        return replace(known, deadline=min(known.deadline, known.since + grace))
    if known is not None:
        return known
    cause = _cause(pod, states, now)
    return Ending(cause, now, now + pods.grace(pod)) if cause else None


def _cause(pod: Mapping[str, Any], states: States, now: float) -> Cause | None:
    if pods.is_terminal(pod):
        return Cause.DECLARED
    due = due_at(pod)
    if due is not None and now >= due:
        return Cause.OVERDUE
    policy = pods.restart_policy(pod)
    if any(s.kind is Kind.INIT and _over(s, policy) and not s.succeeded for s in states.values()):
        return Cause.INIT_FAILED
    if all(_over(s, policy) for s in states.values() if s.kind is Kind.MAIN):
        return Cause.COMPLETE
    return None


def due_at(pod: Mapping[str, Any]) -> float | None:
    """When activeDeadlineSeconds is over, counted from when this agent first saw the pod."""
    limit, start = pod["spec"].get("activeDeadlineSeconds"), (pod.get("status") or {}).get("startTime")
    return pods.seconds(start) + float(limit) if limit is not None and start else None


def may_restart(kind: Kind, policy: str, exit_code: int) -> bool:
    """Whether a container that ended is started again."""
    if kind is Kind.SIDECAR:
        return True
    if kind is Kind.INIT or policy == "OnFailure":
        return policy != "Never" and exit_code != 0
    return policy == "Always"


def _over(state: State, policy: str) -> bool:
    """Whether the container has ended and will not run again."""
    if state.phase is not Phase.ENDED or state.run is None:
        return False
    return not may_restart(state.kind, policy, state.run.exit_code)
