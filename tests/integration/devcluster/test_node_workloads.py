"""The real controllers and the real scheduler get along with the nodes: Deployments, Jobs, GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from devcluster.node.space import Space, is_true, phase, pod_spec, shell, sleeper, state

pytest_plugins = ["devcluster.testing", "devcluster.node.testing"]
GPU = {"limits": {"nvidia.com/gpu": "1"}}
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def deployment(space: Space, script: dict[str, Any], replicas: int = 3) -> None:
    """Create the Deployment `web`."""
    labels = {"app": "web"}
    space.create(
        "Deployment",
        "web",
        spec={
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod_spec(script)},
        },
    )


def job(space: Space, script: str, *, container: dict[str, Any] | None = None, pod: Any = None, **spec: Any) -> None:
    """Create the Job `work`."""
    template = {"spec": pod_spec(shell("work", script, **(container or {})), restartPolicy="Never", **(pod or {}))}
    space.create("Job", "work", spec={"template": template, "backoffLimit": 1, **spec})


def test_deployment_becomes_available(space: Space) -> None:
    """Three pods, each with an address of its own."""
    deployment(space, sleeper())
    found = space.until(lambda: space.get("Deployment", "web"), lambda d: d["status"].get("availableReplicas") == 3)
    assert is_true(found, "Available")
    pods = space.list("Pod")
    assert len({pod["status"]["podIP"] for pod in pods}) == 3
    assert all(pod["status"]["podIP"].startswith("127.") for pod in pods)
    assert all(pod["status"]["observedGeneration"] == pod["metadata"]["generation"] for pod in pods)
    assert {pod["spec"]["nodeName"] for pod in pods} == {"node-cpu"}


def test_rolling_update(space: Space) -> None:
    """A new template replaces every pod, and no pod of the old one is left."""
    deployment(space, sleeper(), replicas=2)
    space.until(lambda: space.get("Deployment", "web"), lambda d: d["status"].get("availableReplicas") == 2)
    before = {pod["metadata"]["uid"] for pod in space.list("Pod")}
    space.access.kubectl("set", "env", "-n", space.name, "deployment/web", "VERSION=2")
    space.access.kubectl("rollout", "status", "-n", space.name, "deployment/web", "--timeout=30s")
    pods = space.until(lambda: space.list("Pod"), lambda pods: len(pods) == 2)
    assert not before & {pod["metadata"]["uid"] for pod in pods}
    assert space.run(pods[0]["metadata"]["name"], "main", "sh", "-c", "echo $VERSION") == "2"


def test_job_succeeds_and_reports(space: Space) -> None:
    """The Job is complete, and its pod carries the termination message."""
    job(space, 'printf "{\\"bytes\\": 7}" > /dev/termination-log')
    space.until(lambda: space.get("Job", "work"), lambda found: is_true(found, "Complete"))
    pod = space.list("Pod")[0]
    assert phase(pod) == "Succeeded"
    end = state(pod, "work")["state"]["terminated"]
    assert (end["exitCode"], end["reason"], end["message"]) == (0, "Completed", '{"bytes": 7}')


def test_job_with_bad_input_is_not_tried_again(space: Space) -> None:
    """Exit 42 under podFailurePolicy FailJob fails the Job at once."""
    rule = {"action": "FailJob", "onExitCodes": {"containerName": "work", "operator": "In", "values": [42]}}
    job(space, "exit 42", podFailurePolicy={"rules": [rule]}, backoffLimit=6)
    found = space.until(lambda: space.get("Job", "work"), lambda found: is_true(found, "Failed"))
    failed = next(c for c in found["status"]["conditions"] if c["type"] == "Failed")
    assert failed["reason"] == "PodFailurePolicy"
    assert "exit code 42" in failed["message"]
    assert [state(pod, "work")["state"]["terminated"]["exitCode"] for pod in space.list("Pod")] == [42]


def test_job_falls_back_to_its_log(space: Space) -> None:
    """FallbackToLogsOnError: the end of the log stands in for a message that was not written."""
    fall_back = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    job(space, "echo first; echo last words >&2; exit 3", container=fall_back, backoffLimit=0)
    space.until(lambda: space.get("Job", "work"), lambda found: is_true(found, "Failed"))
    end = state(space.list("Pod")[0], "work")["state"]["terminated"]
    assert (end["exitCode"], end["reason"], end["message"]) == (3, "Error", "first\nlast words\n")


def test_job_with_a_sidecar_completes(space: Space) -> None:
    """A sidecar neither keeps a Job from completing nor spoils it by how it ends."""
    template = pod_spec(
        shell("side", "trap 'exit 9' TERM; while :; do sleep 1000 & wait $!; done", init=True, restartPolicy="Always"),
        shell("work", "true"),
        restartPolicy="Never",
    )
    space.create("Job", "work", spec={"template": {"spec": template}, "backoffLimit": 0})
    space.until(lambda: space.get("Job", "work"), lambda found: is_true(found, "Complete"))
    assert state(space.list("Pod")[0], "side")["state"]["terminated"]["exitCode"] == 9


def test_gpu_job_lands_on_the_gpu_node(space: Space) -> None:
    """The real scheduler places it by its limit and its toleration."""
    selector = {"nvidia.com/gpu.present": "true"}
    job(space, "true", container={"resources": GPU}, pod={"tolerations": [TOLERATION], "nodeSelector": selector})
    space.until(lambda: space.get("Job", "work"), lambda found: is_true(found, "Complete"))
    assert space.list("Pod")[0]["spec"]["nodeName"] == "node-gpu"


def test_pod_without_toleration_stays_off_the_gpu_node(space: Space) -> None:
    """It is pending, and the scheduler says why."""
    space.pod("p", sleeper(resources=GPU))

    def scheduled(pod: dict[str, Any]) -> dict[str, Any]:
        return next((c for c in pod["status"].get("conditions") or () if c["type"] == "PodScheduled"), {})

    pod = space.until_pod("p", lambda pod: scheduled(pod).get("reason") == "Unschedulable")
    assert "untolerated taint" in scheduled(pod)["message"]
    assert phase(pod) == "Pending"


@pytest.mark.parametrize("policy", ["Never", "OnFailure"])
def test_active_deadline(space: Space, policy: str) -> None:
    """An overdue pod fails with the kubelet's reason."""
    space.pod("p", sleeper(), restartPolicy=policy, activeDeadlineSeconds=1)
    pod = space.until_pod("p", lambda pod: phase(pod) == "Failed")
    assert pod["status"]["reason"] == "DeadlineExceeded"
