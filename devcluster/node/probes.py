"""The arithmetic of probes: their defaults, and when a row of results becomes a verdict. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from devcluster.node.pods import Json


class Role(Enum):
    """What a probe decides."""

    STARTUP = "startupProbe"
    READINESS = "readinessProbe"
    LIVENESS = "livenessProbe"


@dataclass(frozen=True)
class Probe:
    """One probe of a container, defaults filled in."""

    role: Role
    action: Json = field(hash=False)  # holds httpGet, tcpSocket or exec
    initial_delay: float = 0.0
    period: float = 10.0
    timeout: float = 1.0
    successes: int = 1
    failures: int = 3
    grace: float | None = None


@dataclass(frozen=True)
class Tally:
    """A probe's verdict so far: None until a row of results was long enough."""

    verdict: bool | None = None
    last: bool | None = None
    row: int = 0


def probes(container: Mapping[str, Any]) -> dict[Role, Probe]:
    """The probes a container has."""
    found = {}
    for role in Role:
        spec = container.get(role.value)
        if spec:
            grace = spec.get("terminationGracePeriodSeconds")
            found[role] = Probe(
                role,
                spec,
                float(spec.get("initialDelaySeconds") or 0),
                float(spec.get("periodSeconds") or 10),
                float(spec.get("timeoutSeconds") or 1),
                int(spec.get("successThreshold") or 1),
                int(spec.get("failureThreshold") or 3),
                None if grace is None else float(grace),
            )
    return found


def counted(probe: Probe, tally: Tally, passed: bool) -> Tally:
    """The tally after one more result."""
    row = tally.row + 1 if passed is tally.last else 1
    if row < (probe.successes if passed else probe.failures):
        return Tally(tally.verdict, passed, row)
    return Tally(passed, passed, row)


def port(value: int | str, container: Mapping[str, Any]) -> int:
    """A probe's port as a number; a name stands for one of the container's ports."""
    if isinstance(value, int):
        return value
    for entry in container.get("ports") or ():
        if entry.get("name") == value:
            return int(entry["containerPort"])
    if value.isdecimal():
        return int(value)
    raise ValueError(f"no port of the container is named {value!r}")


def url(action: Json, container: Mapping[str, Any], pod_ip: str) -> str:
    """Where an httpGet probe or hook asks."""
    scheme = str(action.get("scheme") or "HTTP").lower()
    path = str(action.get("path") or "/")
    return f"{scheme}://{action.get('host') or pod_ip}:{port(action['port'], container)}/{path.lstrip('/')}"
