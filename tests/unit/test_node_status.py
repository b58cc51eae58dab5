"""The status a pod is given, and what is believed of one whose processes are gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from devcluster.node import states
from devcluster.node.backoff import BackoffRule
from devcluster.node.ending import Cause, Ending
from devcluster.node.podstatus import Place, differs, pod_status
from devcluster.node.restore import LOST, restored
from devcluster.node.states import Backoff, Phase, Problem, Run, State

NOW = 1000.0
STAMP = "1970-01-01T00:16:40Z"
RULE = BackoffRule()
PLACE = Place("127.0.0.1", "127.64.0.2")
DELETED = Ending(Cause.DELETED, NOW, NOW + 30)
COMPLETE = Ending(Cause.COMPLETE, NOW, NOW + 30)


def pod(policy: str = "Always", **containers: str) -> dict[str, Any]:
    """Make a pod; each container's value is its kind."""
    entries: dict[str, list[dict[str, Any]]] = {"init": [], "main": []}
    for name, kind in containers.items():
        spec = {"name": name, "image": f"{name}:1"} | ({"restartPolicy": "Always"} if kind == "side" else {})
        entries["main" if kind == "main" else "init"].append(spec)
    return {
        "metadata": {"name": "p", "namespace": "n", "uid": "u", "generation": 3},
        "spec": {"initContainers": entries["init"], "containers": entries["main"], "restartPolicy": policy},
        "status": {"phase": "Pending"},
    }


def put(state: State, how: str) -> State:
    """Put a container into a state."""
    run = Run("id", NOW - 10)
    if how == "new":
        return state
    if how in ("up", "ready"):
        return replace(state, phase=Phase.RUNNING, run=run, started=True, ready=how == "ready")
    if how == "running":
        return replace(state, phase=Phase.RUNNING, run=run)
    code = int(how.removeprefix("exit"))
    run = replace(run, finished_at=NOW - 1, exit_code=code, reason="Error" if code else "Completed")
    return replace(state, phase=Phase.ENDED, run=run)


def status(
    subject: dict[str, Any], end: Ending | None = None, place: Place = PLACE, **how: str | State
) -> dict[str, Any]:
    """Give the status of a pod whose containers are in these states."""
    found = states.fresh(subject)
    for name, state in how.items():
        found[name] = state if isinstance(state, State) else put(found[name], state)
    return pod_status(subject, found, NOW, end, RULE, place)


def conditions(found: dict[str, Any]) -> dict[str, str]:
    """Give the conditions by type."""
    return {c["type"]: c["status"] for c in found["conditions"]}


ONE, NEVER = pod(x="main"), pod("Never", x="main")
INIT, SIDE = pod(i="init", x="main"), pod("OnFailure", s="side", x="main")
PHASES: dict[str, tuple[dict[str, Any], Ending | None, dict[str, str], str]] = {
    "nothing has run": (ONE, None, {}, "Pending"),
    "it runs": (ONE, None, {"x": "up"}, "Running"),
    "it waits to run again": (ONE, None, {"x": "exit1"}, "Running"),
    "one of two has not run yet": (pod(x="main", y="main"), None, {"x": "up"}, "Pending"),
    "an init container runs": (INIT, None, {"i": "up"}, "Pending"),
    "an init container failed and will run again": (INIT, None, {"i": "exit1"}, "Pending"),
    "init containers are through": (INIT, None, {"i": "exit0"}, "Pending"),
    "a sidecar has not started": (SIDE, None, {"s": "running"}, "Pending"),
    "a sidecar restarts beside the main container": (SIDE, None, {"s": "exit1", "x": "up"}, "Running"),
    "sidecars still end": (SIDE, COMPLETE, {"s": "up", "x": "exit0"}, "Running"),
    "all over, well": (SIDE, COMPLETE, {"s": "exit143", "x": "exit0"}, "Succeeded"),
    "all over, badly": (NEVER, COMPLETE, {"x": "exit42"}, "Failed"),
    "an init container failed for good": (
        pod("Never", i="init", x="main"),
        Ending(Cause.INIT_FAILED, NOW, NOW),
        {"i": "exit1"},
        "Failed",
    ),
    "deleted and over, well": (ONE, DELETED, {"x": "exit0"}, "Succeeded"),
    "deleted and over, killed": (ONE, DELETED, {"x": "exit137"}, "Failed"),
    "deleted before it ran": (ONE, DELETED, {}, "Failed"),
    "deleted and still running": (ONE, DELETED, {"x": "up"}, "Running"),
    "overdue": (ONE, Ending(Cause.OVERDUE, NOW, NOW), {"x": "exit0"}, "Failed"),
    "declared by others": (ONE | {"status": {"phase": "Failed"}}, None, {"x": "up"}, "Failed"),
}


@pytest.mark.parametrize(("subject", "end", "how", "phase"), PHASES.values(), ids=PHASES.keys())
def test_phase(subject: dict[str, Any], end: Ending | None, how: dict[str, str], phase: str) -> None:
    """The phase is the kubelet's."""
    assert status(subject, end, **how)["phase"] == phase


CONDITIONS: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "nothing runs": (ONE, {}, "Initialized PodReadyToStartContainers"),
    "it runs unready": (ONE, {"x": "up"}, "Initialized PodReadyToStartContainers"),
    "it is ready": (ONE, {"x": "ready"}, "ContainersReady Initialized PodReadyToStartContainers Ready"),
    "init container runs": (INIT, {"i": "running"}, "PodReadyToStartContainers"),
    "init container is through": (INIT, {"i": "exit0"}, "Initialized PodReadyToStartContainers"),
    "sidecar counts for readiness": (SIDE, {"s": "up", "x": "ready"}, "Initialized PodReadyToStartContainers"),
    "sidecar and main are ready": (
        SIDE,
        {"s": "ready", "x": "ready"},
        "ContainersReady Initialized PodReadyToStartContainers Ready",
    ),
}


@pytest.mark.parametrize(("subject", "how", "true"), CONDITIONS.values(), ids=CONDITIONS.keys())
def test_conditions(subject: dict[str, Any], how: dict[str, str], true: str) -> None:
    """Exactly these conditions are true, besides PodScheduled."""
    found = conditions(status(subject, **how))
    assert sorted(kind for kind, value in found.items() if value == "True" and kind != "PodScheduled") == true.split()


def test_a_readiness_gate_keeps_ready_false() -> None:
    """Ready waits for the condition that somebody else sets."""
    subject = pod(x="main")
    subject["spec"]["readinessGates"] = [{"conditionType": "example.com/go"}]
    assert conditions(status(subject, x="ready"))["Ready"] == "False"
    subject["status"]["conditions"] = [{"type": "example.com/go", "status": "True"}]
    assert conditions(status(subject, x="ready"))["Ready"] == "True"


def test_a_condition_keeps_its_time_while_its_status_stays() -> None:
    """LastTransitionTime moves only with the status."""
    subject = pod(x="main")
    old = "1970-01-01T00:00:07Z"
    subject["status"]["conditions"] = [
        {"type": "Ready", "status": "False", "lastTransitionTime": old},
        {"type": "Initialized", "status": "False", "lastTransitionTime": old},
    ]
    times = {c["type"]: c["lastTransitionTime"] for c in status(subject, x="up")["conditions"]}
    assert (times["Ready"], times["Initialized"]) == (old, STAMP)


def test_a_running_container() -> None:
    """Everything the kubelet says of a container that runs for the second time."""
    before = Run("old", NOW - 50, NOW - 20, 3, "Error", "words")
    state = replace(put(states.fresh(ONE)["x"], "ready"), previous=before, restarts=1)
    assert status(ONE, x=state)["containerStatuses"] == [
        {
            "name": "x",
            "image": "x:1",
            "imageID": "process://x:1",
            "containerID": "process://id",
            "ready": True,
            "started": True,
            "restartCount": 1,
            "state": {"running": {"startedAt": "1970-01-01T00:16:30Z"}},
            "lastState": {
                "terminated": {
                    "exitCode": 3,
                    "reason": "Error",
                    "message": "words",
                    "startedAt": "1970-01-01T00:15:50Z",
                    "finishedAt": STAMP.replace("16:40", "16:20"),
                    "containerID": "process://old",
                }
            },
        }
    ]


def test_a_container_in_back_off() -> None:
    """CrashLoopBackOff with the last run as lastState."""
    state = replace(put(states.fresh(ONE)["x"], "exit1"), backoff=Backoff(4, NOW - 1), restarts=2)
    entry = status(ONE, x=state)["containerStatuses"][0]
    assert entry["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert entry["state"]["waiting"]["message"] == "back-off 4s restarting failed container=x pod=p_n(u)"
    assert entry["lastState"]["terminated"]["exitCode"] == 1
    assert (entry["ready"], entry["started"]) == (False, False)


@pytest.mark.parametrize(
    ("how", "reason"), [({}, "PodInitializing"), ({"i": "exit0"}, "ContainerCreating")], ids=["held up", "its turn"]
)
def test_a_container_that_has_not_run(how: dict[str, str], reason: str) -> None:
    """Waiting says for what."""
    assert status(INIT, **how)["containerStatuses"][0]["state"] == {"waiting": {"reason": reason}}


def test_a_container_with_a_problem() -> None:
    """The reason stands in the status, as `kubectl get pods` shows it."""
    state = states.blocked(states.fresh(ONE)["x"], Problem("ImagePullBackOff", "no such image", NOW + 1))
    waiting = status(ONE, x=state)["containerStatuses"][0]["state"]["waiting"]
    assert waiting == {"reason": "ImagePullBackOff", "message": "no such image"}


def test_addresses_come_with_the_volumes() -> None:
    """No pod IP before the pod is prepared; the host's from the start."""
    found = status(ONE, place=Place("127.0.0.1", None))
    assert "podIP" not in found
    assert found["hostIP"] == "127.0.0.1"
    assert conditions(found)["PodReadyToStartContainers"] == "False"
    assert status(ONE)["podIPs"] == [{"ip": "127.64.0.2"}]


def test_generation_and_start() -> None:
    """ObservedGeneration is the pod's, startTime stays once it is set."""
    subject = pod(x="main")
    assert status(subject)["observedGeneration"] == 3
    assert status(subject)["startTime"] == STAMP
    subject["status"]["startTime"] = "1970-01-01T00:00:01Z"
    assert status(subject)["startTime"] == "1970-01-01T00:00:01Z"


DIFFERENCES = {
    "equal": ({"a": 1}, {"a": 1}, False),
    "the server has more": ({"a": 1}, {"a": 1, "b": 2}, False),
    "another value": ({"a": 1}, {"a": 2}, True),
    "missing": ({"a": 1}, {}, True),
    "wanted absent and absent": ({"a": None}, {}, False),
    "wanted absent and there": ({"a": None}, {"a": "x"}, True),
    "empty equals absent": ({"a": {}}, {}, False),
    "conditions of others": (
        {"c": [{"type": "A", "status": "True"}]},
        {"c": [{"type": "B"}, {"type": "A", "status": "True"}]},
        False,
    ),
    "a condition is missing": ({"c": [{"type": "A", "status": "True"}]}, {"c": []}, True),
    "a list is shorter": ({"c": [{"name": "x"}]}, {"c": [{"name": "x"}, {"name": "y"}]}, True),
    "state running, waiting there": ({"running": {"startedAt": "t"}}, {"waiting": {"reason": "r"}}, True),
}


@pytest.mark.parametrize(("wanted", "there", "result"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_differs(wanted: Any, there: Any, result: bool) -> None:
    """A status is written only if the server lacks something of it."""
    assert differs(wanted, there) is result


def reported(subject: dict[str, Any], **how: str | State) -> dict[str, Any]:
    """Give a pod with the status of containers in these states."""
    return subject | {"status": status(subject, **how)}


def test_a_lost_pod_starts_over() -> None:
    """What ran is gone with 255; init containers and sidecars run again before it."""
    subject = reported(pod(i="init", s="side", x="main"), i="exit0", s="ready", x="ready")
    found = restored(subject, NOW)
    assert {name: state.phase for name, state in found.items()} == {"i": Phase.NEW, "s": Phase.NEW, "x": Phase.ENDED}
    assert found["x"].run is not None
    assert (found["x"].run.exit_code, found["x"].run.id, found["x"].restored) == (LOST, "id", True)


def test_a_lost_never_pod_fails() -> None:
    """A pod that may not restart has failed; nothing of it runs again."""
    found = restored(reported(pod("Never", i="init", x="main"), i="exit0", x="ready"), NOW)
    assert {name: state.phase for name, state in found.items()} == {"i": Phase.ENDED, "x": Phase.ENDED}


def test_what_had_ended_stays_ended() -> None:
    """Exit codes, counts and messages survive in the API server."""
    done = replace(put(states.fresh(ONE)["x"], "exit0"), restarts=4)
    found = restored(reported(pod("OnFailure", x="main"), x=done), NOW)["x"]
    assert (found.phase, found.restarts, found.succeeded) == (Phase.ENDED, 4, True)


def test_a_pod_without_status_is_fresh() -> None:
    """A pod that this node has never touched starts from nothing."""
    assert restored(ONE, NOW) == {"x": State("x", states.Kind.MAIN)}
