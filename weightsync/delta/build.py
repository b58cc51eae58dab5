"""Filling a directory that nobody else sees yet: from a Full edge, or as a copy that is then changed.

Because nobody can see it before it is complete, no journal is needed; every chunk is proven all the same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from weightsync import digests
from weightsync.bundle import Bundle, Version
from weightsync.checkpoint import Checkpoint
from weightsync.delta.apply import old_assets, position
from weightsync.delta.patch import Walk, drive
from weightsync.delta.reader import Delta
from weightsync.delta.step import Step, check_chain, need_steps, open_full
from weightsync.delta.target import put_assets
from weightsync.digests import Progress, silent
from weightsync.errors import BaseMismatch
from weightsync.files import need_room, write_whole, writing
from weightsync.layout import Layout
from weightsync.parallel import Workers
from weightsync.staging import building


def assemble(
    folder: Path,
    full: tuple[Delta, Version],
    steps: Sequence[Step],
    layout: Layout,
    contents: Mapping[str, bytes],
    workers: Workers,
    *,
    progress: Progress = silent,
) -> None:
    """Make a checkpoint in the empty `folder` from a Full edge and the chain of `steps` after it.

    Its files are those of `layout`, its small files `contents`. Raises `BaseMismatch` when the chain has a gap.
    """
    delta, version = full
    check_chain(steps, start=version)
    checkpoint = _lay_out(folder, layout)
    drive(Walk(checkpoint, delta, False, version, version), 1, workers, progress=progress)
    _walk(checkpoint, steps, workers, progress)
    put_assets(folder, contents, set())
    with writing(folder):
        checkpoint.flush()


def create(dest: Path, bundles: Sequence[Bundle], workers: Workers, *, progress: Progress = silent) -> Version:
    """Make the new directory `dest` from a Full edge and the deltas after it; returns the version it then holds."""
    full = open_full(bundles[0], bundles[0].edge())
    steps = [Step.open(bundle) for bundle in bundles[1:]]
    bundle, goal = (bundles[-1], steps[-1].goal) if steps else (bundles[0], full[1])
    with building(dest) as folder:
        assemble(folder, full, steps, bundle.layout(goal), bundle.assets(goal), workers, progress=progress)
    return goal


def _lay_out(folder: Path, layout: Layout) -> Checkpoint:
    """Write files of a layout with all tensors zero, their room allocated, and map them for writing."""
    sizes = [file.data_start for file in layout.files]
    for i, row in layout.rows:
        sizes[i] = max(sizes[i], layout.files[i].data_start + row.stop)
    need_room(folder, sum(sizes), "the checkpoint")
    for file, size in zip(layout.files, sizes, strict=True):
        path = folder / file.name
        with writing(path, size), path.open("xb") as out:
            out.write(file.prefix)
            out.flush()
            os.posix_fallocate(out.fileno(), 0, size)
    if layout.index:
        write_whole(folder / layout.index, layout.index_text())
    return Checkpoint.open(folder, writable=True)


def _walk(checkpoint: Checkpoint, steps: Sequence[Step], workers: Workers, progress: Progress) -> None:
    for step in steps:
        walk = Walk(checkpoint, step.delta, step.reverse, step.start, step.goal)
        drive(walk, 1, workers, progress=progress)


def copy_and_apply(
    source: Path, dest: Path, steps: Sequence[Step], workers: Workers, *, progress: Progress = silent
) -> None:
    """Make `dest` from a checkpoint directory that stays as it is; it may be made of links.

    Weights, index and assets are copied. What is proven, before and after, is the copy.
    """
    need_steps(steps)
    original = Checkpoint.open(source)
    if original.schema != steps[0].start.schema:
        raise BaseMismatch(f"{source}: holds other tensors than the delta was made for")
    with building(dest) as folder:
        need_room(folder, sum(len(mapped) for mapped in original.maps), "the copy")
        with writing(folder):
            for path in original.paths:
                shutil.copyfile(path, folder / path.name)
        if original.layout.index:
            write_whole(folder / original.layout.index, (source / original.layout.index).read_bytes())
        for name, data in original.contents[0].items():
            write_whole(folder / name, data)
        checkpoint = Checkpoint.open(folder, writable=True)
        at = position(checkpoint, digests.of_checkpoint(checkpoint, workers, progress), steps)
        _walk(checkpoint, steps[at:], workers, progress)
        put_assets(folder, steps[-1].bundle.assets(steps[-1].goal), old_assets(steps))
        with writing(folder):
            checkpoint.flush()
