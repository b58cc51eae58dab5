"""What volumes hold, how their files are replaced, and where containers see them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from devcluster.node import atomic
from devcluster.node.environment import Missing
from devcluster.node.fields import Facts
from devcluster.node.images import Image
from devcluster.node.inside.spec import Launch, Mount, load
from devcluster.node.launching import fs_user, launch
from devcluster.node.mounts import VolumeMount, hosts, rewritten, volume_mounts, without_mounts
from devcluster.node.payloads import File, Ref, files, needs, private, token_paths
from devcluster.node.provisioner import is_done_with, volume_for, wants_volume
from devcluster.node.references import renew_at
from devcluster.node.spawn import Isolation

POD: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"a": "b"}},
    "spec": {"containers": [{"name": "x", "resources": {"limits": {"memory": "2Gi"}}}]},
}
FACTS = Facts(POD, "127.64.0.2", "127.0.0.1")
CONFIG = {"data": {"a.txt": "A", "b": "B"}, "binaryData": {"raw": base64.b64encode(b"\x00\xff").decode()}}
SECRET = {"data": {"key": base64.b64encode(b"hidden").decode()}}
TOKEN = Ref("Token", "audience", 600)
FETCHED = {Ref("ConfigMap", "cm"): CONFIG, Ref("Secret", "s"): SECRET, Ref("ConfigMap", "none"): None, TOKEN: "jwt"}


def plain(volume: dict[str, Any]) -> dict[str, tuple[bytes, int]]:
    """Give a volume's files."""
    return {path: (file.data, file.mode) for path, file in files(volume, FETCHED, FACTS).items()}


def test_config_map() -> None:
    """All keys, text and binary, with the volume's mode."""
    assert plain({"configMap": {"name": "cm", "defaultMode": 0o440}}) == {
        "a.txt": (b"A", 0o440),
        "b": (b"B", 0o440),
        "raw": (b"\x00\xff", 0o440),
    }


def test_items_choose_and_rename() -> None:
    """Only the items asked for, under the paths and modes asked for."""
    items = [{"key": "key", "path": "deep/er", "mode": 0o400}]
    assert plain({"secret": {"secretName": "s", "items": items}}) == {"deep/er": (b"hidden", 0o400)}


def test_projected() -> None:
    """Several sources in one volume."""
    volume = {
        "projected": {
            "sources": [
                {"serviceAccountToken": {"path": "token", "audience": "audience", "expirationSeconds": 600}},
                {"configMap": {"name": "cm", "items": [{"key": "b", "path": "ca.crt"}]}},
                {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
                {
                    "downwardAPI": {
                        "items": [
                            {
                                "path": "mem",
                                "resourceFieldRef": {
                                    "containerName": "x",
                                    "resource": "limits.memory",
                                    "divisor": "1Gi",
                                },
                            }
                        ]
                    }
                },
            ]
        }
    }
    assert needs(volume) == [TOKEN, Ref("ConfigMap", "cm")]
    assert token_paths(volume) == {"token"}
    assert {path: data for path, (data, _) in plain(volume).items()} == {
        "token": b"jwt",
        "ca.crt": b"B",
        "namespace": b"n",
        "mem": b"2",
    }


def test_optional_and_missing() -> None:
    """An optional source that is not there gives no files; another one is named."""
    assert plain({"configMap": {"name": "none", "optional": True}}) == {}
    with pytest.raises(Missing, match='configmap "none" not found'):
        plain({"configMap": {"name": "none"}})
    items = [{"key": "gone", "path": "x"}]
    assert plain({"configMap": {"name": "cm", "items": items, "optional": True}}) == {}
    with pytest.raises(Missing, match="non-existent configmap key: gone"):
        plain({"configMap": {"name": "cm", "items": items}})


@pytest.mark.parametrize(("group", "user", "mode"), [(None, None, 0o644), (None, 65532, 0o600), (2000, 65532, 0o640)])
def test_tokens_are_closed_to_others(group: int | None, user: int | None, mode: int) -> None:
    """As soon as the pod says who is to read them; other files stay as they are."""
    found = private({"token": File(b"", 0o644), "x": File(b"", 0o644)}, {"token"}, group, user)
    assert (found["token"].mode, found["x"].mode) == (mode, 0o644)


def test_a_token_is_renewed_at_four_fifths_of_its_life_and_daily() -> None:
    """The kubelet's rule."""
    assert renew_at(0, 600) == 480
    assert renew_at(0, 10 * 86400) == 86400


def test_files_are_replaced_all_at_once(tmp_path: Path) -> None:
    """By one rename; names that are gone vanish, a file held open keeps its content."""
    assert atomic.write(tmp_path, {"a": File(b"1", 0o644), "d/b": File(b"1", 0o600)})
    held = (tmp_path / "a").open("rb")
    before = (tmp_path / "..data").readlink()
    assert atomic.write(tmp_path, {"a": File(b"2", 0o644), "c": File(b"2", 0o644)})
    assert (tmp_path / "..data").readlink() != before
    assert not (tmp_path / before).exists()
    assert {p.name for p in tmp_path.iterdir() if not p.name.startswith("..")} == {"a", "c"}
    assert ((tmp_path / "a").read_bytes(), held.read()) == (b"2", b"1")
    held.close()


def test_the_same_files_are_not_written_again(tmp_path: Path) -> None:
    """So that watchers of the folder see no change; a new mode is one."""
    assert atomic.write(tmp_path, {"a": File(b"1", 0o644)})
    assert not atomic.write(tmp_path, {"a": File(b"1", 0o644)})
    assert atomic.write(tmp_path, {"a": File(b"1", 0o600)})
    assert atomic.write(tmp_path, {})
    assert not atomic.write(tmp_path, {})


def test_volume_mounts() -> None:
    """Sub-paths are expanded, and may not lead out."""
    entry = {"name": "v", "mountPath": "/m", "readOnly": True, "subPathExpr": "of-$(POD)"}
    assert volume_mounts({"volumeMounts": [entry]}, {"POD": "p"}) == [VolumeMount("v", "of-p", "/m", True)]
    with pytest.raises(ValueError, match="leads out"):
        volume_mounts({"volumeMounts": [entry]}, {"POD": "/../../etc"})


def test_hosts() -> None:
    """The pod's own name and its hostAliases are added to the host's file."""
    pod = {"metadata": {"name": "p"}, "spec": {"hostAliases": [{"ip": "127.0.0.1", "hostnames": ["a.b", "c"]}]}}
    assert hosts(pod, "127.0.0.1 localhost\n", "127.64.0.2") == (
        "127.0.0.1 localhost\n127.64.0.2\tp\n127.0.0.1\ta.b c\n"
    )


REWRITES = {
    "/weights": "/R/weights",
    "--dir=/weights/a": "--dir=/R/weights/a",
    "file:///weights": "file:///weights",
    "/weights2 /a/weights": "/weights2 /a/weights",
    "cat /weights/x > /out": "cat /R/weights/x > /R/out",
    "PATH=/weights:/out/bin": "PATH=/R/weights:/R/out/bin",
}


@pytest.mark.parametrize(("text", "result"), REWRITES.items())
def test_rewriting_of_mount_paths(text: str, result: str) -> None:
    """Without mounts, paths are found where they stand alone."""
    assert rewritten(text, ["/weights", "/out/"], "/R") == result


def test_without_mounts() -> None:
    """Command line and variables are rewritten, and say where."""
    assert without_mounts(["cat", "/w/x"], {"D": "/w"}, [Mount("/v", "/w")], "/R") == (
        ("cat", "/R/w/x"),
        {"D": "/R/w", "DEVCLUSTER_ROOT": "/R"},
    )


def launched(security: dict[str, Any], table: Image | None = None, *, switch: bool = True, **container: Any) -> Launch:
    """Give what is executed for a container with these security settings."""
    spec = {"name": "x", "command": ["run"], "securityContext": security, **container}
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [spec], "securityContext": {"fsGroup": 2000}}}
    return launch(
        pod,
        spec,
        table or Image(),
        {"A": "1"},
        (),
        isolation=Isolation.NAMESPACES,
        root=Path("/R"),
        hidden=Path("/H"),
        switch_user=switch,
    )


def test_security_context() -> None:
    """User, groups, read-only root and no new privileges reach the process."""
    security = {"runAsUser": 65532, "runAsGroup": 3, "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False}
    found = launched(security, runAsNonRoot=True)
    assert (found.uid, found.gid, found.groups) == (65532, 3, (2000,))
    assert (found.read_only, found.no_new_privileges) == (True, True)
    assert load(found.dump()) == found


def test_run_as_non_root() -> None:
    """A program that would be root is refused, as the kubelet does; the image's user counts."""
    with pytest.raises(Missing, match="runAsNonRoot"):
        launched({"runAsNonRoot": True})
    assert launched({"runAsNonRoot": True}, Image(user=1000)).uid == 1000
    assert launched({"runAsUser": 5}, switch=False).uid is None


def test_an_image_without_a_program() -> None:
    """Is refused with its name."""
    with pytest.raises(Missing, match="no command specified for image 'i'"):
        launched({}, command=[], image="i")


def test_fs_user() -> None:
    """Only a user that all containers share closes the tokens."""
    one = {"spec": {"containers": [{"name": "x", "securityContext": {"runAsUser": 7}}], "securityContext": {}}}
    assert fs_user(one) == 7
    two = {"spec": {"containers": [*one["spec"]["containers"], {"name": "y"}]}}
    assert fs_user(two) is None


CLAIM: dict[str, Any] = {
    "metadata": {"name": "c", "namespace": "n", "uid": "1"},
    "spec": {
        "storageClassName": "standard",
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
    },
    "status": {"phase": "Pending"},
}


def test_a_claim_of_our_class_gets_a_volume_of_its_own() -> None:
    """Made for it, so that the real controller binds the two."""
    assert wants_volume(CLAIM)
    volume = volume_for(CLAIM, Path("/claims"))
    assert volume["spec"]["claimRef"]["uid"] == "1"
    assert volume["spec"]["hostPath"] == {"path": "/claims/pvc-1", "type": "DirectoryOrCreate"}
    assert not wants_volume(CLAIM | {"spec": CLAIM["spec"] | {"storageClassName": "other"}})
    assert not wants_volume(CLAIM | {"status": {"phase": "Bound"}})


def test_only_released_volumes_of_ours_are_deleted() -> None:
    """Nothing else is touched."""
    volume = volume_for(CLAIM, Path("/claims"))
    assert not is_done_with(volume | {"status": {"phase": "Bound"}})
    assert is_done_with(volume | {"status": {"phase": "Released"}})
    volume["metadata"]["annotations"] = {}
    assert not is_done_with(volume | {"status": {"phase": "Released"}})
