"""Making a checkpoint directory that was not there: from a Full edge, or as a copy to be changed.

It grows beside its final place under a hidden name and appears by one rename, complete and proven, or not at all.
Because nobody can see it before, no journal is needed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from weightsync import digests
from weightsync.bundle import Bundle, Version
from weightsync.checkpoint import Checkpoint
from weightsync.delta.apply import Step, check_chain, old_assets, open_data, position, put_assets
from weightsync.delta.journal import discard_folder
from weightsync.delta.patch import Walk, drive
from weightsync.delta.reader import Delta
from weightsync.digests import Progress, silent
from weightsync.errors import BaseMismatch, FormatError, TargetBusy, TargetError
from weightsync.files import need_room, sync_folder, write_whole, writing
from weightsync.layout import Layout
from weightsync.manifest import Edge
from weightsync.parallel import Workers


@contextmanager
def building(dest: Path, *, keep: bool = False) -> Iterator[Path]:
    """A hidden folder beside `dest` that becomes `dest` when the block succeeds, and is removed otherwise (not if `keep`).

    Raises `TargetError` when `dest` exists and `TargetBusy` when another process builds it.
    """
    if dest.is_symlink() or (dest.exists() and not is_empty(dest)):
        raise TargetError(f"{dest}: exists already; name a new directory")
    folder = dest.with_name(f".{dest.name}.building")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(handle, folder, dest)
        try:
            yield folder
            with writing(dest):
                folder.rename(dest)
                sync_folder(dest.parent)
        except BaseException:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path, dest: Path) -> None:
    """Take the folder for ourselves; whoever had it may have finished, and renamed it, a moment ago."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = folder.exists() and os.path.samestat(os.fstat(handle), folder.stat())
    except OSError:
        ours = False
    if not ours:
        raise TargetBusy(f"{dest}: another process is making it; wait for it, then look again")


def is_empty(folder: Path) -> bool:
    """Whether this is a directory without entries."""
    return folder.is_dir() and not any(folder.iterdir())


def lay_out(folder: Path, layout: Layout) -> Checkpoint:
    """Write files of a layout with all tensors zero, their room allocated, and map them for writing."""
    sizes = {}
    rows = layout.rows()
    for i, file in enumerate(layout.files):
        end = max((row.stop for at, row in rows if at == i), default=0)
        sizes[file.name] = file.data_start + end
    need_room(folder, sum(sizes.values()), "the checkpoint")
    for file in layout.files:
        path = folder / file.name
        with writing(path), path.open("wb") as out:
            out.write(file.prefix)
            out.flush()
            if sizes[file.name]:
                os.posix_fallocate(out.fileno(), 0, sizes[file.name])
    if layout.index:
        write_whole(folder / layout.index, layout.index_text())
    return Checkpoint.open(folder, writable=True)


def fill(
    checkpoint: Checkpoint, delta: Delta, version: Version, workers: Workers, *, progress: Progress = silent
) -> None:
    """Store every tensor from a Full edge's records, each chunk proven. Raises `FormatError` when one is missing."""
    indices = checkpoint.schema.chunk_starts[delta.segments["tensor"]] + delta.segments["chunk"]
    if len(indices) != checkpoint.schema.chunks:
        raise FormatError(f"a Full edge holds {len(indices)} of {checkpoint.schema.chunks} chunks")
    drive(Walk(checkpoint, delta, False, version, version), 1, workers, progress=progress)


def open_full(bundle: Bundle, edge: Edge, *, proven: bool = False) -> tuple[Delta, Version]:
    """A Full edge's records and version, checked; `proven` as in `open_data`."""
    version = bundle.version(edge.target.manifest)
    if version.manifest.weights != edge.target.weights:
        raise FormatError(f"{bundle.root}: the edge and its manifest name different weights")
    return open_data(bundle, edge, version, proven=proven), version


def walk_plain(checkpoint: Checkpoint, steps: Sequence[Step], workers: Workers, *, progress: Progress = silent) -> None:
    """Walk edges over a directory that nobody else sees."""
    for step in steps:
        walk = Walk(checkpoint, step.delta, step.reverse, step.start, step.goal)
        drive(walk, 1, workers, progress=progress)


def copy_and_apply(
    source: Path, dest: Path, steps: Sequence[Step], workers: Workers, *, progress: Progress = silent
) -> None:
    """Make `dest` from a checkpoint directory that stays as it is; it may be made of links.

    Weights, index and assets are copied. What is proven, before and after, is the copy.
    """
    check_chain(steps)
    original = Checkpoint.open(source)
    if original.schema != steps[0].start.schema:
        raise BaseMismatch(f"{source}: holds other tensors than the delta was made for")
    with building(dest) as folder:
        clear(folder)
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
        walk_plain(checkpoint, steps[at:], workers, progress=progress)
        put_assets(folder, steps[-1].bundle.assets(steps[-1].goal), old_assets(steps))
        discard_folder(folder)
        with writing(folder):
            checkpoint.flush()


def clear(folder: Path, *, keep: str = "") -> None:
    """Remove what an earlier, failed attempt left, but for the entry `keep`."""
    with writing(folder):
        for path in folder.iterdir():
            if path.name == keep:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
