"""What a node says of itself: its Node object, its conditions, its Lease. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from devcluster.node import pods
from devcluster.node.pods import Json

LEASE_NAMESPACE = "kube-node-lease"
RUNTIME_VERSION = "process://1"
# Plenty, and not what the machine has: nothing enforces it, and pods that fit a real node shall fit here.
CAPACITY = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "512Gi", "pods": "250", "hugepages-2Mi": "0"}
GPU_LABELS = {
    "nvidia.com/gpu.present": "true",
    "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    "nvidia.com/gpu.family": "hopper",
    "nvidia.com/gpu.memory": "81559",
}
GPU_TAINT = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class NodeSpec:
    """A node to be."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Mapping[str, str], ...] = ()
    capacity: Mapping[str, str] = field(default_factory=dict)  # over the defaults


def cpu_node(name: str = "node-cpu") -> NodeSpec:
    """An ordinary node."""
    return NodeSpec(name)


def gpu_node(name: str = "node-gpu", gpus: int = 8) -> NodeSpec:
    """A node with GPUs, labelled and tainted as the usual operators do it."""
    labels = {**GPU_LABELS, "nvidia.com/gpu.count": str(gpus)}
    return NodeSpec(name, labels, (GPU_TAINT,), {"nvidia.com/gpu": str(gpus)})


def allocatable(spec: NodeSpec) -> dict[str, str]:
    """What pods may ask for."""
    return {**CAPACITY, **spec.capacity}


def node_object(spec: NodeSpec) -> Json:
    """The Node to create."""
    machine = _MACHINES.get(os.uname().machine, os.uname().machine)
    labels = {"kubernetes.io/hostname": spec.name, "kubernetes.io/os": "linux", "kubernetes.io/arch": machine}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": spec.name, "labels": {**labels, **spec.labels}},
        "spec": {"taints": [dict(taint) for taint in spec.taints]} if spec.taints else {},
    }


def missing_metadata(spec: NodeSpec, node: Mapping[str, Any]) -> Json | None:
    """A merge patch for the labels a registered Node lacks."""
    have = node["metadata"].get("labels") or {}
    lacking = {k: v for k, v in node_object(spec)["metadata"]["labels"].items() if have.get(k) != v}
    return {"metadata": {"labels": lacking}} if lacking else None


def node_status(
    spec: NodeSpec, old: Mapping[str, Any], now: float, *, ip: str, port: int, version: str, started: float
) -> Json:
    """The Node's status: ready, with all there is of it."""
    uname = os.uname()
    info = {
        "machineID": "",
        "systemUUID": "",
        "bootID": f"{started:.6f}",  # a new one tells that all pods' processes were lost
        "kernelVersion": uname.release,
        "osImage": "devcluster: processes of this machine, no isolation",
        "containerRuntimeVersion": RUNTIME_VERSION,
        "kubeletVersion": version,
        "kubeProxyVersion": "",
        "operatingSystem": "linux",
        "architecture": _MACHINES.get(uname.machine, uname.machine),
    }
    resources = allocatable(spec)
    return {
        "capacity": resources,
        "allocatable": resources,
        "addresses": [{"type": "InternalIP", "address": ip}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        "nodeInfo": info,
        "conditions": _conditions(old, now),
    }


def _conditions(old: Mapping[str, Any], now: float) -> list[Json]:
    before = {c["type"]: c for c in old.get("conditions") or ()}
    wanted = {
        "MemoryPressure": ("False", "KubeletHasSufficientMemory", "not looked at"),
        "DiskPressure": ("False", "KubeletHasNoDiskPressure", "not looked at"),
        "PIDPressure": ("False", "KubeletHasSufficientPID", "not looked at"),
        "Ready": ("True", "KubeletReady", "the node agent is running"),
    }
    result = []
    for kind, (status, reason, message) in wanted.items():
        same = before.get(kind, {}).get("status") == status
        result.append(
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "lastHeartbeatTime": pods.timestamp(now),
                "lastTransitionTime": before[kind]["lastTransitionTime"] if same else pods.timestamp(now),
            }
        )
    return result


def lease(spec: NodeSpec, node_uid: str, now: float, seconds: int, known: Mapping[str, Any] | None) -> Json:
    """The node's Lease, renewed; the known one's version is kept so that two agents notice each other."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": spec.name, "uid": node_uid}
    metadata: Json = {"name": spec.name, "namespace": LEASE_NAMESPACE, "ownerReferences": [owner]}
    if known:
        metadata["resourceVersion"] = known["metadata"]["resourceVersion"]
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {
            "holderIdentity": spec.name,
            "leaseDurationSeconds": seconds,
            "renewTime": pods.micro_timestamp(now),
        },
    }
