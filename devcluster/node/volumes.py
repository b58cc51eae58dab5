"""A pod's volumes on this machine: make them, keep their files current, take them away.

Every volume is a folder (or, for a hostPath, whatever is there); containers get bind mounts of it.
What a file volume holds is decided in `payloads`; this module only fetches and writes.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from devcluster.node import atomic, payloads, pods
from devcluster.node.api import Api
from devcluster.node.environment import Missing
from devcluster.node.fields import Facts
from devcluster.node.inside import syscalls
from devcluster.node.inside.spec import Mount
from devcluster.node.launching import fs_user, pods_security
from devcluster.node.mounts import VolumeMount
from devcluster.node.pods import Json
from devcluster.node.quantity import whole
from devcluster.node.references import References

log = logging.getLogger(__name__)
SHM_BYTES = 64 << 20  # what container runtimes give a pod as /dev/shm


class VolumeProblem(RuntimeError):
    """A volume that is not to be had now, maybe never."""


class Volumes:
    """The volumes of one pod."""

    def __init__(self, api: Api, references: References, folder: Path, *, can_mount: bool, switch_user: bool) -> None:
        self._api, self._references = api, references
        self._folder = folder / "volumes"
        self._shm = folder / "shm"
        self._can_mount, self._switch_user = can_mount, switch_user
        self._sources: dict[str, Path] = {}
        self._mounted: set[Path] = set()

    async def prepare(self, pod: Mapping[str, Any], facts: Facts) -> None:
        """Make every volume; raises VolumeProblem if one cannot be had now. May be called again."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tmpfs(self._shm, SHM_BYTES)
        for volume in pod["spec"].get("volumes") or ():
            self._sources[volume["name"]] = await self._prepare(pod, volume)
        await self.refresh(pod, facts)

    async def refresh(self, pod: Mapping[str, Any], facts: Facts) -> None:
        """Write what ConfigMaps, Secrets, tokens and the pod itself say now into the file volumes."""
        own = [v for v in pod["spec"].get("volumes") or () if any(v.get(kind) is not None for kind in payloads.KINDS)]
        fetched = await self._references.fetch(pod, [ref for volume in own for ref in payloads.needs(volume)])
        group, user = pods_security(pod).get("fsGroup"), fs_user(pod)
        problems = []
        for volume in own:
            tokens = payloads.token_paths(volume)
            try:
                files = payloads.private(payloads.files(volume, fetched, facts), tokens, group, user)
            except Missing as error:
                problems.append(f'MountVolume.SetUp failed for volume "{volume["name"]}" : {error}')
                continue
            owner = (user if tokens else None, group) if self._switch_user else (None, None)
            atomic.write(self._sources[volume["name"]], files, *owner)
        if problems:
            raise VolumeProblem("; ".join(problems))

    async def _prepare(self, pod: Mapping[str, Any], volume: Json) -> Path:
        folder = self._folder / str(volume["name"])
        if "emptyDir" in volume:
            return self._empty_dir(pod, volume["emptyDir"] or {}, folder)
        if "hostPath" in volume:
            return _host_path(volume["hostPath"])
        if "persistentVolumeClaim" in volume:
            return await self._claim(pod, volume["persistentVolumeClaim"]["claimName"])
        if "ephemeral" in volume:
            return await self._claim(pod, f"{pods.name(pod)}-{volume['name']}")
        if any(volume.get(kind) is not None for kind in payloads.KINDS):
            folder.mkdir(exist_ok=True)
            return folder
        kind = next((key for key in volume if key != "name"), "?")
        raise VolumeProblem(f"volume {volume['name']!r}: {kind} is not supported on this node")

    def _empty_dir(self, pod: Mapping[str, Any], source: Json, folder: Path) -> Path:
        limit = source.get("sizeLimit")
        if source.get("medium") == "Memory":
            self._tmpfs(folder, whole(limit) if limit and whole(limit) else None)
        else:
            folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        group = pods_security(pod).get("fsGroup")
        if group is not None and self._switch_user:
            os.chown(folder, -1, int(group))
            folder.chmod(0o2777)
        return folder

    def _tmpfs(self, folder: Path, size: int | None) -> None:
        """A folder in memory; without the right to mount, a plain one."""
        folder.mkdir(exist_ok=True)
        if self._can_mount and folder not in self._mounted:
            options = "mode=1777" if size is None else f"mode=1777,size={size}"
            syscalls.mount("tmpfs", str(folder), "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)
            self._mounted.add(folder)

    async def _claim(self, pod: Mapping[str, Any], name: str) -> Path:
        """The folder behind a bound claim."""
        claim = await self._api.find(f"/api/v1/namespaces/{pods.namespace(pod)}/persistentvolumeclaims/{name}")
        if claim is None:
            raise VolumeProblem(f'persistentvolumeclaim "{name}" not found')
        if (claim.get("status") or {}).get("phase") != "Bound":
            raise VolumeProblem(f'persistentvolumeclaim "{name}" is not bound')
        volume = await self._api.get(f"/api/v1/persistentvolumes/{claim['spec']['volumeName']}")
        spec = volume["spec"]
        if "hostPath" not in spec and "local" not in spec:
            raise VolumeProblem(f"PersistentVolume {volume['metadata']['name']} is no folder of this machine")
        return _host_path(spec.get("hostPath") or spec["local"])

    def mounts(self, wanted: list[VolumeMount]) -> tuple[Mount, ...]:
        """Where a container's mounts come from; makes the sub-paths they name."""
        found = []
        for mount in wanted:
            if mount.volume not in self._sources:
                raise VolumeProblem(f"volume {mount.volume!r} is not defined")
            volume = self._sources[mount.volume]
            source = volume / mount.sub_path if mount.sub_path else volume
            if mount.sub_path:
                try:
                    inside = source.resolve().is_relative_to(volume.resolve())
                except (OSError, RuntimeError) as error:  # a loop of links is the one or the other, by Python's version
                    raise VolumeProblem(f"subPath {mount.sub_path!r} leads nowhere: {error}") from error
                if not inside:
                    raise VolumeProblem(f"subPath {mount.sub_path!r} leads out of volume {mount.volume!r}")
                if not source.exists():
                    source.mkdir(parents=True)
                source = source.resolve()
            found.append(Mount(str(source), mount.target, mount.read_only))
        if self._can_mount and not any(mount.target == "/dev/shm" for mount in wanted):
            found.append(Mount(str(self._shm), "/dev/shm"))
        return tuple(found)

    def remove(self) -> None:
        """Delete what was the pod's own; claims and host paths stay."""
        self.unmount()
        shutil.rmtree(self._folder, ignore_errors=True)

    def unmount(self) -> None:
        """Give up what is in memory."""
        for folder in self._mounted:
            with suppress(OSError):
                syscalls.unmount(str(folder))
        self._mounted.clear()


def _host_path(source: Json) -> Path:
    """A path of this machine, made if its type says so."""
    path, kind = Path(source["path"]), str(source.get("type") or "")
    if kind == "DirectoryOrCreate" or (not kind and not path.exists()):
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate":
        path.touch()
    checks = {"Directory": path.is_dir, "File": path.is_file, "Socket": path.is_socket, "": path.exists}
    if not checks.get(kind, path.exists)():
        raise VolumeProblem(f"hostPath {path} is not a {kind or 'path of this machine'}")
    return path
