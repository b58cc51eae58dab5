"""From a container's spec to what is executed for it. Pure; refusals are the kubelet's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from devcluster.node import pods
from devcluster.node.environment import Missing, command
from devcluster.node.images import Image
from devcluster.node.inside.spec import Launch, Mount
from devcluster.node.mounts import without_mounts
from devcluster.node.spawn import Isolation

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def base_variables(pod: Mapping[str, Any], image: Image, cluster: Mapping[str, str]) -> dict[str, str]:
    """What a container's environment begins with: runtime, node, image."""
    home = "/root" if not image.user else "/"
    return {"PATH": PATH, "HOME": home, "HOSTNAME": pods.hostname(pod), **cluster, **image.env}


def launch(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    image: Image,
    env: Mapping[str, str],
    mounts: tuple[Mount, ...],
    *,
    isolation: Isolation,
    root: Path,
    hidden: Path,
    switch_user: bool,
) -> Launch:
    """The program of a container; raises Missing if it has none or may not run."""
    argv = tuple(command(container, image.entrypoint, image.args, env))
    if not argv:
        raise Missing(f"no command specified for image {container.get('image')!r}")
    uid, gid, groups = user(pod, container, image, switch_user=switch_user)
    variables = dict(env)
    isolated = isolation is Isolation.NAMESPACES
    if not isolated:
        argv, variables = without_mounts(argv, variables, mounts, str(root))
    security = container.get("securityContext") or {}
    return Launch(
        argv,
        variables,
        cwd=str(container.get("workingDir") or image.working_dir),
        uid=uid,
        gid=gid,
        groups=groups,
        no_new_privileges=security.get("allowPrivilegeEscalation") is False,
        hostname=pods.hostname(pod),
        root=str(root) if isolated else None,
        read_only=bool(security.get("readOnlyRootFilesystem")),
        mounts=mounts,  # without isolation only for what is executed inside later
        hidden=str(hidden),
    )


def user(
    pod: Mapping[str, Any], container: Mapping[str, Any], image: Image, *, switch_user: bool
) -> tuple[int | None, int | None, tuple[int, ...]]:
    """User, group and further groups; None leaves the agent's own."""
    uid = pods.run_as(pod, container, "runAsUser")
    uid = image.user if uid is None else int(uid)
    if pods.run_as(pod, container, "runAsNonRoot") and not uid:
        raise Missing("container has runAsNonRoot and image will run as root")
    if not switch_user:
        return None, None, ()
    gid = pods.run_as(pod, container, "runAsGroup")
    security = pods_security(pod)
    groups = {int(group) for group in security.get("supplementalGroups") or ()}
    if security.get("fsGroup") is not None:
        groups.add(int(security["fsGroup"]))
    if uid is None and gid is None and not groups:
        return None, None, ()
    return uid or 0, int(gid or 0), tuple(sorted(groups))


def pods_security(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The pod's own securityContext."""
    return pod["spec"].get("securityContext") or {}


def fs_user(pod: Mapping[str, Any]) -> int | None:
    """The user that all containers of a pod run as, if there is one: tokens are closed to others."""
    users = {pods.run_as(pod, container, "runAsUser") for container in pods.containers(pod).values()}
    return int(users.pop()) if len(users) == 1 and None not in users else None
