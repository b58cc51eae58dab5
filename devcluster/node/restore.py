"""What to believe of a pod whose processes are gone because the agent or its node was.

The API server's status is all that is left. As after a kubelet's reboot, what ran is taken to have
ended with 255 and the restart policy decides; containers that had ended stay so; init containers of a
pod that goes on run again, since its memory volumes are empty now. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from devcluster.node import pods
from devcluster.node.pods import Json, Kind
from devcluster.node.states import Phase, Run, State, fresh

LOST = 255
LOST_MESSAGE = "The container's process was gone when the node agent looked for it"


def restored(pod: Mapping[str, Any], now: float) -> dict[str, State]:
    """The states of a pod's containers as its status tells them."""
    status = pod.get("status") or {}
    reported = {
        entry["name"]: entry
        for entry in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    }
    states = {
        name: _from_status(state, reported[name], now) if name in reported else state
        for name, state in fresh(pod).items()
    }
    goes_on = pods.restart_policy(pod) != "Never" or not any(s.run for s in states.values() if s.kind is Kind.MAIN)
    if not goes_on:
        return states
    return {name: _again(state) if state.kind is not Kind.MAIN else state for name, state in states.items()}


def _from_status(state: State, entry: Json, now: float) -> State:
    """One container: its last run, and the one before."""
    current, last = entry.get("state") or {}, entry.get("lastState") or {}
    before = _terminated(last["terminated"]) if "terminated" in last else None
    state = replace(state, restarts=int(entry.get("restartCount") or 0), restored=True)
    if "terminated" in current:
        return replace(state, phase=Phase.ENDED, run=_terminated(current["terminated"]), previous=before)
    if "running" in current:
        lost = Run(
            id=_bare_id(entry.get("containerID")),
            started_at=pods.seconds(current["running"]["startedAt"]),
            finished_at=now,
            exit_code=LOST,
            reason="Unknown",
            message=LOST_MESSAGE,
        )
        return replace(state, phase=Phase.ENDED, run=lost, previous=before)
    # Waiting: for its first start, or in a back-off, which is then forgotten.
    return replace(state, phase=Phase.ENDED if before else Phase.NEW, run=before)


def _again(state: State) -> State:
    """An init container or sidecar that has to run again, unless it must stand as failed."""
    failed_for_good = state.kind is Kind.INIT and state.phase is Phase.ENDED and not state.succeeded
    return state if failed_for_good else replace(state, phase=Phase.NEW)


def _terminated(entry: Json) -> Run:
    started = entry.get("startedAt")
    finished = entry.get("finishedAt")
    return Run(
        id=_bare_id(entry.get("containerID")),
        started_at=pods.seconds(started) if started else 0.0,
        finished_at=pods.seconds(finished) if finished else 0.0,
        exit_code=int(entry["exitCode"]),
        reason=str(entry.get("reason") or ""),
        message=str(entry.get("message") or ""),
    )


def _bare_id(container_id: str | None) -> str:
    return (container_id or "").rpartition("://")[2]
