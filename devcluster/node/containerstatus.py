"""One container's entry in a pod's status, as the kubelet writes it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from devcluster.node import pods
from devcluster.node.backoff import BackoffRule
from devcluster.node.plan import restart_at
from devcluster.node.pods import Json, Kind
from devcluster.node.states import Phase, Run, State

RUNTIME = "process"  # the scheme of container ids and images: no image was ever pulled


def container_status(
    pod: Mapping[str, Any],
    spec: Mapping[str, Any],
    state: State,
    now: float,
    *,
    rule: BackoffRule,
    held_up: bool,
    ending: bool,
) -> Json:
    """The entry of one container; `held_up` if init containers stand before it."""
    current, last = _states(pod, state, now, rule, held_up=held_up, ending=ending)
    known = state.previous if state.phase is Phase.STARTING else state.run
    entry: Json = {
        "name": state.name,
        "image": spec.get("image", ""),
        "imageID": f"{RUNTIME}://{spec.get('image', '')}" if known else "",
        "ready": state.succeeded if state.kind is Kind.INIT else state.ready,
        "started": state.started,
        "restartCount": state.restarts,
        "state": current,
        "lastState": {"terminated": terminated(last)} if last else {},
    }
    if known:
        entry["containerID"] = f"{RUNTIME}://{known.id}"
    return entry


def _states(
    pod: Mapping[str, Any], state: State, now: float, rule: BackoffRule, *, held_up: bool, ending: bool
) -> tuple[Json, Run | None]:
    """`state` and the run that `lastState` tells of."""
    run = state.run
    if state.phase is Phase.RUNNING and run:
        return {"running": {"startedAt": pods.timestamp(run.started_at)}}, state.previous
    if state.problem and not ending:
        return waiting(state.problem.reason, state.problem.message), run
    if state.phase is Phase.ENDED and run:
        at = restart_at(state, pods.restart_policy(pod), rule)
        if ending or at is None or at <= now:
            return {"terminated": terminated(run)}, state.previous
        message = (
            f"back-off {at - (run.finished_at or 0.0):g}s restarting failed container={state.name} "
            f"pod={pods.name(pod)}_{pods.namespace(pod)}({pods.uid(pod)})"
        )
        return waiting("CrashLoopBackOff", message), run
    last = state.previous if state.phase is Phase.STARTING else run
    return waiting("PodInitializing" if held_up else "ContainerCreating"), last


def waiting(reason: str, message: str = "") -> Json:
    """A state: not running yet, or not again."""
    return {"waiting": {"reason": reason, "message": message} if message else {"reason": reason}}


def terminated(run: Run) -> Json:
    """A state: how a run ended."""
    entry: Json = {
        "exitCode": run.exit_code,
        "reason": run.reason,
        "startedAt": pods.timestamp(run.started_at),
        "finishedAt": pods.timestamp(run.finished_at or run.started_at),
        "containerID": f"{RUNTIME}://{run.id}",
    }
    if run.message:
        entry["message"] = run.message
    return entry
