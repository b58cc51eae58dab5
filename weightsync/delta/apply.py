"""Changing a checkpoint directory in place: proven first, journaled throughout, finished or undone by running again.

Nothing is stored before the directory is known to be safe to write, every chunk has been digested and found to be the
base's, and the journal is on disk. From then on a kill at any instant leaves a directory that the same call completes
and the reverse call undoes.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from weightsync import digests
from weightsync.bundle import Bundle, Version
from weightsync.checkpoint import Checkpoint
from weightsync.delta.journal import Intent, Journal, discard_folder
from weightsync.delta.patch import Walk, drive, restore
from weightsync.delta.reader import Delta
from weightsync.digests import Digests, Progress, silent
from weightsync.errors import (
    BaseMismatch,
    DigestMismatch,
    FormatError,
    InputError,
    TargetBusy,
    TargetError,
    Unsupported,
)
from weightsync.files import FOLDER, need_room, write_whole, writing
from weightsync.manifest import FEATURES, Edge
from weightsync.parallel import Workers


@dataclass(frozen=True)
class Step:
    """One edge of a chain, opened and checked: its sha256 (hex), records and ends, in the direction it is walked."""

    bundle: Bundle
    edge: Edge
    delta: Delta
    reverse: bool
    start: Version
    goal: Version

    @classmethod
    def open(cls, bundle: Bundle, *, reverse: bool = False, edge: Edge | None = None, proven: bool = False) -> Step:
        """Read and check everything about the edge in `bundle`; nothing of the target is touched yet.

        `edge` names one of several; `proven` says that the caller has just checked the sha256 of its data files.
        """
        edge = edge or bundle.edge()
        unknown = sorted(set(edge.requires) - FEATURES)
        if unknown:
            raise Unsupported(f"{bundle.root}: requires {', '.join(unknown)}; use a newer version of weightsync")
        if edge.base is None:
            raise Unsupported(
                f"{bundle.root}: a Full edge makes a new directory; use `weightsync pull`, or `apply --output`"
            )
        if reverse and not edge.reversible:
            raise Unsupported(f"{bundle.root}: this edge is not reversible")
        base, target = bundle.version(edge.base.manifest), bundle.version(edge.target.manifest)
        if (base.manifest.weights, target.manifest.weights) != (edge.base.weights, edge.target.weights):
            raise FormatError(f"{bundle.root}: the edge and its manifests name different weights")
        delta = open_data(bundle, edge, target, proven=proven)
        check_cover(delta, base, target, str(bundle.root))
        start, goal = (target, base) if reverse else (base, target)
        return cls(bundle, edge, delta, reverse, start, goal)

    @property
    def intent(self) -> Intent:
        """What the journal says of this step."""
        return Intent(self.edge.sha256, self.reverse, self.start.end, self.goal.end)


@dataclass(frozen=True, slots=True)
class Applied:
    """Outcome of `apply`: edges walked (of `hops`), words changed, and whether an interrupted apply was picked up."""

    hops: int
    walked: int
    changed: int
    recovered: bool
    weights: str
    content: str


def check_chain(steps: Sequence[Step]) -> None:
    """Raise `BaseMismatch` unless every step starts where the one before it ends, and `InputError` when there is none."""
    if not steps:
        raise InputError("no edge was given")
    for one, two in pairwise(steps):
        if one.goal.manifest.weights != two.start.manifest.weights:
            raise BaseMismatch(
                f"{two.bundle.root}: starts from weights {two.start.manifest.weights[:16]}, the edge before it ends at "
                f"{one.goal.manifest.weights[:16]}: these edges do not follow each other; nothing was written"
            )


def open_data(bundle: Bundle, edge: Edge, target: Version, *, proven: bool = False) -> Delta:
    """The edge's records, after the sha256 of every data file was checked, here or (`proven`) by the caller."""
    paths = [bundle.data_path(data.sha256) for data in edge.data] if proven else bundle.data(edge)
    delta = Delta.open(paths, target.schema)
    base = edge.base.weights if edge.base else None
    for header in delta.headers:
        if (header.base, header.target) != (base, edge.target.weights):
            raise FormatError(f"{bundle.root}: a data file was made for another edge")
    if edge.reversible and not delta.reversible:
        raise FormatError(f"{bundle.root}: the edge says it is reversible, a record is not")
    return delta


def check_cover(delta: Delta, base: Version, target: Version, what: str) -> None:
    """Raise `FormatError` unless the records touch exactly the chunks whose digests differ between the two versions."""
    if base.schema != target.schema:
        raise FormatError(f"{what}: base and target hold different tensors")
    touched = np.zeros(base.schema.chunks, bool)
    touched[base.schema.chunk_starts[delta.segments["tensor"]] + delta.segments["chunk"]] = True
    if (touched != (base.digests != target.digests).any(axis=1)).any():
        raise FormatError(f"{what}: the records do not touch the chunks that differ between base and target")


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
    found: Digests | None = None,
    progress: Progress = silent,
) -> Applied:
    """`apply` for a caller that holds the lock, and may know the digests of the directory as it is (`found`)."""
    check_chain(steps)
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
        found = digests.of_checkpoint(checkpoint, workers, progress) if found is None else found
        at = position(checkpoint, found, steps)
    first = at
    while at < len(steps):
        step = steps[at]
        walk = Walk(checkpoint, step.delta, step.reverse, step.start, step.goal)
        need_room(target, sum(map(len, contents.values())), "the small files")
        journal = Journal.create(
            target, step.intent, records=len(step.delta), slots=workers.threads, slot_bytes=walk.slot_bytes()
        )
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
            f"{schema.name(schema.locate(int(wrong[0]))[0])!r}): it was written to since, or lost power; pull it again"
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


def put_assets(target: Path, contents: Mapping[str, bytes], old: set[str]) -> None:
    """Write the small files that differ, and remove those of `old` that `contents` lacks."""
    own = target / FOLDER
    for name, data in contents.items():
        path = target / name
        if path.is_symlink() or not path.is_file() or path.read_bytes() != data:
            with writing(own):
                own.mkdir(exist_ok=True)
            write_whole(path, data, via=own)
    for name in old - contents.keys():
        with writing(target / name):
            (target / name).unlink(missing_ok=True)


def open_target(target: Path) -> Checkpoint:
    """Map a directory for writing, if that can harm nothing else. Raises `TargetError`.

    Refused: symbolic links (Hub caches link to shared blobs), files with other hard links, anything not a plain file.
    """
    if not target.is_dir():
        raise TargetError(f"{target}: is not a directory; apply changes a checkpoint directory in place")
    if (target / FOLDER).is_symlink():
        raise TargetError(f"{target / FOLDER}: is a symbolic link; remove it")
    checkpoint = Checkpoint.open(target, writable=True)
    for path, stamp in zip(checkpoint.paths, checkpoint.stamps, strict=True):
        link = path.lstat()
        if not stat.S_ISREG(link.st_mode):
            raise TargetError(
                f"{path}: is not a plain file (a Hub cache links to shared blobs); use --output for a copy"
            )
        if link.st_nlink > 1:
            raise TargetError(
                f"{path}: has {link.st_nlink} hard links, another name would change too; use --output for a copy"
            )
        if (link.st_dev, link.st_ino) != stamp[:2]:
            raise TargetError(f"{path}: was replaced while it was opened; run this again")
    _reserve(checkpoint)
    return checkpoint


def _reserve(checkpoint: Checkpoint) -> None:
    """Allocate holes of sparse files now: touching one on a full disk (on tmpfs even reading it) kills the process."""
    for path in checkpoint.paths:
        size = path.stat()
        missing = size.st_size - size.st_blocks * 512
        if missing > 0:
            need_room(path, missing, "filling the holes of a sparse file")
            with writing(path, missing), path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, size.st_size)


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the directory against another apply or pull; the lock goes with the process. Raises `TargetBusy`."""
    try:
        handle = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as e:
        raise TargetError(f"{target}: is not a directory that can be opened: {e.strerror}") from e
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise TargetBusy(f"{target}: another process is changing it; wait for it, then run this again") from e
        yield
    finally:
        os.close(handle)
