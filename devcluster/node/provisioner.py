"""Volumes for claims: a folder of this machine for each, as a hostPath PersistentVolume made for it.

Serves the default StorageClass `standard`, which it creates. The real controllers bind; this only
makes what they bind to, and deletes folder and volume once the claim is gone. All nodes are the same
machine, so any pod on any of them may mount any claim, whatever its access mode says.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from devcluster.node.api import UNREACHABLE, Api, ApiError
from devcluster.node.informer import Informer, Key
from devcluster.node.pods import Json

log = logging.getLogger(__name__)
PROVISIONER = "devcluster.local/folder"
CLASS = "standard"
VOLUMES = "/api/v1/persistentvolumes"
RETRY_SECONDS = 1.0


def storage_class() -> Json:
    """The class that claims without one get."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "provisioner": PROVISIONER,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "Immediate",
    }


def wants_volume(claim: Mapping[str, Any]) -> bool:
    """Whether a claim waits for a volume of ours."""
    spec = claim["spec"]
    pending = (claim.get("status") or {}).get("phase", "Pending") == "Pending" and not spec.get("volumeName")
    ours = spec.get("storageClassName") == CLASS and not spec.get("selector") and not spec.get("dataSource")
    return pending and ours and not claim["metadata"].get("deletionTimestamp")


def volume_for(claim: Mapping[str, Any], folder: Path) -> Json:
    """The PersistentVolume for a claim, which nothing else can take."""
    metadata, spec = claim["metadata"], claim["spec"]
    name = f"pvc-{metadata['uid']}"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER}},
        "spec": {
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "accessModes": spec["accessModes"],
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": CLASS,
            "volumeMode": spec.get("volumeMode") or "Filesystem",
            "hostPath": {"path": str(folder / name), "type": "DirectoryOrCreate"},
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
        },
    }


def is_done_with(volume: Mapping[str, Any]) -> bool:
    """Whether a volume of ours has lost its claim and is to go."""
    ours = (volume["metadata"].get("annotations") or {}).get("pv.kubernetes.io/provisioned-by") == PROVISIONER
    released = (volume.get("status") or {}).get("phase") == "Released"
    deletable = volume["spec"].get("persistentVolumeReclaimPolicy") == "Delete"
    return ours and released and deletable and not volume["metadata"].get("deletionTimestamp")


class Provisioner:
    """Watches claims and volumes."""

    def __init__(self, api: Api, folder: Path) -> None:
        self._api, self._folder = api, folder
        self._wake = asyncio.Event()
        self._claims = Informer(api, "/api/v1/persistentvolumeclaims", self._changed)
        self._volumes = Informer(api, VOLUMES, self._changed)

    def _changed(self, _key: Key, _item: Json | None) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._claims.run())
            group.create_task(self._volumes.run())
            group.create_task(self._serve())

    async def _serve(self) -> None:
        await self._until_created("/apis/storage.k8s.io/v1/storageclasses", storage_class())
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._round()
            except (ApiError, *UNREACHABLE) as error:
                log.info("provisioner: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
                self._wake.set()

    async def _round(self) -> None:
        for claim in list(self._claims.objects.values()):
            if wants_volume(claim) and ("", f"pvc-{claim['metadata']['uid']}") not in self._volumes.objects:
                volume = volume_for(claim, self._folder)
                folder = Path(volume["spec"]["hostPath"]["path"])
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(0o777)
                await self._ignore(self._api.create(VOLUMES, volume), "AlreadyExists")
        for volume in list(self._volumes.objects.values()):
            if is_done_with(volume):
                shutil.rmtree(volume["spec"]["hostPath"]["path"], ignore_errors=True)
                await self._ignore(self._api.delete(f"{VOLUMES}/{volume['metadata']['name']}"), "NotFound")

    async def _ignore(self, call: Coroutine[Any, Any, Json], reason: str) -> None:
        """Make a call that another agent of this cluster may have made before."""
        try:
            await call
        except ApiError as error:
            if error.reason != reason:
                raise

    async def _until_created(self, path: str, body: Json) -> None:
        while True:
            try:
                return await self._ignore(self._api.create(path, body), "AlreadyExists")
            except (ApiError, *UNREACHABLE) as error:
                log.info("provisioner: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
