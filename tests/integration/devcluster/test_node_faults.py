"""What breaks on request: containers, pods, nodes, the agent; and that nothing survives it that should not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import devcluster
from devcluster.controlplane import ControlPlane
from devcluster.node.nodes import Nodes, is_ready
from devcluster.node.space import IMAGES, Space, is_true, phase, shell, sleeper, state

pytest_plugins = ["devcluster.testing", "devcluster.node.testing"]
MEMORY = {"volumes": [{"name": "v", "emptyDir": {"medium": "Memory"}}, {"name": "d", "emptyDir": {}}]}
MOUNTS = {"volumeMounts": [{"name": "v", "mountPath": "/memory"}, {"name": "d", "mountPath": "/disk"}]}


def descendants(marker: str) -> list[int]:
    """Give the processes of this machine that have a variable of this value."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"MARKER={marker}".encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def gone(marker: str) -> Callable[[], bool]:
    """Give a reading: whether no process has the marker any more."""
    return lambda: not descendants(marker)


def family(space: Space) -> dict[str, object]:
    """Give a container with children that would outlive it: in groups of their own, and deaf."""
    script = "trap '' TERM; for i in 1 2; do setsid sh -c 'trap \"\" TERM; sleep 1000; sleep 1000' & done; wait"
    return shell("main", script, env=[{"name": "MARKER", "value": space.name}])


def test_killed_container(space: Space) -> None:
    """It ends with 137, all its processes with it, and is started again; the other one is not touched."""
    space.pod("p", family(space), sleeper("other"))
    space.until_pod("p", lambda pod: is_true(pod, "Ready"))
    space.until(lambda: descendants(space.name), lambda pids: len(pids) >= 3)
    before = set(descendants(space.name))
    space.nodes.kill_container(space.name, "p", "main")
    pod = space.until_pod("p", lambda pod: state(pod, "main")["restartCount"] == 1)
    assert state(pod, "main")["lastState"]["terminated"]["exitCode"] == 137
    assert state(pod, "other")["restartCount"] == 0
    assert not before & set(descendants(space.name))


def test_signalled_container(space: Space) -> None:
    """A signal that the program does not handle ends it with 128 and its number."""
    space.pod(
        "p",
        {
            "name": "main",
            "image": "any",
            "command": ["python", "-c", "import time; print(1, flush=True); time.sleep(1000)"],
        },
        restartPolicy="Never",
    )
    space.until_pod("p", lambda pod: is_true(pod, "Ready"))
    space.until(lambda: space.logs("p"), bool)  # Python handles it from here on
    space.nodes.kill_container(space.name, "p", "main", signal.SIGINT)
    pod = space.until_pod("p", lambda pod: phase(pod) == "Failed")
    assert state(pod, "main")["state"]["terminated"]["exitCode"] == 130


def test_crashed_pod(space: Space) -> None:
    """All containers end at once and start again; what volumes hold is kept."""
    space.pod("p", sleeper("a", **MOUNTS), sleeper("b"), **MEMORY)
    space.until_pod("p", lambda pod: is_true(pod, "Ready"))
    space.run("p", "a", "touch", "/memory/kept")
    space.nodes.crash_pod(space.name, "p")
    space.until_pod("p", lambda pod: is_true(pod, "Ready") and state(pod, "a")["restartCount"] == 1)
    assert state(space.get("Pod", "p"), "b")["restartCount"] == 1
    assert space.run("p", "a", "ls", "/memory") == "kept"


def on_own_node(space: Space, name: str, *containers: dict[str, object], **spec: object) -> None:
    """Create a pod on the test's own node, and wait for it."""
    tolerations = [{"operator": "Exists"}]  # also of a node that fell silent, so that nothing evicts it
    space.pod(name, *containers, nodeName=space.own_node, tolerations=tolerations, **spec)
    space.until_pod(name, lambda pod: is_true(pod, "Ready"))


def test_node_down_and_back(space: Space) -> None:
    """Its processes die, it is noticed, and after the return its pods run again with empty memory."""
    node = f"/api/v1/nodes/{space.own_node}"
    with space.with_own_node() as nodes:
        on_own_node(space, "p", family(space), sleeper("other", **MOUNTS), **MEMORY)
        on_own_node(space, "never", sleeper(), restartPolicy="Never")
        nodes.execute(space.name, "p", "other", "touch", "/memory/x", "/disk/x")
        nodes.node_down(space.own_node)
        assert not descendants(space.name)
        space.until(lambda: space.access.request("GET", node), lambda found: not is_ready(found))
        space.until_pod("p", lambda pod: not is_true(pod, "Ready"))
        nodes.node_up(space.own_node)
        space.until(lambda: space.access.request("GET", node), is_ready)
        pod = space.until_pod("p", lambda pod: is_true(pod, "Ready"))
        assert state(pod, "main")["restartCount"] == 1
        assert state(pod, "main")["lastState"]["terminated"]["reason"] == "Unknown"
        assert nodes.execute(space.name, "p", "other", "ls", "/memory", "/disk").split() == ["/disk:", "x", "/memory:"]
        space.until_pod("never", lambda pod: phase(pod) == "Failed")


def test_killed_agent_takes_everything_along(space: Space) -> None:
    """No process is left within two seconds, and no mount; a new agent starts the pods again."""
    with space.with_own_node() as nodes:
        on_own_node(space, "p", family(space), sleeper("other", **MOUNTS), **MEMORY)
        space.until(lambda: descendants(space.name), lambda pids: len(pids) >= 3)
        nodes.kill_agent()
        space.until(gone(space.name), bool, seconds=2)
        assert str(space.folder) not in Path("/proc/self/mountinfo").read_text()
        nodes.start_agent()
        pod = space.until_pod("p", lambda pod: state(pod, "main")["restartCount"] == 1 and is_true(pod, "Ready"))
        assert len(nodes.pids(space.name, "p")) == len(pod["spec"]["containers"])
        space.delete("Pod", "p")
        space.until_gone("Pod", "p")


PARENT = """
import sys, time
from pathlib import Path
from devcluster.access import Access
from devcluster.node.nodeobject import NodeSpec
from devcluster.node.nodes import Nodes
from devcluster.node.space import IMAGES
access = Access(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
nodes = Nodes(access, IMAGES, [NodeSpec(sys.argv[5])], folder=Path(sys.argv[4])).start()
print(nodes.pid, flush=True)
time.sleep(1000)
"""


def test_killed_parent_takes_the_agent_along(space: Space) -> None:
    """A test run that is killed leaves neither agent nor containers."""
    access = space.access
    arguments = [access.url, str(access.folder), str(access.programs), str(space.folder / "nodes"), space.own_node]
    root = Path(devcluster.__file__).parent.parent
    with subprocess.Popen([sys.executable, "-c", PARENT, *arguments], cwd=root, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        agent = int(parent.stdout.readline())
        on_own_node(space, "p", family(space))
        parent.kill()
        space.until(lambda: Path(f"/proc/{agent}").exists(), lambda exists: not exists, seconds=2)
        space.until(gone(space.name), bool, seconds=2)
    access.request("DELETE", f"/api/v1/nodes/{space.own_node}")


def test_pods_survive_an_outage_of_the_api_server(kube_programs: Path, tmp_path: Path) -> None:
    """While it is away everything runs on; afterwards the status is caught up with and new pods start."""
    with (
        ControlPlane(folder=tmp_path / "cluster", programs=kube_programs) as plane,
        Nodes(plane, IMAGES, heartbeat=1.0) as nodes,
    ):
        space = Space(plane, nodes, "default", Path("/nonexistent"))
        space.pod("p", sleeper())
        space.until_pod("p", lambda pod: is_true(pod, "Ready"))
        before = nodes.pids("default", "p")
        plane.kill("kube-apiserver")
        time.sleep(1)
        assert nodes.pids("default", "p") == before
        nodes.kill_container("default", "p", "main")
        space.until(lambda: nodes.pids("default", "p"), lambda pids: pids and pids != before)
        plane.restart("kube-apiserver")
        space.until_pod("p", lambda pod: state(pod, "main")["restartCount"] == 1 and is_true(pod, "Ready"))
        plane.pause_api()
        time.sleep(1)
        plane.resume_api()
        space.pod("q", sleeper())
        space.until_pod("q", lambda pod: is_true(pod, "Ready"))


def test_without_privileges(space: Space) -> None:
    """Mount paths are rewritten, and a variable tells where they are; the rest works."""
    script = "echo hello > /data/x; cat $DEVCLUSTER_ROOT/data/x; exec python -c 'import time; time.sleep(1000)'"
    mounts = {"volumeMounts": [{"name": "v", "mountPath": "/data"}]}
    marked = {"env": [{"name": "MARKER", "value": space.name}]}
    with space.with_own_node(isolation="none") as nodes:
        on_own_node(space, "p", shell("main", script, **mounts, **marked), volumes=[{"name": "v", "emptyDir": {}}])
        space.until(lambda: space.logs("p"), lambda text: text == "hello\n")
        assert nodes.state()["isolation"] == "none"
        assert nodes.execute(space.name, "p", "main", "cat", "/data/x") == "hello\n"
        nodes.kill_agent()
        space.until(gone(space.name), bool, seconds=2)


def test_in_a_user_namespace(space: Space) -> None:
    """What an ordinary user gets: the same mounts at the same places, and nothing outlives the agent."""
    with space.with_own_node(isolation="user-namespace") as nodes:
        on_own_node(space, "p", family(space), sleeper("other", **MOUNTS), **MEMORY)
        inside = partial(nodes.execute, space.name, "p", "other")
        assert nodes.state()["isolation"] == "namespaces"
        assert inside("stat", "-f", "-c", "%T", "/memory") == "tmpfs\n"
        assert inside("cat", "/var/run/secrets/kubernetes.io/serviceaccount/namespace") == space.name
        assert inside("hostname") == "p\n"
        assert not Path("/memory").exists()
        space.until(lambda: descendants(space.name), lambda pids: len(pids) >= 3)
        nodes.kill_agent()
        space.until(gone(space.name), bool, seconds=2)
