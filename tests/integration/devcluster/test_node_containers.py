"""Containers of one pod: their order, probes, restarts, logs and end."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from devcluster.access import Access, ApiError, KubectlFailed
from devcluster.node.client import NodeError
from devcluster.node.space import Space, is_true, phase, shell, sleeper, state

pytest_plugins = ["devcluster.testing", "devcluster.node.testing"]
WEB = Path(__file__).with_name("images") / "web.py"
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
SHARED: dict[str, Any] = {"volumes": [{"name": "v", "emptyDir": {}}]}
MOUNT: dict[str, Any] = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}


def exec_probe(command: str, **more: Any) -> dict[str, Any]:
    """Give a probe that runs a shell command every second."""
    return {"exec": {"command": ["sh", "-c", command]}, "periodSeconds": 1, **more}


def began(entry: dict[str, Any]) -> datetime:
    """Give when a container's present or last run began."""
    current = entry["state"]
    return datetime.fromisoformat((current.get("running") or current.get("terminated"))["startedAt"])


def test_init_containers_run_in_order(space: Space) -> None:
    """Each after the success of the one before; a failure is tried again."""
    once = "echo one >> /v/order; test $(wc -l < /v/order) -ge 2"  # fails the first time
    space.pod(
        "p",
        shell("one", once, init=True, **MOUNT),
        shell("two", "echo two >> /v/order", init=True, **MOUNT),
        shell("main", "echo main >> /v/order", **MOUNT),
        shell("keep", "cat /v/order; sleep 1", **MOUNT),
        restartPolicy="OnFailure",
        **SHARED,
    )
    pod = space.until_pod("p", lambda pod: phase(pod) == "Succeeded")
    assert [state(pod, name)["restartCount"] for name in ("one", "two", "main")] == [1, 0, 0]
    assert [state(pod, name)["ready"] for name in ("one", "two")] == [True, True]
    log = space.logs("p", "-c", "keep").split()
    assert log[:3] == ["one", "one", "two"]


def test_failed_init_container_ends_a_never_pod(space: Space) -> None:
    """And the main container never runs."""
    space.pod("p", shell("one", "exit 3", init=True), sleeper(), restartPolicy="Never")
    pod = space.until_pod("p", lambda pod: phase(pod) == "Failed")
    assert state(pod, "main")["state"]["waiting"]["reason"] == "PodInitializing"
    assert not is_true(pod, "Initialized")


def test_a_sidecar_gates_the_main_container_and_ends_last(space: Space) -> None:
    """The main container starts when the startup probe succeeds; at the end the sidecar sees it go first."""
    note = "trap 'echo %s >> {0}/order; exit 0' TERM; while :; do sleep 1000 & wait $!; done"
    order = space.folder / "order"
    host = {"volumes": [{"name": "v", "hostPath": {"path": str(space.folder)}}]}
    mount = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    side = note.format("/v").replace("%s", "side")
    main = note.format("/v").replace("%s", "main")
    space.pod(
        "p",
        shell("side", side, init=True, restartPolicy="Always", startupProbe=exec_probe("test -e /v/go"), **mount),
        shell("main", main, **mount),
        **host,
    )
    pod = space.until_pod("p", lambda pod: "running" in state(pod, "side").get("state", {}))
    time.sleep(1.2)  # more than one period of the probe
    pod = space.get("Pod", "p")
    assert (state(pod, "side")["started"], state(pod, "side")["restartCount"]) == (False, 0)
    assert "waiting" in state(pod, "main")["state"]
    assert phase(pod) == "Pending"
    (space.folder / "go").touch()
    pod = space.until_pod("p", lambda pod: is_true(pod, "Ready"))
    assert began(state(pod, "side")) < began(state(pod, "main"))
    space.delete("Pod", "p", gracePeriodSeconds=5)
    space.until_gone("Pod", "p")
    assert order.read_text().split() == ["main", "side"]


def test_a_sidecar_is_restarted_alone(space: Space) -> None:
    """Its end does not touch the main container."""
    space.pod("p", sleeper("side", init=True, restartPolicy="Always"), sleeper())
    space.until_pod("p", lambda pod: is_true(pod, "Ready"))
    before = space.nodes.pids(space.name, "p")
    space.nodes.kill_container(space.name, "p", "side")
    pod = space.until_pod("p", lambda pod: state(pod, "side")["restartCount"] == 1 and is_true(pod, "Ready"))
    after = space.nodes.pids(space.name, "p")
    assert before["main"] == after["main"]
    assert before["side"] != after["side"]
    assert state(pod, "side")["lastState"]["terminated"]["exitCode"] == 137


def test_liveness_failure_restarts_only_its_container(space: Space) -> None:
    """With the exit code that the program gives when it is told to stop."""
    sick = "touch /v/well; trap 'exit 7' TERM; while :; do sleep 1000 & wait $!; done"
    probe = exec_probe("test -e /v/well", failureThreshold=1)
    space.pod("p", shell("sick", sick, livenessProbe=probe, **MOUNT), sleeper("other", **MOUNT), **SHARED)
    space.until_pod("p", lambda pod: is_true(pod, "Ready"))
    space.run("p", "other", "rm", "/v/well")
    pod = space.until_pod("p", lambda pod: state(pod, "sick")["restartCount"] == 1 and is_true(pod, "Ready"))
    assert state(pod, "sick")["lastState"]["terminated"]["exitCode"] == 7
    assert state(pod, "other")["restartCount"] == 0


def test_startup_probe_that_never_succeeds(space: Space) -> None:
    """The container is restarted, and `started` stays false."""
    space.pod("p", sleeper(startupProbe=exec_probe("exit 1", failureThreshold=1)))
    pod = space.until_pod("p", lambda pod: state(pod, "main").get("restartCount"))
    assert not state(pod, "main")["started"]


def test_readiness_flips_ready(space: Space) -> None:
    """An HTTP probe against the pod's own address; nothing is restarted."""
    get = {"path": "/ready", "port": "web", "httpHeaders": [{"name": "X-Probe", "value": "yes"}]}
    web = {
        "name": "main",
        "image": "web",
        "command": ["python", "-S", str(WEB), "/v", "8080"],
        "ports": [{"name": "web", "containerPort": 8080}],
        "env": [POD_IP],
        "readinessProbe": {"httpGet": get, "periodSeconds": 1, "failureThreshold": 1},
        "livenessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
        **MOUNT,
    }
    space.pod("p", web, sleeper("other", **MOUNT), **SHARED)
    space.until_pod("p", lambda pod: "running" in state(pod, "other").get("state", {}))
    assert not is_true(space.get("Pod", "p"), "Ready")
    space.run("p", "other", "touch", "/v/ready")
    space.until_pod("p", lambda pod: is_true(pod, "Ready"))
    space.run("p", "other", "rm", "/v/ready")
    pod = space.until_pod("p", lambda pod: not is_true(pod, "Ready"))
    assert state(pod, "main")["restartCount"] == 0
    assert "/ready yes" in space.logs("p", "-c", "main")


def test_crash_loop_back_off(space: Space) -> None:
    """The first restart comes at once, then there is a pause that the status tells of."""
    space.pod("p", shell("main", "exit 5"))
    pod = space.until_pod("p", lambda pod: "CrashLoopBackOff" in str(state(pod, "main")))
    assert state(pod, "main")["restartCount"] >= 1
    assert state(pod, "main")["lastState"]["terminated"]["exitCode"] == 5
    assert phase(pod) == "Running"


STUCK = {
    "CreateContainerConfigError": {"command": ["x"], "envFrom": [{"configMapRef": {"name": "none"}}]},
    "StartError": {"command": ["no-such-program"]},
}


@pytest.mark.parametrize(("reason", "container"), STUCK.items())
def test_what_cannot_start_says_why(space: Space, reason: str, container: dict[str, Any]) -> None:
    """In the container's state, as the kubelet has it."""
    space.pod("p", {"name": "main", "image": "any", **container})
    space.until_pod("p", lambda pod: reason in str(state(pod, "main")))


def test_termination_with_grace(space: Space) -> None:
    """PreStop hook, then SIGTERM; what does not end is killed at the deadline, with 137."""
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "echo stop >> /v/order"]}}}
    host = {"volumes": [{"name": "v", "hostPath": {"path": str(space.folder)}}]}
    term = "trap 'echo term >> /v/order; exit 0' TERM; while :; do sleep 1000 & wait $!; done"
    deaf = shell("deaf", "trap '' TERM; while :; do sleep 1000; done")
    space.pod("p", shell("main", term, lifecycle=hook, **MOUNT), deaf, **host)
    # A finalizer keeps the pod, so that its last status can be read.
    space.patch("Pod", "p", {"metadata": {"finalizers": ["example.com/keep"]}})
    space.until_pod("p", lambda pod: is_true(pod, "Ready"))
    began = time.monotonic()
    space.delete("Pod", "p", gracePeriodSeconds=2)
    pod = space.until_pod("p", lambda pod: phase(pod) == "Failed")
    assert 1.9 < time.monotonic() - began < 5
    codes = {name: state(pod, name)["state"]["terminated"]["exitCode"] for name in ("main", "deaf")}
    assert codes == {"main": 0, "deaf": 137}
    assert (space.folder / "order").read_text().split() == ["stop", "term"]
    space.patch("Pod", "p", {"metadata": {"finalizers": None}})
    space.until_gone("Pod", "p")


def test_forced_deletion_kills(space: Space) -> None:
    """A pod that is gone from the API server has no processes soon after."""
    space.pod("p", sleeper(), terminationGracePeriodSeconds=60)
    space.until_pod("p", lambda pod: is_true(pod, "Ready"))
    space.delete("Pod", "p", gracePeriodSeconds=0)
    space.until(lambda: space.nodes.pids(space.name, "p"), lambda pids: not pids)


def test_logs(space: Space) -> None:
    """What `kubectl logs` offers: tail, timestamps, follow, the run before."""
    space.pod(
        "p",
        shell("main", "n=$(cat /v/n || echo 1); echo run $n >&2; echo $((n+1)) > /v/n; seq 3; sleep 2", **MOUNT),
        **SHARED,
    )
    space.until_pod("p", lambda pod: "running" in state(pod, "main").get("state", {}))
    assert space.logs("p", "--follow").split("\n")[-5:] == ["run 1", "1", "2", "3", ""]
    space.until_pod("p", lambda pod: state(pod, "main")["restartCount"] == 1)
    space.until(lambda: space.logs("p"), lambda text: "run 2" in text)
    assert "run 1" in space.logs("p", "--previous")
    assert space.logs("p", "--tail=1") == "3\n"
    line = space.logs("p", "--timestamps", "--tail=1")
    assert datetime.fromisoformat(line.split()[0][:26]).year > 2000
    with pytest.raises(KubectlFailed, match="container nope is not valid"):
        space.logs("p", "-c", "nope")


def test_logs_are_for_the_api_server_only(space: Space) -> None:
    """Others need a certificate, and the right one."""
    node = space.access.request("GET", "/api/v1/nodes/node-cpu")
    port = node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
    stranger = Access(f"https://127.0.0.1:{port}", space.access.folder, space.access.programs)
    with pytest.raises(ApiError, match="only the API server"):
        stranger.request("GET", "/containerLogs/n/p/c")
    with pytest.raises(OSError, match=r"certificate required|closed connection|reset"):
        stranger.request("GET", "/containerLogs/n/p/c", token="none")


def test_programs_are_alone(space: Space) -> None:
    """A container has its own processes, host name, /etc/hosts and root; what it writes is its own."""
    aliases = [{"ip": "127.0.0.9", "hostnames": ["operator.example"]}]
    space.pod("p", sleeper(env=[POD_IP]), hostAliases=aliases)
    pod = space.until_pod("p", lambda pod: is_true(pod, "Ready"))
    assert space.run("p", "main", "cat", "/proc/1/cmdline").startswith("sh\0-ec")
    assert space.run("p", "main", "hostname") == "p"
    assert "127.0.0.9\toperator.example" in space.run("p", "main", "cat", "/etc/hosts")
    assert space.run("p", "main", "sh", "-c", "echo $POD_IP") == pod["status"]["podIP"]
    space.run("p", "main", "touch", "/only-here")
    assert not Path("/only-here").exists()
    with pytest.raises(NodeError, match="ended with 3"):
        space.run("p", "main", "sh", "-c", "exit 3")


def test_security_context(space: Space) -> None:
    """An ordinary user, a read-only root, no new privileges, and this interpreter still runs."""
    script = "import os; print(os.getuid(), os.getgroups()); print(open('/proc/self/status').read())"
    security = {"runAsUser": 65532, "runAsGroup": 65532, "readOnlyRootFilesystem": True, "runAsNonRoot": True}
    more = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "main",
        "image": "any",
        "command": ["python", "-c", script + "; open('/x', 'w')"],
        "securityContext": security | more,
    }
    space.pod("p", container, restartPolicy="Never", securityContext={"fsGroup": 2000})
    space.until_pod("p", lambda pod: phase(pod) == "Failed")
    log = space.logs("p")
    assert "65532 [2000]\n" in log
    assert "NoNewPrivs:\t1" in log
    assert "Read-only file system: '/x'" in log
