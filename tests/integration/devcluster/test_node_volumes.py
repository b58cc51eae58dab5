"""Volumes of every kind that the project's pods use, seen from inside the containers."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from devcluster.node.space import Space, is_true, phase, shell, sleeper, state

pytest_plugins = ["devcluster.testing", "devcluster.node.testing"]


def mount(path: str, volume: str = "v", **more: Any) -> dict[str, Any]:
    """Give a container's mounts: one volume at one path."""
    return {"volumeMounts": [{"name": volume, "mountPath": path, **more}]}


def ready(space: Space, name: str = "p") -> dict[str, Any]:
    """Wait until a pod is ready."""
    return space.until_pod(name, lambda pod: is_true(pod, "Ready"))


def claims_of(token: str) -> dict[str, Any]:
    """Read a token without checking it."""
    body = token.split(".")[1]
    claims: dict[str, Any] = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    return claims


def test_projected_token_is_the_pods_own(space: Space) -> None:
    """TokenReview for its audience returns the pod's name and uid; for another one it fails."""
    source = {"serviceAccountToken": {"path": "token", "audience": "weightsync", "expirationSeconds": 600}}
    volumes = [{"name": "v", "projected": {"sources": [source]}}]
    space.pod("p", sleeper(**mount("/var/run/secrets/own")), volumes=volumes)
    pod = ready(space)
    token = space.run("p", "main", "cat", "/var/run/secrets/own/token")

    def review(*audiences: str) -> dict[str, Any]:
        body = {"spec": {"token": token, "audiences": list(audiences)}}
        status: dict[str, Any] = space.access.request("POST", "/apis/authentication.k8s.io/v1/tokenreviews", body)[
            "status"
        ]
        return status

    found = review("weightsync")
    assert found["authenticated"]
    assert found["user"]["extra"]["authentication.kubernetes.io/pod-name"] == ["p"]
    assert found["user"]["extra"]["authentication.kubernetes.io/pod-uid"] == [pod["metadata"]["uid"]]
    assert not review("other").get("authenticated")


def test_the_usual_token_reaches_the_api_server(space: Space) -> None:
    """Every pod can ask the API server who it is, with what Kubernetes clients look for in a cluster."""
    folder = "/var/run/secrets/kubernetes.io/serviceaccount"
    url = "https://$KUBERNETES_SERVICE_HOST:$KUBERNETES_SERVICE_PORT/apis/authentication.k8s.io/v1/selfsubjectreviews"
    ask = (
        f'curl -sS --cacert {folder}/ca.crt -H "Authorization: Bearer $(cat {folder}/token)" '
        f"-H 'Content-Type: application/json' -d '{{}}' {url}"
    )
    space.pod("p", shell("main", ask), restartPolicy="Never")
    space.until_pod("p", lambda pod: phase(pod) == "Succeeded")
    user = json.loads(space.logs("p"))["status"]["userInfo"]["username"]
    assert user == f"system:serviceaccount:{space.name}:default"


def test_memory_volume_is_a_tmpfs_shared_by_two_containers(space: Space) -> None:
    """Of its size, read-only where the mount says so, and the file of one is the file of the other."""
    volumes = [{"name": "v", "emptyDir": {"medium": "Memory", "sizeLimit": "4Mi"}}]
    side = sleeper("side", init=True, restartPolicy="Always", **mount("/weights"))
    space.pod("p", side, sleeper(**mount("/weights", readOnly=True)), volumes=volumes)
    ready(space)
    assert space.run("p", "side", "stat", "-f", "-c", "%T %b %S", "/weights") == "tmpfs 1024 4096"
    too_much = "dd if=/dev/zero of=/weights/big bs=1M count=8 2>&1 || stat -c %s /weights/big"
    assert "No space left" in space.run("p", "side", "sh", "-c", too_much)
    assert space.run("p", "main", "stat", "-c", "%s", "/weights/big") == str(4 << 20)
    assert "Read-only" in space.run("p", "main", "sh", "-c", "touch /weights/x 2>&1 || true")
    assert space.run("p", "side", "stat", "-c", "%i", "/weights/big") == space.run(
        "p", "main", "stat", "-c", "%i", "/weights/big"
    )
    assert space.run("p", "main", "stat", "-f", "-c", "%T", "/dev/shm") == "tmpfs"
    assert not Path("/weights").exists()


def test_claim_is_shared_by_two_pods(space: Space) -> None:
    """The real controllers bind it to a volume made for it, and delete both in the end."""
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    space.create("PersistentVolumeClaim", "c", spec=spec)
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]
    for name in ("p", "q"):
        space.pod(name, sleeper(**mount("/data")), volumes=volumes)
    ready(space, "p")
    ready(space, "q")
    space.run("p", "main", "sh", "-c", "echo hello > /data/x")
    assert space.run("q", "main", "cat", "/data/x") == "hello"
    claim = space.get("PersistentVolumeClaim", "c")
    volume = space.access.request("GET", f"/api/v1/persistentvolumes/{claim['spec']['volumeName']}")
    folder = Path(volume["spec"]["hostPath"]["path"])
    assert (folder / "x").exists()
    for name in ("p", "q"):
        space.delete("Pod", name)
        space.until_gone("Pod", name)
    space.delete("PersistentVolumeClaim", "c")
    space.until_gone("PersistentVolumeClaim", "c")
    space.until(folder.exists, lambda exists: not exists)


def test_config_map_volume_follows_its_object(space: Space) -> None:
    """By the swap of a symlink, as programs that watch for it expect."""
    space.create("ConfigMap", "c", data={"x": "1", "old": ""})
    space.pod("p", sleeper(**mount("/etc/conf")), volumes=[{"name": "v", "configMap": {"name": "c"}}])
    ready(space)
    before = space.run("p", "main", "readlink", "/etc/conf/..data")
    assert space.run("p", "main", "cat", "/etc/conf/x") == "1"
    space.patch("ConfigMap", "c", {"data": {"x": "2", "old": None, "new": "n"}})
    space.until(lambda: space.run("p", "main", "cat", "/etc/conf/x"), lambda text: text == "2")
    assert space.run("p", "main", "readlink", "/etc/conf/..data") != before
    assert space.run("p", "main", "ls", "/etc/conf").split() == ["new", "x"]


def test_optional_config_map_appears_later(space: Space) -> None:
    """The pod starts without it, and sees it when it is there."""
    space.pod("p", sleeper(**mount("/trust")), volumes=[{"name": "v", "configMap": {"name": "late", "optional": True}}])
    ready(space)
    assert space.run("p", "main", "ls", "/trust") == ""
    space.create("ConfigMap", "late", data={"ca.crt": "pem"})
    space.until(lambda: space.run("p", "main", "ls", "/trust"), lambda text: text == "ca.crt")


def test_missing_config_map_holds_the_pod(space: Space) -> None:
    """Until it exists; an Event says what is missing."""
    space.pod("p", sleeper(**mount("/c")), volumes=[{"name": "v", "configMap": {"name": "late"}}])
    space.until(lambda: space.list("Event"), lambda events: 'configmap "late" not found' in str(events))
    pod = space.get("Pod", "p")
    assert state(pod, "main")["state"]["waiting"]["reason"] == "ContainerCreating"
    space.create("ConfigMap", "late", data={"x": "1"})
    ready(space)


def test_environment_and_downward_api(space: Space) -> None:
    """From a Secret, from the pod itself, from its resources; labels in a volume are kept current."""
    space.create("Secret", "s", stringData={"PASSWORD": "hidden"})
    env = [
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "MEMORY", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}},
        {"name": "ALL", "value": "$(NAME)-$(MEMORY)-$(PASSWORD)"},
    ]
    main = sleeper(
        env=env,
        envFrom=[{"secretRef": {"name": "s"}}],
        resources={"limits": {"memory": "64Mi"}},
        **mount("/info"),
    )
    items = [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]
    space.pod("p", main, volumes=[{"name": "v", "downwardAPI": {"items": items}}])
    ready(space)
    assert space.run("p", "main", "sh", "-c", "echo $ALL") == "p-64-hidden"
    space.patch("Pod", "p", {"metadata": {"labels": {"color": "red"}}})
    space.until(lambda: space.run("p", "main", "cat", "/info/labels"), lambda text: 'color="red"' in text)


def test_sub_paths(space: Space) -> None:
    """A folder of a volume, made if need be, and a single file over one of the host's."""
    space.create("ConfigMap", "c", data={"motd": "hello"})
    mounts = [
        {"name": "v", "mountPath": "/a", "subPath": "deep/er"},
        {"name": "v", "mountPath": "/all"},
        {"name": "c", "mountPath": "/etc/hostname", "subPath": "motd"},
    ]
    volumes = [{"name": "v", "emptyDir": {}}, {"name": "c", "configMap": {"name": "c"}}]
    space.pod("p", sleeper(volumeMounts=mounts), volumes=volumes)
    ready(space)
    space.run("p", "main", "touch", "/a/x")
    assert space.run("p", "main", "ls", "/all/deep/er") == "x"
    assert space.run("p", "main", "cat", "/etc/hostname") == "hello"


def test_groups_and_users_of_volumes(space: Space) -> None:
    """FsGroup owns memory and the token; both are open to the container's user only through it."""
    source = {"serviceAccountToken": {"path": "token", "audience": "a"}}
    volumes = [
        {"name": "v", "emptyDir": {"medium": "Memory"}},
        {"name": "t", "projected": {"sources": [source], "defaultMode": 0o444}},
    ]
    mounts = [{"name": "v", "mountPath": "/v"}, {"name": "t", "mountPath": "/t"}]
    security = {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 2000}
    space.pod("p", sleeper(volumeMounts=mounts), volumes=volumes, securityContext=security)
    ready(space)
    assert space.run("p", "main", "stat", "-c", "%a %g", "/v") == "2777 2000"
    assert space.run("p", "main", "stat", "-L", "-c", "%a %u %g", "/t/token") == "640 65532 2000"
    assert claims_of(space.run("p", "main", "cat", "/t/token"))["aud"] == ["a"]
    space.run("p", "main", "touch", "/v/x")
