"""Pods that are odd rather than broken: what they do must have an end, and leave nothing behind."""

from __future__ import annotations

from devcluster.node.space import Space, phase, shell, sleeper, state

pytest_plugins = ["devcluster.testing", "devcluster.node.testing"]
FALL_BACK = {"terminationMessagePolicy": "FallbackToLogsOnError"}


def here(space: Space) -> list[str]:
    """Give the pods of this namespace that the agent still keeps."""
    nodes = space.nodes.state()["nodes"].values()
    return [name for node in nodes for name in node["pods"] if name.startswith(f"{space.name}/")]


def test_pods_deleted_without_grace_are_forgotten(space: Space) -> None:
    """A deletion that the API server does not wait with ends the processes, and the agent's work on each pod."""
    names = [f"p{number}" for number in range(8)]
    for name in names:
        space.pod(name, sleeper(), terminationGracePeriodSeconds=0)
    for name in names:
        space.until_pod(name, lambda pod: phase(pod) == "Running")
    for name in names:
        space.delete("Pod", name, gracePeriodSeconds=0)
    space.until(lambda: here(space), lambda found: not found)


def test_a_progress_bar_is_an_end_of_a_log(space: Space) -> None:
    """Carriage returns in the last words of a program that failed are part of its message."""
    space.pod("p", shell("main", r"printf '10%%\r20%%\nboom\n'; exit 3", **FALL_BACK), restartPolicy="Never")
    pod = space.until_pod("p", lambda pod: phase(pod) == "Failed")
    assert state(pod, "main")["state"]["terminated"]["message"] == "10%\r20%\nboom\n"


def test_a_long_last_line_is_an_end_of_a_log(space: Space) -> None:
    """Of a last line that is longer than any message the end is kept; the log has it in parts."""
    script = "head -c 200000 /dev/zero | tr '\\0' a; printf x; exit 1"
    space.pod("p", shell("main", script, **FALL_BACK), restartPolicy="Never")
    pod = space.until_pod("p", lambda pod: phase(pod) == "Failed")
    message = state(pod, "main")["state"]["terminated"]["message"]
    assert message.endswith("x\n")
    assert message.count("a") > 1000


def test_a_sub_path_that_is_a_loop(space: Space) -> None:
    """It keeps the container from starting, with a reason, and the pod can be deleted."""
    mount = {"name": "v", "mountPath": "/v"}
    space.pod(
        "p",
        shell("prepare", "ln -s loop /v/loop", init=True, volumeMounts=[mount]),
        sleeper(volumeMounts=[{**mount, "subPath": "loop"}]),
        volumes=[{"name": "v", "emptyDir": {}}],
    )
    pod = space.until_pod("p", lambda pod: "waiting" in state(pod, "main").get("state", {}) and _reason(pod))
    assert "leads nowhere" in state(pod, "main")["state"]["waiting"]["message"]
    space.delete("Pod", "p")
    space.until_gone("Pod", "p")


def _reason(pod: dict[str, object]) -> bool:
    return state(pod, "main")["state"]["waiting"].get("reason") == "CreateContainerConfigError"
