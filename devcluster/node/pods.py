"""Read a Pod object as the API server gives it: plain JSON, never changed here.

Everything that looks into `spec` for more than one module's sake is found here once. Pure: no clock,
no network, no files. It must not decide anything; decisions are in `plan`, `probes` and `podstatus`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Any

Json = dict[str, Any]


class Kind(Enum):
    """What a container is to its pod."""

    INIT = "init"  # runs to its end before the next one starts
    SIDECAR = "sidecar"  # an init container with restartPolicy Always: it stays while the pod runs
    MAIN = "main"


def kinds(pod: Mapping[str, Any]) -> dict[str, Kind]:
    """Every container's name in the order in which they start, with its kind."""
    spec = pod["spec"]
    found = {
        c["name"]: Kind.SIDECAR if c.get("restartPolicy") == "Always" else Kind.INIT
        for c in spec.get("initContainers") or ()
    }
    return found | {c["name"]: Kind.MAIN for c in spec["containers"]}


def containers(pod: Mapping[str, Any]) -> dict[str, Json]:
    """Every container's spec by name, init containers first."""
    spec = pod["spec"]
    return {c["name"]: c for c in (*(spec.get("initContainers") or ()), *spec["containers"])}


def uid(pod: Mapping[str, Any]) -> str:
    """The pod's uid."""
    return str(pod["metadata"]["uid"])


def name(pod: Mapping[str, Any]) -> str:
    """The pod's name."""
    return str(pod["metadata"]["name"])


def namespace(pod: Mapping[str, Any]) -> str:
    """The pod's namespace."""
    return str(pod["metadata"]["namespace"])


def path(pod: Mapping[str, Any]) -> str:
    """The pod's address on the API server."""
    return f"/api/v1/namespaces/{namespace(pod)}/pods/{name(pod)}"


def restart_policy(pod: Mapping[str, Any]) -> str:
    """`Always`, `OnFailure` or `Never`, for the containers that are no sidecars."""
    return str(pod["spec"].get("restartPolicy") or "Always")


def grace(pod: Mapping[str, Any]) -> float:
    """Seconds the pod's containers have to end, unless its deletion says otherwise."""
    value = pod["spec"].get("terminationGracePeriodSeconds")
    return 30.0 if value is None else float(value)


def deletion_grace(pod: Mapping[str, Any]) -> float | None:
    """Seconds the pod has to end if it is being deleted."""
    if not pod["metadata"].get("deletionTimestamp"):
        return None
    value = pod["metadata"].get("deletionGracePeriodSeconds")
    return grace(pod) if value is None else float(value)


def is_terminal(pod: Mapping[str, Any]) -> bool:
    """Whether somebody has already declared the pod over, this agent or an eviction."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def hostname(pod: Mapping[str, Any]) -> str:
    """What the pod's containers get as host name."""
    return str(pod["spec"].get("hostname") or name(pod))[:63].rstrip("-.")


def run_as(pod: Mapping[str, Any], container: Mapping[str, Any], field: str) -> Any:
    """A field of the container's securityContext, or else of the pod's."""
    own = (container.get("securityContext") or {}).get(field)
    return (pod["spec"].get("securityContext") or {}).get(field) if own is None else own


def timestamp(seconds: float) -> str:
    """Write a moment as the API does: RFC 3339, whole seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_timestamp(seconds: float) -> str:
    """Write a moment as a Lease does: RFC 3339 with microseconds."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds(text: str) -> float:
    """Read a moment the API wrote."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
