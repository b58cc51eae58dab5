"""The pytest plug-in: a control plane for the whole run, and a fresh namespace for each test.

Load it with `pytest_plugins = ["devcluster.testing"]` or `-p devcluster.testing`. Workers of pytest-xdist
share one control plane, since tests mostly wait and each control plane takes half a gigabyte. So a test must not
break the shared one: tests of faults start a `ControlPlane` of their own.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster import binaries
from devcluster.access import Access, ApiError
from devcluster.controlplane import ControlPlane
from devcluster.sharing import shared

SERVICE_ACCOUNT_SECONDS = 30.0


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the programs before the first test runs: building them takes longer than a test may."""
    wanted = {"cluster", "kube_programs"}
    if not session.config.option.collectonly and any(wanted & set(_fixtures(item)) for item in session.items):
        binaries.ensure()


@pytest.fixture(scope="session")
def kube_programs() -> Path:
    """Give the folder of etcd, kube-apiserver and the others."""
    return binaries.ensure()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, kube_programs: Path) -> Iterator[Access]:
    """Give the control plane that all tests of this run share."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the folder above the workers' own
    with shared(folder / "devcluster", lambda: ControlPlane(programs=kube_programs)) as access:
        yield access


@pytest.fixture
def namespace(cluster: Access) -> Iterator[str]:
    """Give the name of a new namespace in which pods can be created; it is deleted without waiting for that."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    path = f"/api/v1/namespaces/{name}"
    cluster.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    _until_found(cluster, f"{path}/serviceaccounts/default")
    yield name
    cluster.request("DELETE", path)


def _until_found(cluster: Access, path: str) -> None:
    """Wait for what a controller makes."""
    deadline = time.monotonic() + SERVICE_ACCOUNT_SECONDS
    while True:
        try:
            cluster.request("GET", path)
            return
        except ApiError as error:
            if error.code != 404 or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def _fixtures(item: pytest.Item) -> list[str]:
    return list(getattr(item, "fixturenames", ()))
