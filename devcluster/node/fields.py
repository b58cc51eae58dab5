"""The downward API: what a pod may be told about itself, in environment and volumes. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from devcluster.node import pods
from devcluster.node.quantity import whole

_KEYED = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")


@dataclass(frozen=True)
class Facts:
    """What the downward API may tell beyond the pod object itself."""

    pod: Mapping[str, Any]
    pod_ip: str
    host_ip: str
    allocatable: Mapping[str, str] = field(default_factory=dict)  # the node's, for limits that are not set


class UnknownField(ValueError):
    """A fieldRef or resourceFieldRef that no pod has."""


def field_value(facts: Facts, path: str) -> str:
    """The value of a fieldRef."""
    pod = facts.pod
    keyed = _KEYED.fullmatch(path)
    if keyed:
        return str((pod["metadata"].get(keyed[1]) or {}).get(keyed[2], ""))
    values: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "metadata.name": pods.name,
        "metadata.namespace": pods.namespace,
        "metadata.uid": pods.uid,
        "metadata.labels": lambda pod: _listing(pod["metadata"].get("labels") or {}),
        "metadata.annotations": lambda pod: _listing(pod["metadata"].get("annotations") or {}),
        "spec.nodeName": lambda pod: str(pod["spec"].get("nodeName") or ""),
        "spec.serviceAccountName": lambda pod: str(pod["spec"].get("serviceAccountName") or ""),
        "status.hostIP": lambda _: facts.host_ip,
        "status.hostIPs": lambda _: facts.host_ip,
        "status.podIP": lambda _: facts.pod_ip,
        "status.podIPs": lambda _: facts.pod_ip,
    }
    if path not in values:
        raise UnknownField(f"unsupported fieldRef {path!r}")
    return values[path](pod)


def resource_value(facts: Facts, ref: Mapping[str, Any], container: str | None = None) -> str:
    """The value of a resourceFieldRef, in units of its divisor; a missing limit is the node's."""
    name = ref.get("containerName") or container
    spec = pods.containers(facts.pod).get(str(name))
    sort, _, resource = str(ref["resource"]).partition(".")
    if spec is None or sort not in ("limits", "requests") or not resource:
        raise UnknownField(f"unsupported resourceFieldRef {ref['resource']!r} of container {name!r}")
    resources = spec.get("resources") or {}
    value = (resources.get(sort) or {}).get(resource)
    if value is None:
        value = facts.allocatable.get(resource, "0") if sort == "limits" else "0"
    return str(whole(value, ref.get("divisor") or "1"))


def _listing(pairs: Mapping[str, str]) -> str:
    """Labels as a file: one `key="value"` a line, sorted, quoted as Go and JSON do."""
    return "\n".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in sorted(pairs.items()))
