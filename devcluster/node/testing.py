"""The pytest plug-in for tests with nodes: one cluster for the whole run, and a namespace for each test.

Load it with `pytest_plugins = ["devcluster.testing", "devcluster.node.testing"]`. Tests share the cluster, so
one that breaks a node starts one of its own beside them with `Space.with_own_node`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from devcluster.access import Access
from devcluster.controlplane import ControlPlane
from devcluster.node.client import NodesClient
from devcluster.node.nodes import Nodes, folder_of
from devcluster.node.space import IMAGES, Space
from devcluster.sharing import shared

# So that a node that fell silent is noticed in seconds.
FLAGS = {"kube-controller-manager": ["--node-monitor-period=1s", "--node-monitor-grace-period=6s"]}


@contextmanager
def _start(programs: Path) -> Iterator[Access]:
    with ControlPlane(programs=programs, flags=FLAGS) as plane, Nodes(plane, IMAGES, heartbeat=1.0):
        yield plane


@pytest.fixture(scope="session")
def cluster_with_nodes(tmp_path_factory: pytest.TempPathFactory, kube_programs: Path) -> Iterator[Access]:
    """Give the control plane with nodes that all tests of this run share."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the folder above the workers' own
    with shared(folder / "devcluster-nodes", lambda: _start(kube_programs)) as access:
        yield access


@pytest.fixture
def space(cluster_with_nodes: Access, tmp_path: Path) -> Iterator[Space]:
    """Give a new namespace in which pods run; it is deleted without waiting for that."""
    access = cluster_with_nodes
    result = Space(access, NodesClient(folder_of(access)), f"test-{uuid.uuid4().hex[:8]}", tmp_path)
    access.request("POST", "/api/v1/namespaces", {"metadata": {"name": result.name}})
    result.until(lambda: result.list("ServiceAccount"), bool)
    result.until(lambda: result.list("ConfigMap"), bool)
    yield result
    access.request("DELETE", f"/api/v1/namespaces/{result.name}")
