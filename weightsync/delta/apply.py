"""Changing a checkpoint directory in place: proven first, journaled throughout, finished or undone by running again.

Nothing is stored before the directory is known to be safe to write, every chunk has been digested and found to be the
base's, and the journal is on disk. From then on a kill at any instant leaves a directory that the same call completes
and the reverse call undoes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightsync import digests
from weightsync.checkpoint import Checkpoint
from weightsync.delta.journal import Journal, discard_folder
from weightsync.delta.patch import Walk, drive, restore
from weightsync.delta.step import Step, need_steps
from weightsync.delta.target import check_assets, locked, mark_changed, open_target, put_assets
from weightsync.digests import Digests, Progress, silent
from weightsync.errors import BaseMismatch, DigestMismatch, FormatError, TargetError
from weightsync.files import writing
from weightsync.parallel import Workers


@dataclass(frozen=True, slots=True)
class Applied:
    """Outcome of `apply`: edges walked (of `hops`), words changed, and whether an interrupted apply was picked up."""

    hops: int
    walked: int
    changed: int
    recovered: bool
    weights: str
    content: str


def apply(
    target: Path,
    steps: Sequence[Step],
    workers: Workers,
    *,
    contents: Mapping[str, bytes] | None = None,
    progress: Progress = silent,
) -> Applied:
    """Walk a chain of edges over the checkpoint directory `target`, from wherever in the chain it stands.

    An interrupted earlier call is picked up first: completed if one of `steps` walks the same edge in the same
    direction, undone if one walks it the other way. `contents` are the small files to end with, by default those of
    the last version. Raises `BaseMismatch` (nothing written) when the directory holds no version of the chain,
    `DigestMismatch` when a record came out wrong (everything of its edge undone), `TargetError` when the directory is
    not fit to be changed.
    """
    with locked(target):
        return apply_locked(open_target(target), steps, workers, contents=contents, progress=progress)


def apply_locked(
    checkpoint: Checkpoint,
    steps: Sequence[Step],
    workers: Workers,
    *,
    contents: Mapping[str, bytes] | None = None,
    progress: Progress = silent,
) -> Applied:
    """`apply` for a caller that holds the lock."""
    need_steps(steps)
    target, last = checkpoint.root, steps[-1]
    contents = last.bundle.assets(last.goal) if contents is None else contents
    if checkpoint.schema != steps[0].start.schema:
        lines = "; ".join(checkpoint.schema.differences(steps[0].start.schema))
        raise BaseMismatch(f"{target}: holds other tensors than the delta was made for: {lines}")
    journal = Journal.open(target)
    recovered = journal is not None
    if journal is not None:
        at = _recover(checkpoint, journal, steps, workers, contents, progress)
    else:
        found = digests.of_checkpoint(checkpoint, workers, progress)
        at = position(checkpoint, found, steps)
    first = at
    while at < len(steps):
        step = steps[at]
        walk = Walk(checkpoint, step.delta, step.reverse, step.start, step.goal)
        check_assets(target, contents)
        journal = Journal.create(
            target, step.intent, records=len(step.delta), slots=workers.threads, slot_bytes=walk.slot_bytes()
        )
        mark_changed(checkpoint)
        _finish(walk, 1, journal, workers, progress)
        at += 1
        _complete(checkpoint, steps, at, journal, contents)
    put_assets(target, contents, old_assets(steps))
    discard_folder(target)
    changed = sum(step.edge.changed for step in steps[first:])
    manifest = last.goal.manifest
    return Applied(len(steps), len(steps) - first + recovered, changed, recovered, manifest.weights, manifest.content)


def _recover(
    checkpoint: Checkpoint,
    journal: Journal,
    steps: Sequence[Step],
    workers: Workers,
    contents: Mapping[str, bytes],
    progress: Progress,
) -> int:
    """Complete or undo what an earlier call left; returns the step to go on with."""
    for i, step in enumerate(steps):
        if step.edge.sha256 != journal.intent.edge:
            continue
        want = 1 if step.reverse == journal.intent.reverse else 0
        start, goal = (step.start, step.goal) if want else (step.goal, step.start)
        walk = Walk(checkpoint, step.delta, journal.intent.reverse, start, goal)
        if len(journal.done) != len(step.delta):
            raise FormatError(
                f"{journal.path}: was made for {len(journal.done)} records, the edge has {len(step.delta)}"
            )
        if any(len(slot.room) < walk.slot_bytes() for slot in journal.slots) or not journal.slots:
            raise FormatError(f"{journal.path}: its slots are too small for this edge; it is not this edge's journal")
        restore(walk, journal)
        _prove_sides(walk, journal, digests.of_checkpoint(checkpoint, workers, progress))
        _finish(walk, want, journal, workers, progress)
        _complete(checkpoint, steps, i + 1, journal, contents)
        return i + 1
    raise TargetError(
        f"{checkpoint.root}: an earlier apply was interrupted in edge {journal.intent.edge[:16]}, from version "
        f"{journal.intent.start.weights[:16]} to {journal.intent.goal.weights[:16]}; "
        "finish it with the same delta, or undo it with --reverse, before anything else"
    )


def position(checkpoint: Checkpoint, found: Digests, steps: Sequence[Step]) -> int:
    """How many steps the target is already past. The latest match wins: what counts is where the chain ends."""
    for at in range(len(steps), 0, -1):
        if (found == steps[at - 1].goal.digests).all():
            return at
    start = steps[0].start
    different = np.flatnonzero((found != start.digests).any(axis=1))
    if not len(different):
        return 0
    name = checkpoint.schema.name(checkpoint.schema.locate(int(different[0]))[0])
    raise BaseMismatch(
        f"{checkpoint.root}: holds weights {digests.weights_digest(checkpoint.schema, found)[:16]}, the delta starts from "
        f"{start.manifest.weights[:16]}: {len(different)} of {len(found)} chunks differ, the first in tensor {name!r}; "
        "nothing was written"
    )


def _prove_sides(walk: Walk, journal: Journal, found: Digests) -> None:
    """After a kill and the write-back of slots, every chunk must be on the side that the journal says."""
    expected = walk.start.digests.copy()
    for record in np.flatnonzero(journal.done).tolist():
        indices = walk.indices(record)
        expected[indices] = walk.goal.digests[indices]
    wrong = np.flatnonzero((found != expected).any(axis=1))
    if len(wrong):
        schema = walk.checkpoint.schema
        raise DigestMismatch(
            f"{walk.checkpoint.root}: after an interrupted apply, {len(wrong)} chunks are on neither side (first in tensor "
            f"{schema.name(schema.locate(int(wrong[0]))[0])!r}): it was written to since, or lost power; it cannot be mended in place: "
            "remove the directory and pull it anew"
        )


def _finish(walk: Walk, want: int, journal: Journal, workers: Workers, progress: Progress) -> None:
    """Bring all records to the wanted side; a fault of the delta on the way forward takes them all back instead."""
    try:
        drive(walk, want, workers, journal=journal, progress=progress)
    except (DigestMismatch, FormatError) as e:
        if not want:
            raise
        drive(walk, 0, workers, journal=journal)
        with writing(walk.checkpoint.root):
            walk.checkpoint.flush()
        journal.remove()
        raise DigestMismatch(f"{walk.checkpoint.root}: {e}; everything was undone") from e


def _complete(
    checkpoint: Checkpoint, steps: Sequence[Step], at: int, journal: Journal, contents: Mapping[str, bytes]
) -> None:
    """Everything of the edge before `at` is stored and proven: make it last, then forget the journal.

    The small files follow at every edge, so that whatever comes later finds a whole version.
    """
    with writing(checkpoint.root):
        checkpoint.flush()
    step = steps[at - 1]
    here = contents if at == len(steps) else step.bundle.assets(step.goal)
    put_assets(checkpoint.root, here, old_assets(steps))
    journal.remove()


def old_assets(steps: Sequence[Step]) -> set[str]:
    """Names of the small files of all versions that a chain passes."""
    return {asset.path for step in steps for asset in step.start.manifest.assets}
