"""Making whole bundles: an edge with its data files, both manifests and their blobs, from checkpoints or other bundles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightsync.bundle import Bundle, Version, describe
from weightsync.checkpoint import Checkpoint
from weightsync.delta.diff import ParentChanged, Scan, write_delta, write_full
from weightsync.delta.format import SHARD_BYTES
from weightsync.delta.merge import Hop, write_merged
from weightsync.delta.step import Step, need_steps
from weightsync.delta.writer import DeltaWriter
from weightsync.digests import Progress, silent
from weightsync.errors import SourceChanged
from weightsync.manifest import Data, Edge, Kind
from weightsync.parallel import Workers


@dataclass(frozen=True)
class Made:
    """A finished edge and its ends (`base` None for Full); counts are of words, see `Schema.total_words`."""

    edge: Edge
    base: Version | None
    target: Version
    records: int
    non_finite: int

    @property
    def full_bytes(self) -> int:
        """Bytes of all tensors of the target."""
        return self.target.schema.total_bytes


def make_delta(
    old: Checkpoint,
    new: Checkpoint,
    bundle: Bundle,
    workers: Workers,
    *,
    model: str,
    base: Version | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = silent,
) -> Made:
    """Fill `bundle` with the edge from `old` to `new`.

    With `base`, `old` is checked to be that version while it is read (`SourceChanged` otherwise), and its manifest is
    used as it is. Raises `SchemaMismatch` when the tensors differ, `SourceChanged` when a file changes meanwhile.
    """
    with DeltaWriter(bundle.data_folder, shard_bytes=shard_bytes) as writer:
        scan = write_delta(old, new, writer, workers, expected=base.digests if base else None, progress=progress)
        new.check_unchanged()
        try:
            old.check_unchanged()
        except SourceChanged as e:
            raise ParentChanged(str(e)) from e
        if base is None:
            base, blobs = describe(old, scan.old, model)
            bundle.put_version(base, blobs)
        target = _target(new, scan, bundle, model)
        files = writer.finish()
    edge = _edge("Delta", base, target, files, scan.changed)
    bundle.put_edge(edge)
    return Made(edge, base, target, scan.records, scan.non_finite)


def make_full(
    checkpoint: Checkpoint,
    bundle: Bundle,
    workers: Workers,
    *,
    model: str,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = silent,
) -> Made:
    """Fill `bundle` with the edge that makes `checkpoint` from nothing."""
    with DeltaWriter(bundle.data_folder, shard_bytes=shard_bytes) as writer:
        scan = write_full(checkpoint, writer, workers, progress=progress)
        checkpoint.check_unchanged()
        target = _target(checkpoint, scan, bundle, model)
        files = writer.finish()
    edge = _edge("Full", None, target, files, scan.changed)
    bundle.put_edge(edge)
    return Made(edge, None, target, scan.records, scan.non_finite)


def make_merge(steps: Sequence[Step], bundle: Bundle, workers: Workers, *, shard_bytes: int = SHARD_BYTES) -> Made:
    """Fill `bundle` with one edge that does what the chain `steps` does. Raises `BaseMismatch` when they do not meet."""
    need_steps(steps)
    base, target = steps[0].start, steps[-1].goal
    with DeltaWriter(bundle.data_folder, shard_bytes=shard_bytes) as writer:
        merged = write_merged([Hop(step.delta, step.reverse) for step in steps], base, target, writer, workers)
        files = writer.finish()
    for version, source in ((base, steps[0].bundle), (target, steps[-1].bundle)):
        bundle.put_version(version, {sha256: source.blob(sha256) for sha256 in version.manifest.blobs})
    edge = _edge("Merge", base, target, files, merged.changed)
    bundle.put_edge(edge)
    return Made(edge, base, target, merged.records, 0)


def _target(checkpoint: Checkpoint, scan: Scan, bundle: Bundle, model: str) -> Version:
    version, blobs = describe(checkpoint, scan.new, model)
    bundle.put_version(version, blobs)
    return version


def _edge(kind: Kind, base: Version | None, target: Version, files: Sequence[Data], changed: int) -> Edge:
    return Edge(
        kind=kind,
        base=base.end if base else None,
        target=target.end,
        data=tuple(files),
        changed=changed,
        reversible=base is not None,
    )
