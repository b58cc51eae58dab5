"""A pod's status as the kubelet would write it: phase, conditions, containers, addresses.

Pure: the same pod, states and moment give the same status. Conditions that others own (readiness
gates, DisruptionTarget) are read but never written; `differs` tells whether a write is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from devcluster.node import pods
from devcluster.node.backoff import BackoffRule
from devcluster.node.containerstatus import container_status
from devcluster.node.ending import Cause, Ending
from devcluster.node.plan import initialized
from devcluster.node.pods import Json, Kind
from devcluster.node.states import Phase, States

OVERDUE = "DeadlineExceeded"
OVERDUE_MESSAGE = "Pod was active on the node longer than the specified deadline"


@dataclass(frozen=True)
class Place:
    """What the node adds to a pod's status."""

    host_ip: str
    pod_ip: str | None  # none before the pod's folder and volumes are there


def pod_status(
    pod: Mapping[str, Any], states: States, now: float, ending: Ending | None, rule: BackoffRule, place: Place
) -> Json:
    """The fields of `status` that a node owns, as a strategic merge patch's `status`."""
    specs = pods.containers(pod)
    over = ending is not None and not any(s.active for s in states.values())
    phase = _phase(pod, states, ending, over=over)
    held_up = not initialized(states) and bool(incomplete(states))
    entries = {
        name: container_status(
            pod,
            specs[name],
            state,
            now,
            rule=rule,
            held_up=held_up and (state.kind is Kind.MAIN or state.run is None),
            ending=ending is not None,
        )
        for name, state in states.items()
    }
    old = pod.get("status") or {}
    status: Json = {
        "phase": phase,
        "hostIP": place.host_ip,
        "hostIPs": [{"ip": place.host_ip}],
        "startTime": old.get("startTime") or pods.timestamp(now),
        "containerStatuses": [entries[n] for n, s in states.items() if s.kind is Kind.MAIN],
        "conditions": _conditions(pod, states, phase, now, sandbox=place.pod_ip is not None and not over),
    }
    if place.pod_ip:
        status |= {"podIP": place.pod_ip, "podIPs": [{"ip": place.pod_ip}]}
    inits = [entries[n] for n, s in states.items() if s.kind is not Kind.MAIN]
    if inits:
        status["initContainerStatuses"] = inits
    if ending and ending.cause is Cause.OVERDUE:
        status |= {"reason": OVERDUE, "message": OVERDUE_MESSAGE}
    generation = pod["metadata"].get("generation")
    if generation:
        status["observedGeneration"] = generation
    return status


def patch_of(pod: Mapping[str, Any], status: Mapping[str, Any]) -> Json:
    """A strategic merge patch that writes a status, to this very pod and no later one of its name."""
    # Addresses are merged by their value, so an old one would stay beside the new.
    replaced = {key: [*status[key], {"$patch": "replace"}] for key in ("podIPs", "hostIPs") if key in status}
    return {"metadata": {"uid": pod["metadata"]["uid"]}, "status": {**status, **replaced}}


def _phase(pod: Mapping[str, Any], states: States, ending: Ending | None, *, over: bool) -> str:
    if pods.is_terminal(pod):
        return str(pod["status"]["phase"])
    mains = [s for s in states.values() if s.kind is Kind.MAIN]
    if over and ending:
        if ending.cause in (Cause.OVERDUE, Cause.INIT_FAILED):
            return "Failed"
        return "Succeeded" if all(s.succeeded for s in mains) else "Failed"
    if not initialized(states) and (incomplete(states) or not any(s.run for s in mains)):
        return "Pending"
    # A container that has never run holds the pod back; one that waits to run again does not.
    return (
        "Pending" if any(s.run is None or (s.phase is Phase.STARTING and not s.previous) for s in mains) else "Running"
    )


def incomplete(states: States) -> list[str]:
    """The init containers that still have to end, or to start if they are sidecars."""
    return [
        s.name
        for s in states.values()
        if (s.kind is Kind.INIT and not s.succeeded) or (s.kind is Kind.SIDECAR and not s.started)
    ]


def _conditions(pod: Mapping[str, Any], states: States, phase: str, now: float, *, sandbox: bool) -> list[Json]:
    old = {c["type"]: c for c in (pod.get("status") or {}).get("conditions") or ()}
    found = {
        "PodReadyToStartContainers": _condition(sandbox),
        "Initialized": _initialized(states, phase),
        "ContainersReady": (containers_ready := _containers_ready(states, phase)),
        "Ready": _gated(pod, old, containers_ready),
        "PodScheduled": _condition(True),
    }
    generation = pod["metadata"].get("generation")
    for kind, condition in found.items():
        before = old.get(kind, {})
        same = before.get("status") == condition["status"]
        moved = before.get("lastTransitionTime") if same else None
        condition |= {"type": kind, "lastTransitionTime": moved or pods.timestamp(now)}
        if generation:
            condition["observedGeneration"] = generation
    return list(found.values())


def _condition(holds: bool, reason: str | None = None, message: str | None = None) -> Json:
    # None removes a field in a merge patch, so that an old reason does not outlive its cause.
    return {"status": "True" if holds else "False", "reason": reason, "message": message}


def _initialized(states: States, phase: str) -> Json:
    if phase == "Succeeded":
        return _condition(True, "PodCompleted")
    # A pod that failed because its node was lost had been initialized; one that goes on starts over.
    ran = phase == "Failed" and any(s.run for s in states.values() if s.kind is Kind.MAIN)
    rest = [] if ran or initialized(states) else incomplete(states)
    return _condition(
        not rest,
        "ContainersNotInitialized" if rest else None,
        f"containers with incomplete status: [{' '.join(rest)}]" if rest else None,
    )


def _containers_ready(states: States, phase: str) -> Json:
    if phase in ("Succeeded", "Failed"):
        return _condition(False, "PodCompleted" if phase == "Succeeded" else "PodFailed")
    unready = [s.name for s in states.values() if s.kind is not Kind.INIT and not s.ready]
    return _condition(
        not unready,
        "ContainersNotReady" if unready else None,
        f"containers with unready status: [{' '.join(unready)}]" if unready else None,
    )


def _gated(pod: Mapping[str, Any], conditions: Mapping[str, Json], containers_ready: Json) -> Json:
    """Ready is the containers' readiness and every readiness gate."""
    gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates") or ()]
    closed = [gate for gate in gates if conditions.get(gate, {}).get("status") != "True"]
    if containers_ready["status"] != "True" or not closed:
        return dict(containers_ready)
    return _condition(False, "ReadinessGatesNotReady", f"the status of pod readiness gate {closed} is not True")


def differs(wanted: Any, there: Any) -> bool:
    """Whether the API server's copy lacks something of what is wanted; None is wanted absent."""
    if isinstance(wanted, dict) and wanted:
        return not isinstance(there, dict) or any(differs(value, there.get(key)) for key, value in wanted.items())
    if isinstance(wanted, list):
        if not isinstance(there, list):
            return bool(wanted)
        if all(isinstance(entry, dict) and "type" in entry for entry in wanted):  # conditions: others have theirs
            by_type = {entry.get("type"): entry for entry in there}
            return any(differs(entry, by_type.get(entry["type"])) for entry in wanted)
        return len(wanted) != len(there) or any(differs(a, b) for a, b in zip(wanted, there, strict=True))
    return bool(wanted != there) and not (wanted in (None, "", {}) and there in (None, "", {}))
