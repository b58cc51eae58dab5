"""A checkpoint, and the version it came from, into a store: the whole work of a delta Job.

The parent is read from its own directory while that still holds what its manifest says, and rebuilt from the store
otherwise. Everything is idempotent: names are digests, what exists is left alone, and the version's name comes last,
so that a version appears whole or not at all.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from weightsync import graph
from weightsync.bundle import Bundle, Version
from weightsync.checkpoint import Checkpoint
from weightsync.delta.diff import ParentChanged
from weightsync.delta.format import SHARD_BYTES
from weightsync.delta.make import Made, make_delta, make_full
from weightsync.digests import Progress, silent
from weightsync.errors import CheckpointError, InputError, NoPath, SourceChanged, StoreConflict, StoreNotFound
from weightsync.files import writing
from weightsync.manifest import Edge
from weightsync.parallel import Workers
from weightsync.pull import pull
from weightsync.remote import KEY, Remote
from weightsync.store import names


@dataclass(frozen=True)
class Parent:
    """The version a checkpoint came from: its name (or manifest sha256), and where its checkpoint may still lie."""

    version: str
    source: Path | None = None


@dataclass(frozen=True)
class Published:
    """What `publish` did. Bytes: all tensors, the cheapest edge from the parent, and what was sent now.

    `elements` count words, see `Schema.total_words`; `non_finite` counts infinities and NaNs among those written.
    """

    version: str
    manifest: str
    weights: str
    content: str
    edges: list[dict[str, object]]
    full_bytes: int
    delta_bytes: int | None
    sent_bytes: int
    total: int
    changed: int | None
    non_finite: int
    parent_from: str | None
    notes: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def publish(
    source: Path,
    remote: Remote,
    version: str,
    scratch: Path,
    workers: Workers,
    *,
    parent: Parent | None = None,
    full_ratio: float = 0.5,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = silent,
) -> Published:
    """Publish the checkpoint at `source` as `version`, with `scratch` (an empty or new folder) to work in.

    A Full edge is written when there is no parent, when its tensors differ, or when the deltas since the last Full
    edge together exceed `full_ratio` of it. Raises `SourceChanged` when the name already stands for other weights,
    `StoreNotFound` when the parent is not published, `CheckpointError` when the source is not a checkpoint.
    """
    clock = _Clock()
    names.check_version(version)
    existing = _existing(remote, version)
    checkpoint = Checkpoint.open(source)
    notes: list[str] = []
    base, parent_from, delta = None, None, None
    if parent is not None:
        base = remote.fetch_version(remote.resolve(parent.version), Bundle(scratch / "parent"), whole=True)
        if checkpoint.single and base.manifest.assets:
            raise InputError(f"{source}: is one file, but the parent has small files too; publish the directory")
        if base.schema == checkpoint.schema:
            delta, parent_from = _delta(
                checkpoint, base, parent, remote, scratch, workers, shard_bytes, progress, clock
            )
        else:
            lines = "; ".join(base.schema.differences(checkpoint.schema))
            notes.append(f"tensors differ from the parent's, so a Full edge was written: {lines}")
    full = None
    if _full_is_due(remote, base, delta, full_ratio):
        bundle = _fresh(scratch / "full")
        full = (
            make_full(checkpoint, bundle, workers, model=remote.model, shard_bytes=shard_bytes, progress=progress),
            bundle,
        )
        clock.lap("full")
    made = [pair for pair in (delta, full) if pair is not None]
    target = made[0][0].target
    if any(one.target.sha256 != target.sha256 for one, _ in made):
        raise SourceChanged(f"{source}: changed while it was read; publish it when its writer has finished")
    for other in existing:
        if other == target.sha256:
            continue
        where = _difference(checkpoint, target, remote.fetch_version(other, Bundle(scratch / "existing")))
        raise SourceChanged(
            f"{source}: version {version!r} of {remote.model!r} is already published with other contents ({where}; "
            f"manifest {other[:16]}, now {target.sha256[:16]}); versions are immutable, choose a new name"
        )
    sent = _upload(remote, version, made)
    clock.lap("upload")
    edges = [pair[0].edge for pair in made if not _is_loop(pair[0].edge)]
    return Published(
        version=version,
        manifest=target.sha256,
        weights=target.manifest.weights,
        content=target.manifest.content,
        edges=[_summary(edge) for edge in edges],
        full_bytes=target.schema.total_bytes,
        delta_bytes=delta[0].edge.size if delta else None,
        sent_bytes=sent,
        total=target.schema.total_words,
        changed=delta[0].edge.changed if delta else None,
        non_finite=sum(pair[0].non_finite for pair in made[:1]),
        parent_from=parent_from,
        notes=notes,
        ignored=checkpoint.contents[1],
        seconds=clock.laps,
    )


def _existing(remote: Remote, version: str) -> list[str]:
    """The manifests that the version's name stands for; a store that is not there yet holds no version."""
    try:
        return remote.find(version)
    except StoreNotFound:
        return []


def _claim(remote: Remote, version: str, manifest: str) -> None:
    """Give the manifest its name, unless another publisher gave it to other weights meanwhile.

    Stores have no conditional write, so the name is put first and looked at afterwards: of two publishers at least the
    later one sees both names, and withdraws its own. Both may.
    """
    path = names.name_path(remote.model, version, manifest)
    remote.store.put({path: b""})
    if set(remote.find(version)) - {manifest}:
        remote.store.delete([path])
        raise StoreConflict(
            f"{remote.store.url}: another publisher gave the name {version!r} to other weights at the same time; this one "
            "withdrew, look at what the name stands for, or choose a new one"
        )


def _difference(checkpoint: Checkpoint, now: Version, then: Version) -> str:
    """Where two versions of one name part, for the message."""
    if now.schema != then.schema:
        return "; ".join(now.schema.differences(then.schema))
    different = np.flatnonzero((now.digests != then.digests).any(axis=1))
    if len(different):
        tensor, _ = now.schema.locate(int(different[0]))
        file = checkpoint.paths[int(checkpoint.file_of[tensor])].name
        return f"{len(different)} chunks differ, the first in tensor {now.schema.name(tensor)!r} of {file}"
    changed = sorted({asset.path for asset in set(now.manifest.assets) ^ set(then.manifest.assets)})
    return f"{', '.join(changed)} differ" if changed else "the files are laid out otherwise"


def _delta(
    checkpoint: Checkpoint,
    base: Version,
    parent: Parent,
    remote: Remote,
    scratch: Path,
    workers: Workers,
    shard_bytes: int,
    progress: Progress,
    clock: _Clock,
) -> tuple[tuple[Made, Bundle], str]:
    """The edge from the parent, whose weights come from its source, or from the store when that holds something else."""
    for origin in ("source", "store"):
        bundle = _fresh(scratch / "delta")
        try:
            old = _parent(origin, base, parent, remote, scratch, workers)
            if old is None:
                continue
            clock.lap("parent")
            made = make_delta(
                old,
                checkpoint,
                bundle,
                workers,
                model=remote.model,
                base=base,
                shard_bytes=shard_bytes,
                progress=progress,
            )
        except ParentChanged:
            if origin == "store":
                raise
            continue
        clock.lap("delta")
        shutil.rmtree(scratch / "rebuilt", ignore_errors=True)
        return (made, bundle), origin
    raise NoPath(f"the parent {parent.version!r} can be had neither from its source nor from the store")


def _parent(
    origin: str, base: Version, parent: Parent, remote: Remote, scratch: Path, workers: Workers
) -> Checkpoint | None:
    if origin == "store":
        pull(remote, base.sha256, scratch / "rebuilt", workers)
        return Checkpoint.open(scratch / "rebuilt")
    if parent.source is None:
        return None
    with suppress(CheckpointError):
        old = Checkpoint.open(parent.source)
        return old if old.schema == base.schema else None
    return None


def _full_is_due(remote: Remote, base: Version | None, delta: tuple[Made, Bundle] | None, ratio: float) -> bool:
    """Whether somebody who starts from nothing deserves a new starting point."""
    if base is None or delta is None:
        return True
    since = graph.since_full(remote.links(), base.manifest.weights[:KEY])
    return since is None or since[0] + delta[0].edge.size > ratio * since[1]


def _upload(remote: Remote, version: str, made: Sequence[tuple[Made, Bundle]]) -> int:
    """Put everything in the order that never leaves a name pointing at something that is not there yet."""
    target, model, sent = made[0][0].target, remote.model, 0
    contents: dict[str, Path | bytes] = {}
    edges: dict[str, Path | bytes] = {}
    for one, bundle in made:
        contents |= {names.blob_path(model, blob): bundle.blob_path(blob) for blob in target.manifest.blobs}
        edge = one.edge
        if _is_loop(edge):
            continue
        contents |= {names.data_path(model, data.sha256): bundle.data_path(data.sha256) for data in edge.data}
        base = edge.base.weights if edge.base else None
        edges[names.edge_path(model, edge.target.weights, base, edge.size, edge.sha256)] = edge.pack()
    for batch in (
        contents,
        edges,
        {names.manifest_path(model, target.sha256): target.manifest.pack()},
    ):
        if batch:
            sent += remote.store.put(batch)
    _claim(remote, version, target.sha256)
    return sent


def _is_loop(edge: Edge) -> bool:
    """Weights that did not change need no edge."""
    return edge.base is not None and edge.base.weights == edge.target.weights


def _summary(edge: Edge) -> dict[str, object]:
    return {
        "base": edge.base.weights if edge.base else None,
        "bytes": edge.size,
        "digest": edge.sha256,
        "kind": edge.kind,
        "requires": list(edge.requires),
        "reversible": edge.reversible,
    }


def _fresh(folder: Path) -> Bundle:
    with writing(folder):
        if folder.exists():
            shutil.rmtree(folder)
    bundle = Bundle(folder)
    bundle.start()
    return bundle


class _Clock:
    """Seconds since the last lap, by the name of what they went to."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = round(self.laps.get(name, 0.0) + now - self._last, 3)
        self._last = now
