"""What is done with a pod's containers, as tables: order, gates, restarts, the order of the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from devcluster.node import states
from devcluster.node.backoff import BackoffRule
from devcluster.node.ending import Cause, Ending, ending
from devcluster.node.plan import Plan, Stop, plan
from devcluster.node.states import Backoff, Phase, Problem, Run, State, Unhealthy

NOW = 1000.0
RULE = BackoffRule(base=1, cap=8)


def pod(*containers: str, policy: str = "Always", grace: int = 30, **metadata: Any) -> dict[str, Any]:
    """Make a pod of containers named by kind: `init-…`, `side-…` and whatever else."""
    specs: list[dict[str, Any]] = [{"name": name} for name in containers]
    for spec in specs:
        if spec["name"].startswith("side"):
            spec["restartPolicy"] = "Always"
    first = [spec for spec in specs if spec["name"].startswith(("init", "side"))]
    return {
        "metadata": {"name": "p", "namespace": "n", "uid": "u", **metadata},
        "spec": {
            "initContainers": first,
            "containers": [spec for spec in specs if spec not in first],
            "restartPolicy": policy,
            "terminationGracePeriodSeconds": grace,
        },
    }


def made(subject: dict[str, Any], **how: str | State) -> dict[str, State]:
    """Put containers into states: `up` is running and started, `exitN` has ended with N."""
    result = states.fresh(subject)
    for name, state in how.items():
        key = name.replace("_", "-")
        result[key] = state if isinstance(state, State) else put(result[key], state)
    return result


def put(state: State, how: str) -> State:
    """Put one container into a state."""
    run = Run("id", NOW - 100)
    if how == "starting":
        return replace(state, phase=Phase.STARTING, run=run)
    if how in ("up", "running"):
        return replace(state, phase=Phase.RUNNING, run=run, started=how == "up", ready=how == "up")
    code = int(how.removeprefix("exit"))
    return replace(state, phase=Phase.ENDED, run=replace(run, finished_at=NOW, exit_code=code))


TWO_INITS = pod("init-a", "init-b", "main")
GATED = pod("init-a", "side", "init-b", "main")
STARTS = {
    "a pod without init containers starts all at once": (pod("x", "y"), {}, ("x", "y")),
    "the first init container starts alone": (TWO_INITS, {}, ("init-a",)),
    "nothing starts while an init container runs": (TWO_INITS, {"init_a": "up"}, ()),
    "the next init container follows a success": (TWO_INITS, {"init_a": "exit0"}, ("init-b",)),
    "a failed init container starts again": (TWO_INITS, {"init_a": "exit1"}, ("init-a",)),
    "the main container follows the last init container": (
        TWO_INITS,
        {"init_a": "exit0", "init_b": "exit0"},
        ("main",),
    ),
    "a sidecar starts after the init container before it": (GATED, {"init_a": "exit0"}, ("side",)),
    "a sidecar that runs but has not started holds the rest": (GATED, {"init_a": "exit0", "side": "running"}, ()),
    "a sidecar that has started lets the rest go": (GATED, {"init_a": "exit0", "side": "up"}, ("init-b",)),
    "a sidecar that ended well starts again all the same": (GATED, {"init_a": "exit0", "side": "exit0"}, ("side",)),
    "sidecar and main start again side by side once initialized": (
        GATED,
        {"init_a": "exit0", "side": "exit1", "init_b": "exit0", "main": "exit1"},
        ("side", "main"),
    ),
    "a sidecar that starts again does not hold up the main container": (
        GATED,
        {"init_a": "exit0", "side": "running", "init_b": "exit0", "main": "exit1"},
        ("main",),
    ),
    "init containers are not run again for a main container": (
        TWO_INITS,
        {"init_a": "exit1", "init_b": "exit1", "main": "up"},
        (),
    ),
    "what runs is left alone": (pod("x", "y"), {"x": "up"}, ("y",)),
    "what is being started is left alone": (pod("x"), {"x": "starting"}, ()),
    "Always restarts a success": (pod("x"), {"x": "exit0"}, ("x",)),
    "OnFailure restarts a failure": (pod("x", policy="OnFailure"), {"x": "exit3"}, ("x",)),
    "OnFailure leaves a success": (pod("x", "y", policy="OnFailure"), {"x": "exit0", "y": "up"}, ()),
    "Never leaves a failure": (pod("x", "y", policy="Never"), {"x": "exit3", "y": "up"}, ()),
}


@pytest.mark.parametrize(("subject", "how", "start"), STARTS.values(), ids=STARTS.keys())
def test_what_starts(subject: dict[str, Any], how: dict[str, str], start: tuple[str, ...]) -> None:
    """Exactly the containers whose turn it is start."""
    assert plan(subject, made(subject, **how), NOW, None, RULE).start == start


def test_restored_main_container_waits_for_the_init_containers() -> None:
    """After a reboot the order begins anew, although the main container ran before."""
    subject = pod("init-a", "main")
    lost = replace(put(states.fresh(subject)["main"], "exit255"), restored=True)
    assert plan(subject, made(subject, main=lost), NOW, None, RULE).start == ("init-a",)


def test_back_off_delays_a_restart_and_says_when() -> None:
    """A container in back-off is not started, and the plan asks to be made again when it may be."""
    subject = pod("x")
    ended = replace(put(states.fresh(subject)["x"], "exit1"), backoff=Backoff(4, NOW - 1))
    assert plan(subject, {"x": ended}, NOW, None, RULE) == Plan(wake_at=NOW + 4)
    assert plan(subject, {"x": ended}, NOW + 4, None, RULE).start == ("x",)


def test_a_problem_is_tried_again_at_its_time() -> None:
    """What could not be started is not tried in a loop."""
    subject = pod("x")
    stuck = states.blocked(states.fresh(subject)["x"], Problem("CreateContainerConfigError", "no", NOW + 1))
    assert plan(subject, {"x": stuck}, NOW, None, RULE) == Plan(wake_at=NOW + 1)


def test_back_off_grows_from_nothing_to_its_cap_and_is_forgotten() -> None:
    """No delay for the first restart, then base, doubled up to the cap; a long good run clears it."""
    delays, backoff, finished = [], None, NOW
    for _ in range(7):
        at = RULE.restart_at(backoff, finished)
        delays.append(at - finished)
        backoff = RULE.after_restart(backoff, finished, at)
        finished = at
    assert delays == [0, 1, 2, 4, 8, 8, 8]
    assert RULE.restart_at(backoff, finished + 17) == finished + 17
    assert RULE.after_restart(backoff, finished + 17, finished + 17) == Backoff(1, finished + 17)


@pytest.mark.parametrize(("own", "grace"), [(None, 30), (5, 5)], ids=["the pod's grace", "the probe's grace"])
def test_an_unhealthy_container_is_stopped_alone(own: float | None, grace: float) -> None:
    """A probe's verdict stops one container, and once."""
    subject = pod("x", "y")
    sick = replace(put(states.fresh(subject)["x"], "up"), unhealthy=Unhealthy("sick", own))
    assert plan(subject, made(subject, x=sick, y="up"), NOW, None, RULE).stop == (Stop("x", NOW + grace, "sick"),)
    told = replace(sick, stop_by=NOW + grace)
    assert plan(subject, made(subject, x=told, y="up"), NOW, None, RULE).stop == ()


ENDS = {
    "a running pod does not end": (pod("x"), {"x": "up"}, None),
    "Always never completes": (pod("x"), {"x": "exit0"}, None),
    "Never completes": (pod("x", policy="Never"), {"x": "exit7"}, Cause.COMPLETE),
    "OnFailure completes with success": (pod("x", policy="OnFailure"), {"x": "exit0"}, Cause.COMPLETE),
    "OnFailure goes on after failure": (pod("x", policy="OnFailure"), {"x": "exit1"}, None),
    "all main containers must be over": (pod("x", "y", policy="Never"), {"x": "exit0", "y": "up"}, None),
    "a sidecar that runs does not keep the pod": (
        pod("side", "x", policy="Never"),
        {"side": "up", "x": "exit0"},
        Cause.COMPLETE,
    ),
    "a failed init container ends a Never pod": (
        pod("init-a", "x", policy="Never"),
        {"init_a": "exit1"},
        Cause.INIT_FAILED,
    ),
    "a failed init container does not end others": (pod("init-a", "x", policy="OnFailure"), {"init_a": "exit1"}, None),
    "a deleted pod ends": (
        pod("x", deletionTimestamp="t", deletionGracePeriodSeconds=9),
        {"x": "up"},
        Cause.DELETED,
    ),
    "a pod declared over ends": (pod("x") | {"status": {"phase": "Failed"}}, {"x": "up"}, Cause.DECLARED),
}


@pytest.mark.parametrize(("subject", "how", "cause"), ENDS.values(), ids=ENDS.keys())
def test_why_a_pod_ends(subject: dict[str, Any], how: dict[str, str], cause: Cause | None) -> None:
    """A pod ends for each of the kubelet's reasons and for no other."""
    end = ending(subject, made(subject, **how), NOW, None)
    assert (end.cause if end else None) == cause


def test_active_deadline() -> None:
    """A pod is overdue from its deadline on, counted from its start time, and the plan wakes up for it."""
    subject = pod("x") | {"status": {"startTime": "1970-01-01T00:16:40Z"}}
    subject["spec"]["activeDeadlineSeconds"] = 10
    running = made(subject, x="up")
    assert ending(subject, running, NOW + 9, None) is None
    assert plan(subject, running, NOW + 9, None, RULE).wake_at == NOW + 10
    end = ending(subject, running, NOW + 10, None)
    assert end == Ending(Cause.OVERDUE, NOW + 10, NOW + 40)


def test_a_deletion_can_only_hasten_the_end() -> None:
    """The known end stands; a shorter grace brings the deadline nearer, a longer one does not put it off."""
    subject = pod("x", deletionTimestamp="t", deletionGracePeriodSeconds=20)
    running = made(subject, x="up")
    first = ending(subject, running, NOW, None)
    assert first == Ending(Cause.DELETED, NOW, NOW + 20)
    subject["metadata"]["deletionGracePeriodSeconds"] = 1
    assert ending(subject, running, NOW + 5, first) == Ending(Cause.DELETED, NOW, NOW + 1)
    overdue = Ending(Cause.OVERDUE, NOW, NOW + 3)
    subject["metadata"]["deletionGracePeriodSeconds"] = 60
    assert ending(subject, running, NOW + 1, overdue) == Ending(Cause.DELETED, NOW + 1, NOW + 3)


FULL = pod("side-a", "side-b", "x", "y")
END = Ending(Cause.DELETED, NOW, NOW + 10)
STOPS = {
    "main containers first, together": (
        {"side_a": "up", "side_b": "up", "x": "up", "y": "up"},
        NOW,
        {"x": NOW + 10, "y": NOW + 10},
    ),
    "sidecars wait for the last main container": (
        {"side_a": "up", "side_b": "up", "x": "exit0", "y": "up"},
        NOW,
        {"y": NOW + 10},
    ),
    "then the last sidecar": (
        {"side_a": "up", "side_b": "up", "x": "exit0", "y": "exit0"},
        NOW + 1,
        {"side-b": NOW + 10},
    ),
    "then the first": ({"side_a": "up", "side_b": "exit0", "x": "exit0", "y": "exit0"}, NOW + 1, {"side-a": NOW + 10}),
    "a sidecar whose turn comes late gets two seconds": (
        {"side_a": "up", "side_b": "exit0", "x": "exit0", "y": "exit0"},
        NOW + 9.5,
        {"side-a": NOW + 11.5},
    ),
    "after the deadline nobody waits": (
        {"side_a": "up", "side_b": "up", "x": "up", "y": "exit0"},
        NOW + 10,
        {"side-a": NOW + 12, "side-b": NOW + 12, "x": NOW + 10},
    ),
    "what is being started is stopped too": ({"side_a": "starting"}, NOW, {"side-a": NOW + 10}),
}


@pytest.mark.parametrize(("how", "now", "stop"), STOPS.values(), ids=STOPS.keys())
def test_who_is_stopped(how: dict[str, str], now: float, stop: dict[str, float]) -> None:
    """An ending pod stops its containers in order, each by its deadline, and starts none."""
    chosen = plan(FULL, made(FULL, **how), now, END, RULE)
    assert {s.name: s.deadline for s in chosen.stop} == stop
    assert not chosen.start
    assert not chosen.over


def test_nobody_is_told_twice_but_sooner() -> None:
    """A container that was told to stop is told again only if it must be faster."""
    subject = pod("x")
    told = replace(put(states.fresh(subject)["x"], "up"), stop_by=NOW + 10)
    assert plan(subject, {"x": told}, NOW, END, RULE) == Plan(wake_at=NOW + 10)
    sooner = replace(END, deadline=NOW + 1)
    assert [s.deadline for s in plan(subject, {"x": told}, NOW, sooner, RULE).stop] == [NOW + 1]


def test_without_grace_all_die_at_once() -> None:
    """A grace of nothing leaves no order to keep."""
    how = {"side_a": "up", "side_b": "up", "x": "up", "y": "up"}
    chosen = plan(FULL, made(FULL, **how), NOW, Ending(Cause.DELETED, NOW, NOW), RULE)
    assert {s.deadline for s in chosen.stop} == {NOW}
    assert len(chosen.stop) == 4


def test_a_pod_is_over_when_nothing_runs() -> None:
    """Also one of which nothing ever ran."""
    assert plan(FULL, states.fresh(FULL), NOW, END, RULE) == Plan(over=True)
