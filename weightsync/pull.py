"""Bringing a directory to a version of a store by the fewest bytes: fresh, forward, backward or across branches.

What is held decides the path; an edge that turns out missing, damaged or not usable is left out and the path is
chosen again. Everything is fetched and proven before the first byte of an existing directory changes.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from weightsync import digests, graph
from weightsync.assets import scan
from weightsync.bundle import Bundle, Version
from weightsync.checkpoint import Checkpoint
from weightsync.delta.apply import Step, apply_locked, locked, old_assets, open_target, put_assets
from weightsync.delta.build import building, clear, fill, is_empty, lay_out, open_full, walk_plain
from weightsync.delta.journal import Journal, discard_folder
from weightsync.delta.reader import Delta
from weightsync.digests import Progress, silent
from weightsync.errors import InputError, NoPath, StoreCorrupt, StoreNotFound, TargetError
from weightsync.files import FOLDER, JOURNAL, writing
from weightsync.graph import Hop, Link
from weightsync.manifest import Edge
from weightsync.parallel import Workers
from weightsync.remote import KEY, Remote

FETCHED = "fetch"
MANIFESTS_LOOKED_AT = 64


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
class _Route:
    """A path with every edge read, fetched and opened: a Full edge first, if it starts from nothing, then steps."""

    path: graph.Path
    full: tuple[Delta, Version] | None
    steps: list[Step]
    downloaded: int
    left_out: dict[str, str]


def pull(
    remote: Remote, version: str, dest: Path, workers: Workers, *, max_hops: int = 64, progress: Progress = silent
) -> Pulled:
    """Make `dest` hold `version` (a name, or the sha256 of a manifest); it may be new or hold another version.

    Raises `StoreError` and its kinds, `NoPath` when no usable chain of edges leads there, and what `apply` raises.
    """
    wanted = remote.resolve(version)
    if dest.exists() and not is_empty(dest):
        return _in_place(remote, wanted, dest, workers, max_hops, progress)
    return _fresh(remote, wanted, dest, workers, max_hops, progress)


def _fresh(remote: Remote, wanted: str, dest: Path, workers: Workers, max_hops: int, progress: Progress) -> Pulled:
    with building(dest, keep=True) as folder:
        clear(folder, keep=FOLDER)
        bundle = Bundle(folder / FOLDER / FETCHED)
        target = remote.fetch_version(wanted, bundle, whole=True)
        route = _route(remote, bundle, None, target, max_hops)
        checkpoint = lay_out(folder, bundle.layout(target))
        if route.full is not None:
            fill(checkpoint, *route.full, workers, progress=progress)
        walk_plain(checkpoint, route.steps, workers, progress=progress)
        put_assets(folder, bundle.assets(target), set())
        with writing(folder):
            checkpoint.flush()
            shutil.rmtree(folder / FOLDER)
    return _outcome(target, route, recovered=False)


def _in_place(remote: Remote, wanted: str, dest: Path, workers: Workers, max_hops: int, progress: Progress) -> Pulled:
    bundle = Bundle(dest / FOLDER / FETCHED)
    with locked(dest):
        checkpoint = open_target(dest)
        try:
            done = _move(remote, wanted, checkpoint, bundle, workers, max_hops, progress)
        except (InputError, TargetError):
            if not (dest / FOLDER / JOURNAL).exists():
                _forget(bundle, dest)
            raise
        _forget(bundle, dest)
        return done


def _forget(bundle: Bundle, dest: Path) -> None:
    """Remove what was fetched; only a kill or a store that fails in the middle leaves it for the next call."""
    shutil.rmtree(bundle.root, ignore_errors=True)
    discard_folder(dest)


def _move(
    remote: Remote,
    wanted: str,
    checkpoint: Checkpoint,
    bundle: Bundle,
    workers: Workers,
    max_hops: int,
    progress: Progress,
) -> Pulled:
    dest = checkpoint.root
    recovered = _finish_interrupted(remote, bundle, dest)
    if recovered is not None:
        apply_locked(checkpoint, [recovered], workers, progress=progress)
    target = remote.fetch_version(wanted, bundle, whole=True)
    if checkpoint.schema != target.schema:
        lines = "; ".join(checkpoint.schema.differences(target.schema))
        raise NoPath(f"{dest}: holds other tensors than the version ({lines}); pull into a new directory")
    found = digests.of_checkpoint(checkpoint, workers, progress)
    held = digests.weights_digest(checkpoint.schema, found)
    route = _route(remote, bundle, held, target, max_hops)
    contents = bundle.assets(target)
    extra = scan(dest)[0].keys() - contents.keys() - old_assets(route.steps)
    former = _former(remote, bundle, held, extra) if extra else set()
    if route.steps:
        apply_locked(checkpoint, route.steps, workers, contents=contents, found=found, progress=progress)
    put_assets(dest, contents, former)
    return _outcome(target, route, recovered=recovered is not None)


def _former(remote: Remote, bundle: Bundle, held: str, extra: set[str]) -> set[str]:
    """Those small files of a directory that came with a version of the weights it holds; others are its owner's.

    Looks at a bounded number of manifests: a file that cannot be explained stays.
    """
    former: set[str] = set()
    for sha256 in list(remote.versions().values())[-MANIFESTS_LOOKED_AT:]:
        if extra <= former:
            break
        manifest = remote.fetch_manifest(sha256, bundle)
        if manifest.weights == held:
            former |= extra & {asset.path for asset in manifest.assets}
    return former


def _finish_interrupted(remote: Remote, bundle: Bundle, dest: Path) -> Step | None:
    """The edge that a killed apply or pull was walking, fetched again if need be."""
    journal = Journal.open(dest)
    if journal is None:
        return None
    link = next((link for link in remote.links() if link.name == journal.intent.edge), None)
    if link is None:
        raise StoreNotFound(
            f"{dest}: an earlier apply was interrupted in edge {journal.intent.edge[:16]}, which this store does not "
            "have; finish or undo it with `weightsync apply` and that delta"
        )
    edge = remote.edge(link)
    _fetch(remote, bundle, edge)
    return Step.open(bundle, edge=edge, reverse=journal.intent.reverse, proven=True)


def _route(remote: Remote, bundle: Bundle, held: str | None, target: Version, max_hops: int) -> _Route:
    """Choose, read, fetch and open until every edge of the cheapest path has proven usable."""
    links = {link.name: link for link in remote.links()}
    edges: dict[str, Edge] = {}
    left_out: dict[str, str] = {}
    reasons: dict[str, str] = {}
    downloaded = 0
    while True:
        path = graph.cheapest(
            links.values(),
            held[:KEY] if held else None,
            target.manifest.weights[:KEY],
            excluded=reasons,
            max_hops=max_hops,
            full=held is None,
        )
        try:
            learnt = False
            for hop in path.hops:
                if hop.link.name not in edges:
                    edge = edges[hop.link.name] = remote.edge(hop.link)
                    links[hop.link.name] = Link.of(edge, hop.link.name, lambda weights: weights[:KEY])
                    learnt = True
            if learnt:
                continue
            steps: list[Step] = []
            full = None
            for hop in path.hops:
                edge = edges[hop.link.name]
                downloaded += _fetch(remote, bundle, edge)
                if edge.base is None:
                    full = open_full(bundle, edge, proven=True)
                else:
                    steps.append(Step.open(bundle, edge=edge, reverse=hop.reverse, proven=True))
        except (InputError, StoreCorrupt, StoreNotFound) as e:
            left_out[hop.link.name], reasons[hop.link.name] = str(e), e.reason
            continue
        return _Route(path, full, steps, downloaded, left_out)


def _fetch(remote: Remote, bundle: Bundle, edge: Edge) -> int:
    """Bring an edge into the bundle, with both versions whole: after each edge the directory is one of them."""
    for end in (edge.base, edge.target):
        if end is not None:
            remote.fetch_version(end.manifest, bundle, whole=True)
    return remote.fetch_data(edge, bundle)


def _outcome(target: Version, route: _Route, *, recovered: bool) -> Pulled:
    return Pulled(
        weights=target.manifest.weights,
        content=target.manifest.content,
        manifest=target.sha256,
        hops=[_name(hop) for hop in route.path.hops],
        why=route.path.why,
        downloaded_bytes=route.downloaded,
        full_bytes=target.schema.total_bytes,
        recovered=recovered,
        left_out=route.left_out,
    )


def _name(hop: Hop) -> str:
    link: Link = hop.link
    return f"{'-' if hop.reverse else '+'}{link.kind or 'edge'}:{link.name[:16]}"
