"""The development control plane does what a real one does, breaks as asked for, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from devcluster.access import Access, ApiError, KubectlFailed
from devcluster.controlplane import API, ETCD, MANAGER, ControlPlane
from devcluster.processes import ComponentFailed

pytest_plugins = ["devcluster.testing"]

ROOT = Path(__file__).parent.parent.parent.parent
COMPONENTS = {"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"}
Json = dict[str, Any]


def until(condition: Callable[[], object], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if found := condition():
                return found
        except (ApiError, OSError):
            pass
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def exists(cluster: Access, path: str) -> bool:
    try:
        cluster.request("GET", path)
    except ApiError as error:
        if error.code != 404:
            raise
        return False
    return True


def refusal(cluster: Access, method: str, path: str, body: Json | None = None, token: str | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        cluster.request(method, path, body, token=token)
    return caught.value


def config_map(name: str, **metadata: Any) -> Json:
    return {"metadata": {"name": name, **metadata}}


def pod(name: str, **spec: Any) -> Json:
    return {"metadata": {"name": name}, "spec": {"containers": [{"name": "main", "image": "none"}], **spec}}


def alive(pids: list[int]) -> list[int]:
    """Which of them run; one that nobody has waited for yet does not."""
    states = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [
        pid for pid, file in states.items() if file.exists() and file.read_text().rpartition(")")[2].split()[0] != "Z"
    ]


# ---- who may come in


def test_only_its_own_authority_vouches_for_it(cluster: Access):
    host, port = cluster.url.removeprefix("https://").split(":")
    for name in (host, "localhost", "kubernetes.default.svc"):
        context = ssl.create_default_context(cafile=str(cluster.ca_file))
        with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain, server_hostname=name):
            pass
    with socket.create_connection((host, int(port))) as plain, pytest.raises(ssl.SSLCertVerificationError):
        ssl.create_default_context().wrap_socket(plain, server_hostname=host)


def test_strangers_are_turned_away(cluster: Access):
    assert refusal(cluster, "GET", "/api/v1/namespaces", token="made-up").code == 401


def test_kubectl_is_the_administrator(cluster: Access, namespace: str):
    assert cluster.kubectl("auth", "can-i", "*", "*").strip() == "yes"
    assert "v1.35" in cluster.kubectl("version")
    with pytest.raises(KubectlFailed, match="NotFound"):
        cluster.kubectl("-n", namespace, "get", "configmap", "missing")


def test_a_service_account_may_do_only_what_it_is_given(cluster: Access, namespace: str):
    base = f"/api/v1/namespaces/{namespace}"
    token = cluster.kubectl("-n", namespace, "create", "token", "default").strip()
    denied = refusal(cluster, "GET", f"{base}/configmaps", token=token)
    assert denied.code == 403
    assert f"system:serviceaccount:{namespace}:default" in str(denied)

    cluster.kubectl("-n", namespace, "create", "role", "reader", "--verb=list", "--resource=configmaps")
    cluster.kubectl(
        "-n", namespace, "create", "rolebinding", "r", "--role=reader", f"--serviceaccount={namespace}:default"
    )
    until(lambda: cluster.request("GET", f"{base}/configmaps", token=token))
    assert refusal(cluster, "GET", f"{base}/secrets", token=token).code == 403


def test_a_bound_token_is_good_for_its_audience_and_its_pod_only(cluster: Access, namespace: str):
    base = f"/api/v1/namespaces/{namespace}"
    # No node takes it, so that it stays as it is.
    uid = cluster.request("POST", f"{base}/pods", pod("bound", nodeSelector={"none": "such"}))["metadata"]["uid"]
    spec = {"audiences": ["hub"], "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": "bound", "uid": uid}}
    token = cluster.request("POST", f"{base}/serviceaccounts/default/token", {"spec": spec})["status"]["token"]

    def review(audience: str) -> Json:
        body = {"spec": {"token": token, "audiences": [audience]}}
        return cluster.request("POST", "/apis/authentication.k8s.io/v1/tokenreviews", body)["status"]

    passed = review("hub")
    assert passed["authenticated"] is True
    assert passed["audiences"] == ["hub"]
    assert passed["user"]["username"] == f"system:serviceaccount:{namespace}:default"
    assert passed["user"]["extra"]["authentication.kubernetes.io/pod-name"] == ["bound"]
    assert passed["user"]["extra"]["authentication.kubernetes.io/pod-uid"] == [uid]
    assert "authenticated" not in review("another")
    assert refusal(cluster, "GET", "/version", token=token).code == 401


def test_pods_get_a_projected_token(cluster: Access, namespace: str):
    made = cluster.request("POST", f"/api/v1/namespaces/{namespace}/pods", pod("plain"))
    sources = made["spec"]["volumes"][0]["projected"]["sources"]
    assert [next(iter(source)) for source in sources] == ["serviceAccountToken", "configMap", "downwardAPI"]
    trusted = cluster.request("GET", f"/api/v1/namespaces/{namespace}/configmaps/kube-root-ca.crt")
    assert trusted["data"]["ca.crt"] == cluster.ca_file.read_text()


def test_a_validating_admission_policy_rejects_in_its_own_words(cluster: Access, namespace: str):
    admission = "/apis/admissionregistration.k8s.io/v1"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}
    policy = {
        "metadata": {"name": namespace},
        "spec": {
            "matchConstraints": {"resourceRules": [rule]},
            "validations": [{"expression": "object.metadata.name != 'bad'", "message": "no bad names here"}],
        },
    }
    only_here = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    spec = {"policyName": namespace, "validationActions": ["Deny"], "matchResources": {"namespaceSelector": only_here}}
    policies, bindings = f"{admission}/validatingadmissionpolicies", f"{admission}/validatingadmissionpolicybindings"
    maps = f"/api/v1/namespaces/{namespace}/configmaps"
    cluster.request("POST", policies, policy)
    try:
        cluster.request("POST", bindings, {"metadata": {"name": namespace}, "spec": spec})

        def rejected() -> str:
            try:
                cluster.request("POST", f"{maps}?dryRun=All", config_map("bad"))
            except ApiError as error:
                return str(error)
            return ""

        assert "no bad names here" in until(rejected)
        cluster.request("POST", maps, config_map("good"))
    finally:
        cluster.request("DELETE", f"{policies}/{namespace}")
        cluster.request("DELETE", f"{bindings}/{namespace}")


# ---- who does the work


def test_a_job_gets_its_pods_and_takes_them_along(cluster: Access, namespace: str):
    jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    pods = f"/api/v1/namespaces/{namespace}/pods"
    template = {"spec": {**pod("")["spec"], "restartPolicy": "Never"}}
    job = {"metadata": {"name": "two"}, "spec": {"completions": 2, "parallelism": 2, "template": template}}
    cluster.request("POST", jobs, job)
    made = until(lambda: [p for p in [cluster.request("GET", pods)["items"]] if len(p) == 2])[0]
    assert {p["metadata"]["labels"]["batch.kubernetes.io/job-name"] for p in made} == {"two"}
    cluster.request("DELETE", f"{jobs}/two", {"propagationPolicy": "Background"})
    until(lambda: not cluster.request("GET", pods)["items"])


def test_what_is_owned_goes_with_its_owner(cluster: Access, namespace: str):
    maps = f"/api/v1/namespaces/{namespace}/configmaps"
    uid = cluster.request("POST", maps, config_map("owner"))["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}
    cluster.request("POST", maps, config_map("owned", ownerReferences=[owner]))
    cluster.request("POST", maps, config_map("free"))
    cluster.request("DELETE", f"{maps}/owner")
    until(lambda: not exists(cluster, f"{maps}/owned"))
    assert exists(cluster, f"{maps}/free")


def test_a_namespace_goes_with_all_that_is_in_it(cluster: Access, namespace: str):
    path = "/api/v1/namespaces/to-be-deleted"
    cluster.request("POST", "/api/v1/namespaces", {"metadata": {"name": "to-be-deleted"}})
    cluster.request("POST", f"{path}/configmaps", config_map("inside"))
    cluster.request("DELETE", path)
    until(lambda: not exists(cluster, path))


# ---- a control plane of one's own: nodes and faults


@pytest.fixture(scope="module")
def own(kube_programs: Path) -> Iterator[ControlPlane]:
    with ControlPlane(programs=kube_programs, history=True) as plane:
        yield plane


MAPS = "/api/v1/namespaces/default/configmaps"


def test_a_pod_goes_to_the_node_that_it_asks_for(own: ControlPlane):
    status = {
        "capacity": {"cpu": "4", "memory": "8Gi", "pods": "10"},
        "allocatable": {"cpu": "4", "memory": "8Gi", "pods": "10"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "Test", "message": ""}],
    }
    merge = "application/merge-patch+json"
    for name in ("one", "two"):
        itself = own.issue_node(name)
        node = {"metadata": {"name": name, "labels": {"disk": name}}}
        own.request("POST", "/api/v1/nodes", node, credentials=itself)
        own.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, credentials=itself, content=merge)
    with pytest.raises(ApiError, match="is not allowed to modify"):  # node two is not node one
        own.request("PATCH", "/api/v1/nodes/one", {"metadata": {}}, credentials=itself, content=merge)
    own.request("POST", "/api/v1/namespaces/default/pods", pod("choosy", nodeSelector={"disk": "two"}))
    bound = until(lambda: own.request("GET", "/api/v1/namespaces/default/pods/choosy")["spec"].get("nodeName"))
    assert bound == "two"


def test_a_paused_api_server_answers_nobody_until_it_is_resumed(own: ControlPlane):
    own.pause_api()
    with pytest.raises(TimeoutError):
        own.request("GET", "/version", timeout=0.5)
    own.resume_api()
    assert own.request("GET", "/version")["major"] == "1"


def test_a_restarted_api_server_is_another_process_at_the_same_address(own: ControlPlane):
    before, url = own.pids, own.url
    own.request("POST", MAPS, config_map("before-restart"))
    own.restart_api()
    after = own.pids
    assert {name for name in COMPONENTS if before[name] != after[name]} == {API}
    assert own.url == url
    assert exists(own, f"{MAPS}/before-restart")


def test_a_killed_component_is_told_and_can_be_brought_back(own: ControlPlane):
    own.kill(MANAGER)
    assert MANAGER not in own.pids
    with pytest.raises(ComponentFailed, match="kube-controller-manager ended with status -9"):
        own.check()
    own.restart(MANAGER)
    own.check()


def test_without_etcd_nothing_is_written(own: ControlPlane):
    own.kill(ETCD)
    with pytest.raises((ApiError, OSError)):
        own.request("POST", MAPS, config_map("lost"), timeout=1)
    own.restart(ETCD)
    own.request("POST", MAPS, config_map("kept"))


def test_the_last_second_is_lost_and_nothing_older(own: ControlPlane):
    own.request("POST", MAPS, config_map("older"))
    time.sleep(2)
    own.request("POST", MAPS, config_map("changed"))
    version = own.request("GET", f"{MAPS}/changed")["metadata"]["resourceVersion"]
    lost = own.lose_last_second()
    assert 1 <= lost < 2
    assert exists(own, f"{MAPS}/older")
    assert not exists(own, f"{MAPS}/changed")
    # The same number again, for something else.
    again = own.request("POST", MAPS, config_map("again"))["metadata"]["resourceVersion"]
    assert int(again) <= int(version) + 200
    # Controllers work on.
    uid = own.request("GET", f"{MAPS}/older")["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "older", "uid": uid}
    own.request("POST", MAPS, config_map("owned", ownerReferences=[owner]))
    own.request("DELETE", f"{MAPS}/older")
    until(lambda: not exists(own, f"{MAPS}/owned"))


def test_the_last_second_cannot_be_lost_where_it_is_not_remembered():
    plane = ControlPlane()
    with pytest.raises(RuntimeError, match="history=True"):
        plane.lose_last_second()
    plane.stop()


# ---- coming and going


def test_one_after_the_other_leaves_nothing(kube_programs: Path):
    for _ in range(2):
        with ControlPlane(programs=kube_programs) as plane:
            pids = plane.pids
            assert set(pids) == COMPONENTS
            assert exists(plane, "/api/v1/namespaces/default/serviceaccounts/default")
        assert alive(list(pids.values())) == []
        assert not plane.folder.exists()
        plane.stop()


def test_etcd_wants_a_certificate(own: ControlPlane):
    context = ssl.create_default_context(cafile=str(own.ca_file))
    address = next(word for word in own.command(ETCD) if word.startswith("--listen-client-urls"))
    port = int(address.rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as tls,
        pytest.raises(ssl.SSLError, match="certificate required"),
    ):
        tls.recv(1)


def test_one_that_cannot_start_says_why_at_once(kube_programs: Path, tmp_path: Path):
    plane = ControlPlane(programs=kube_programs, flags={API: ["--nonsense"]}, folder=tmp_path / "kept")
    with pytest.raises(ComponentFailed, match=r"(?s)kube-apiserver ended with status 1.*unknown flag: --nonsense"):
        plane.start()
    assert plane.pids == {}
    assert (tmp_path / "kept" / "kube-apiserver.log").exists()
    with pytest.raises(FileExistsError):
        ControlPlane(programs=kube_programs, folder=tmp_path / "kept").start()


PARENT = """if True:
    import sys, time
    from pathlib import Path
    from devcluster.controlplane import ControlPlane
    plane = ControlPlane(programs=Path(sys.argv[1]), folder=Path(sys.argv[2])).start()
    print(*plane.pids.values(), flush=True)
    time.sleep(600)"""


def test_a_killed_parent_takes_everything_along(kube_programs: Path, tmp_path: Path):
    command = [sys.executable, "-c", PARENT, str(kube_programs), str(tmp_path / "plane")]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(alive(pids)) == 4
    parent.kill()
    parent.communicate()
    until(lambda: not alive(pids), seconds=2)


def test_up_prints_a_kubeconfig_and_ctrl_c_ends_it(kube_programs: Path):
    process = subprocess.Popen(
        [sys.executable, "-m", "devcluster", "up"],
        cwd=ROOT,
        env=os.environ | {"WEIGHTSYNC_KUBE_BIN": str(kube_programs)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    found = re.fullmatch(r"export KUBECONFIG=(\S+)\n", process.stdout.readline())
    assert found, process.stderr and process.stderr.read()
    kubectl = [str(kube_programs / "kubectl"), "--kubeconfig", found[1], "get", "namespaces", "-o", "name"]
    assert "namespace/default" in subprocess.run(kubectl, capture_output=True, text=True, check=True).stdout
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "ending" in errors
    assert not Path(found[1]).exists()
