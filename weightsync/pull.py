"""Bringing a directory to a version of a store by the fewest bytes: fresh, forward, backward or across branches.

What is held decides the path; an edge that turns out missing, damaged or not usable is left out and the path is
chosen again. Everything is fetched and proven before the first byte of an existing directory changes.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from weightsync import digests, graph
from weightsync.assets import scan
from weightsync.bundle import Bundle, Version
from weightsync.checkpoint import Checkpoint
from weightsync.delta.apply import apply_locked, old_assets
from weightsync.delta.build import assemble
from weightsync.delta.journal import Journal, discard_folder
from weightsync.delta.reader import Delta
from weightsync.delta.step import Step, check_chain, open_full
from weightsync.delta.target import check_assets, locked, open_target, put_assets
from weightsync.digests import Progress, silent
from weightsync.errors import InputError, NoPath, NoSpace, StoreCorrupt, StoreNotFound, TargetError, TargetExists
from weightsync.files import FOLDER, JOURNAL, writing
from weightsync.graph import Hop
from weightsync.parallel import Workers
from weightsync.remote import KEY, Remote, Routes
from weightsync.staging import building, is_empty, sweep

FETCHED = "fetch"
EDGES_LOOKED_AT = 16


@dataclass(frozen=True)
class Pulled:
    """Outcome of a pull: the identities now held, the path taken and why, bytes fetched, and edges left out."""

    weights: str
    content: str
    manifest: str
    hops: list[str]
    why: str
    downloaded_bytes: int
    full_bytes: int
    recovered: bool = False
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Opened:
    """A path whose edges are all fetched and opened: a Full edge first, if it starts from nothing, then steps."""

    path: graph.Path
    full: tuple[Delta, Version] | None
    steps: list[Step]
    downloaded: int


def pull(
    remote: Remote,
    version: str,
    dest: Path,
    workers: Workers,
    *,
    max_hops: int = graph.MAX_HOPS,
    progress: Progress = silent,
) -> Pulled:
    """Make `dest` hold `version` (a name, or the sha256 of a manifest); it may be new or hold another version.

    Raises `StoreError` and its kinds, `NoPath` when no usable chain of edges leads there, and what `apply` raises.
    """
    if not dest.exists() or is_empty(dest):
        with suppress(TargetExists):  # somebody made it this very moment
            return _fresh(remote, version, dest, workers, max_hops, progress)
    return _in_place(remote, version, dest, workers, max_hops, progress)


def _fresh(remote: Remote, version: str, dest: Path, workers: Workers, max_hops: int, progress: Progress) -> Pulled:
    with building(dest, keep=True) as folder:
        bundle = Bundle(folder.parent / FETCHED)
        bundle.refuse_links()
        target = remote.fetch_version(remote.resolve(version), bundle, whole=True)
        routes = Routes(remote)
        opened = _open(remote, bundle, routes, None, target, max_hops)
        if opened.full is None:
            raise NoPath(f"{remote.store.url}: nothing leads to {version!r} from nothing")
        assemble(
            folder,
            opened.full,
            opened.steps,
            bundle.layout(target),
            bundle.assets(target),
            workers,
            progress=progress,
        )
    return _outcome(target, opened, routes, recovered=False)


def _in_place(remote: Remote, version: str, dest: Path, workers: Workers, max_hops: int, progress: Progress) -> Pulled:
    bundle = Bundle(dest / FOLDER / FETCHED)
    sweep(dest)
    with locked(dest):
        bundle.refuse_links()
        checkpoint = open_target(dest)
        recovered = _finish_interrupted(remote, bundle, checkpoint, workers, progress)
        try:
            done = _move(remote, version, checkpoint, bundle, workers, max_hops, progress, recovered=recovered)
        except (InputError, TargetError) as e:
            if not isinstance(e, NoSpace) and not (dest / FOLDER / JOURNAL).exists():
                _forget(bundle, dest)
            raise
        _forget(bundle, dest)
        return done


def _forget(bundle: Bundle, dest: Path) -> None:
    """Remove what was fetched; a kill, or a fault that may pass, leaves it for the next call."""
    if bundle.root.exists():
        with writing(bundle.root):
            shutil.rmtree(bundle.root)
    discard_folder(dest)


def _finish_interrupted(
    remote: Remote, bundle: Bundle, checkpoint: Checkpoint, workers: Workers, progress: Progress
) -> bool:
    """Finish the edge that a killed apply or pull was walking, from what it had fetched if that is still there."""
    journal = Journal.open(checkpoint.root)
    if journal is None:
        return False
    wanted = journal.intent.edge
    edge = bundle.find_edge(wanted)
    if edge is None:
        link = next((link for link in remote.links() if link.name == wanted), None)
        if link is None:
            raise StoreNotFound(
                f"{checkpoint.root}: an earlier apply was interrupted in edge {wanted[:16]}, which this store does not "
                "have; finish or undo it with `weightsync apply` and that delta"
            )
        edge = remote.edge(link)
        remote.fetch_edge(edge, bundle)
    step = Step.open(bundle, edge=edge, reverse=journal.intent.reverse)
    apply_locked(checkpoint, [step], workers, progress=progress)
    return True


def _move(
    remote: Remote,
    version: str,
    checkpoint: Checkpoint,
    bundle: Bundle,
    workers: Workers,
    max_hops: int,
    progress: Progress,
    *,
    recovered: bool,
) -> Pulled:
    dest = checkpoint.root
    target = remote.fetch_version(remote.resolve(version), bundle, whole=True)
    if checkpoint.schema != target.schema:
        lines = "; ".join(checkpoint.schema.differences(target.schema))
        raise NoPath(f"{dest}: holds other tensors than the version ({lines}); pull into a new directory")
    held = digests.weights_digest(checkpoint.schema, digests.of_checkpoint(checkpoint, workers, progress))
    routes = Routes(remote)
    opened = _open(remote, bundle, routes, held, target, max_hops)
    contents = bundle.assets(target)
    extra = scan(dest)[0].keys() - contents.keys() - old_assets(opened.steps)
    former = _former(remote, bundle, routes, held, extra) if extra else set()
    if opened.steps:
        # proves the base once more: fetching took its time, and what was held may have changed
        apply_locked(checkpoint, opened.steps, workers, contents=contents, progress=progress)
    check_assets(dest, contents)
    put_assets(dest, contents, former)
    return _outcome(target, opened, routes, recovered=recovered)


def _former(remote: Remote, bundle: Bundle, routes: Routes, held: str, extra: set[str]) -> set[str]:
    """Those small files of a directory that came with a version of the weights it holds; others are its owner's.

    Looks at the manifests that a few edges name for those weights; a file that cannot be explained stays.
    """
    former: set[str] = set()
    near = [link for link in remote.links() if held[:KEY] in (link.base, link.target)]
    for link in near[:EDGES_LOOKED_AT]:
        try:
            edge = routes.edges.get(link.name) or remote.edge(link)
            for end in (edge.base, edge.target):
                if end is not None and end.weights == held:
                    former |= extra & {asset.path for asset in remote.fetch_manifest(end.manifest, bundle).assets}
        except (InputError, StoreCorrupt, StoreNotFound):
            continue  # it explains nothing
    return former


def _open(remote: Remote, bundle: Bundle, routes: Routes, held: str | None, target: Version, max_hops: int) -> _Opened:
    """Choose, fetch and open until every edge of the cheapest path has proven usable."""
    downloaded = 0
    while True:
        path = routes.choose(held, target.manifest.weights, max_hops=max_hops, full=held is None)
        steps: list[Step] = []
        full = None
        for hop in path.hops:
            edge = routes.edges[hop.link.name]
            try:
                downloaded += remote.fetch_edge(edge, bundle)
                if edge.base is None:
                    full = open_full(bundle, edge, proven=True)
                else:
                    steps.append(Step.open(bundle, edge=edge, reverse=hop.reverse, proven=True))
                last = hop is path.hops[-1]
                check_chain(steps, start=full[1] if full else None, goal=target if last else None)
            except (InputError, StoreCorrupt, StoreNotFound) as e:
                routes.leave_out(hop.link.name, e)
                break
        else:
            return _Opened(path, full, steps, downloaded)


def _outcome(target: Version, opened: _Opened, routes: Routes, *, recovered: bool) -> Pulled:
    return Pulled(
        weights=target.manifest.weights,
        content=target.manifest.content,
        manifest=target.sha256,
        hops=[_name(hop) for hop in opened.path.hops],
        why=opened.path.why,
        downloaded_bytes=opened.downloaded,
        full_bytes=target.schema.total_bytes,
        recovered=recovered,
        left_out=routes.left_out,
    )


def _name(hop: Hop) -> str:
    return f"{'-' if hop.reverse else '+'}{hop.link.kind or 'edge'}:{hop.link.name[:16]}"
