"""Which host paths a container sees where, and what takes their place without mounts. Pure.

Without the right to mount, a container's volumes lie below a folder of its own, under their mount
paths: `$DEVCLUSTER_ROOT/weights` for `/weights`. Programs may use the variable; and where a mount path
stands in the command line or in a variable, it is rewritten, which is enough for most.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devcluster.node import pods
from devcluster.node.environment import expand
from devcluster.node.inside.spec import Mount

ROOT_VARIABLE = "DEVCLUSTER_ROOT"
DEFAULT_TERMINATION_PATH = "/dev/termination-log"


@dataclass(frozen=True)
class VolumeMount:
    """One entry of `volumeMounts`, ready to be resolved on disk."""

    volume: str
    sub_path: str
    target: str
    read_only: bool


def volume_mounts(container: Mapping[str, Any], variables: Mapping[str, str]) -> list[VolumeMount]:
    """A container's volume mounts with `subPathExpr` expanded; raises ValueError for one that leads out."""
    found = []
    for entry in container.get("volumeMounts") or ():
        sub = str(entry.get("subPath") or expand(str(entry.get("subPathExpr") or ""), variables))
        if sub.startswith("/") or ".." in Path(sub).parts:
            raise ValueError(f"subPath {sub!r} of volume {entry['name']} leads out of the volume")
        found.append(VolumeMount(entry["name"], sub, str(entry["mountPath"]), bool(entry.get("readOnly"))))
    return found


def termination_path(container: Mapping[str, Any]) -> str:
    """Where a container may leave its last words."""
    return str(container.get("terminationMessagePath") or DEFAULT_TERMINATION_PATH)


def hosts(pod: Mapping[str, Any], own: str, pod_ip: str) -> str:
    """The pod's /etc/hosts: the host's, the pod itself, and its hostAliases."""
    lines = [own.rstrip("\n"), f"{pod_ip}\t{pods.hostname(pod)}"]
    lines += [
        f"{alias['ip']}\t{' '.join(alias.get('hostnames') or ())}" for alias in pod["spec"].get("hostAliases") or ()
    ]
    return "\n".join(lines) + "\n"


def rewritten(text: str, targets: Iterable[str], root: str) -> str:
    """Put the container's folder before every mount path that stands in a text as a path of its own."""
    paths = sorted({target.rstrip("/") for target in targets} - {""}, key=len, reverse=True)
    if not paths:
        return text
    pattern = r"(?<![\w./-])(" + "|".join(map(re.escape, paths)) + r")(?![\w.-])"
    return re.sub(pattern, lambda match: root + match[0], text)


def without_mounts(
    argv: Iterable[str], env: Mapping[str, str], mounts: Iterable[Mount], root: str
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Command line and variables for a container whose mounts lie below `root` instead."""
    targets = [mount.target for mount in mounts]
    line = tuple(rewritten(word, targets, root) for word in argv)
    variables = {name: rewritten(value, targets, root) for name, value in env.items()}
    return line, variables | {ROOT_VARIABLE: root}
