"""What each command does: open, call the library, and say what came out, for people and for scripts."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weightsync.bundle import Bundle, Version
from weightsync.checkpoint import Checkpoint
from weightsync.cli import examine
from weightsync.cli.progress import bar
from weightsync.cli.text import Result, percent, plural, ratio, size
from weightsync.delta.apply import apply
from weightsync.delta.build import copy_and_apply, create
from weightsync.delta.make import Made, make_delta, make_full, make_merge
from weightsync.delta.step import Step
from weightsync.errors import InputError, SchemaMismatch
from weightsync.files import writing
from weightsync.parallel import Workers
from weightsync.publish import Parent, publish
from weightsync.pull import pull
from weightsync.remote import Remote, Routes
from weightsync.staging import building
from weightsync.store import names, open_store


@dataclass(frozen=True)
class Context:
    """The typed arguments, the threads to use, and when the command began."""

    arguments: argparse.Namespace
    workers: Workers
    began: float

    def seconds(self) -> float:
        """Since the command began."""
        return round(time.monotonic() - self.began, 3)


def run(arguments: argparse.Namespace) -> Result:
    """Run the command that was typed."""
    commands: dict[str, Callable[[Context], Result]] = {
        "apply": _apply,
        "diff": _diff,
        "graph": _graph,
        "inspect": lambda context: examine.inspect(context.arguments.path),
        "merge": _merge,
        "publish": _publish,
        "pull": _pull,
        "verify": _verify,
    }
    with Workers(arguments.threads) as workers:
        return commands[arguments.command](Context(arguments, workers, time.monotonic()))


def _diff(context: Context) -> Result:
    a = context.arguments
    names.check_name(a.model)
    old, new = Checkpoint.open(a.old), Checkpoint.open(a.new)
    if old.single != new.single:
        raise InputError("one of them is a file, the other a directory: without its small files a version has none")
    notes = []
    if a.profile == "wan":
        notes.append("profile wan: class-coded positions are not available in this version, lan coding was used")
    if old.schema != new.schema and not a.full:
        lines = "; ".join(old.schema.differences(new.schema))
        raise SchemaMismatch(f"the checkpoints hold different tensors ({lines}); --full writes all of {a.new}")
    total = old.schema.total_bytes + new.schema.total_bytes
    with building(a.output) as folder, bar("diff", total, quiet=a.quiet) as progress:
        bundle = Bundle(folder)
        bundle.start()
        if old.schema == new.schema:
            made = make_delta(old, new, bundle, context.workers, model=a.model, progress=progress)
        else:
            made = make_full(new, bundle, context.workers, model=a.model, progress=progress)
            notes.append("the tensors differ, so all of the new checkpoint was written")
    data = _made(made, context) | {"ignored": new.contents[1], "notes": notes, "profile": made.edge.profile}
    return Result(data, [*_made_lines(made, a.output), *_more(new.contents[1], notes, made.non_finite)])


def _merge(context: Context) -> Result:
    a = context.arguments
    steps = _chain([Bundle(path) for path in a.deltas], reverse=False)
    with building(a.output) as folder:
        bundle = Bundle(folder)
        bundle.start()
        made = make_merge(steps, bundle, context.workers)
    together = sum(step.edge.size for step in steps)
    data = _made(made, context) | {"input_bytes": together, "inputs": len(steps)}
    line = f"{plural(len(steps), 'delta')} of {size(together)} together became one of {size(made.edge.size)}"
    return Result(data, [line, *_made_lines(made, a.output)])


def _made(made: Made, context: Context) -> dict[str, Any]:
    ends = {"base": made.base, "target": made.target}
    return {
        **{
            name: version and {"content": version.manifest.content, **asdict(version.end)}
            for name, version in ends.items()
        },
        "changed": made.edge.changed,
        "delta_bytes": made.edge.size,
        "edge": made.edge.sha256,
        "full_bytes": made.full_bytes,
        "kind": made.edge.kind,
        "non_finite": made.non_finite,
        "output": str(context.arguments.output),
        "records": made.records,
        "reversible": made.edge.reversible,
        "seconds": context.seconds(),
        "threads": context.workers.threads,
        "total": made.target.schema.total_words,
    }


def _made_lines(made: Made, output: Path) -> list[str]:
    edge, total = made.edge, made.target.schema.total_words
    each = f", {edge.size / edge.changed:.2f} bytes per changed value" if edge.changed else ""
    return [
        f"changed: {edge.changed:,} of {total:,} values ({percent(edge.changed, total)})",
        f"delta:   {size(edge.size)} instead of {size(made.full_bytes)}, {ratio(made.full_bytes, edge.size)}{each}",
        f"wrote:   {output} ({edge.kind}, edge {edge.sha256[:16]})",
    ]


def _more(ignored: list[str], notes: list[str], non_finite: int) -> list[str]:
    lines = [f"note:    {note}" for note in notes]
    if non_finite:
        lines.append(f"note:    {non_finite:,} of the written values are infinite or NaN; their bytes are kept")
    if ignored:
        lines.append(f"ignored: {', '.join(ignored)}")
    return lines


def _chain(bundles: list[Bundle], *, reverse: bool) -> list[Step]:
    steps = [Step.open(bundle, reverse=reverse) for bundle in bundles]
    return steps[::-1] if reverse else steps


def _apply(context: Context) -> Result:
    a = context.arguments
    bundles = [Bundle(path) for path in a.deltas]
    if bundles[0].edge().base is None:
        return _create(context, bundles)
    steps = _chain(bundles, reverse=a.reverse)
    total = steps[0].start.schema.total_bytes if len(steps) == 1 else None
    with bar("apply", total, quiet=a.quiet) as progress:
        if a.output is not None:
            copy_and_apply(a.target, a.output, steps, context.workers, progress=progress)
            return _holding(context, a.output, steps[-1].goal)
        outcome = apply(a.target, steps, context.workers, progress=progress)
    data = asdict(outcome) | {
        "output": str(a.target),
        "seconds": context.seconds(),
        "threads": context.workers.threads,
    }
    lines = [f"{a.target} holds weights {outcome.weights[:16]}, every chunk proven"]
    if outcome.recovered:
        lines.insert(0, "an interrupted apply was picked up")
    if not outcome.walked:
        lines = [f"{a.target} already held weights {outcome.weights[:16]}; nothing was written"]
    return Result(data, lines)


def _create(context: Context, bundles: list[Bundle]) -> Result:
    a = context.arguments
    if a.output is not None or a.reverse:
        raise InputError("the first delta holds a whole checkpoint: it makes TARGET, without --output and --reverse")
    with bar("apply", None, quiet=a.quiet) as progress:
        goal = create(a.target, bundles, context.workers, progress=progress)
    return _holding(context, a.target, goal)


def _holding(context: Context, path: Path, version: Version) -> Result:
    manifest = version.manifest
    data = {
        "content": manifest.content,
        "output": str(path),
        "seconds": context.seconds(),
        "threads": context.workers.threads,
        "weights": manifest.weights,
    }
    return Result(data, [f"wrote {path}, weights {manifest.weights[:16]}, every chunk proven"])


def _remote(arguments: argparse.Namespace) -> Remote:
    return Remote(open_store(arguments.store), arguments.model)


def _publish(context: Context) -> Result:
    a = context.arguments
    remote = _remote(a)
    if a.parent_source is not None and a.parent is None:
        raise InputError("--parent-source needs --parent: the version that the directory holds")
    parent = Parent(a.parent, a.parent_source) if a.parent is not None else None
    if a.scratch is not None:
        with writing(a.scratch):
            a.scratch.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="weightsync-", dir=a.scratch) as scratch,
        bar("publish", None, quiet=a.quiet) as progress,
    ):
        done = publish(
            a.source,
            remote,
            a.version,
            Path(scratch),
            context.workers,
            parent=parent,
            full_ratio=a.full_ratio,
            progress=progress,
        )
    lines = [f"published {a.model} {done.version}: manifest {done.manifest[:16]}, weights {done.weights[:16]}"]
    if done.changed is not None and done.delta_bytes is not None:
        lines.append(f"changed: {done.changed:,} of {done.total:,} values ({percent(done.changed, done.total)})")
        lines.append(
            f"delta:   {size(done.delta_bytes)} instead of {size(done.full_bytes)}, {ratio(done.full_bytes, done.delta_bytes)}"
        )
    lines.append(f"sent:    {size(done.sent_bytes)} in {plural(len(done.edges), 'edge')}")
    return Result(
        asdict(done) | {"total_seconds": context.seconds()}, [*lines, *_more(done.ignored, done.notes, done.non_finite)]
    )


def _pull(context: Context) -> Result:
    a = context.arguments
    with bar("pull", None, quiet=a.quiet) as progress:
        done = pull(_remote(a), a.version, a.dest, context.workers, max_hops=a.max_hops, progress=progress)
    lines = [
        f"{a.dest} holds {a.model} {a.version}: weights {done.weights[:16]}, every chunk proven",
        f"fetched {size(done.downloaded_bytes)} instead of {size(done.full_bytes)}: {done.why}",
        *[f"left out edge {name[:16]}: {why}" for name, why in done.left_out.items()],
    ]
    return Result(asdict(done) | {"seconds": context.seconds()}, lines)


def _verify(context: Context) -> Result:
    a = context.arguments
    if a.store is not None:
        if a.model is None or a.version is None or a.delta is not None:
            raise InputError("verify against a store needs --store, --model and --version, and no --delta")
        with tempfile.TemporaryDirectory(prefix="weightsync-") as scratch:
            remote = _remote(a)
            version = remote.fetch_version(remote.resolve(a.version), Bundle(Path(scratch)))
        return examine.verify_checkpoint(a.path, [(f"version {a.version}", version)], context.workers)
    if a.model is not None or a.version is not None:
        raise InputError("--model and --version name a version in a store: say which with --store")
    if a.delta is None:
        return examine.verify_bundle(Bundle(a.path), context.workers)
    bundle = Bundle(a.delta)
    edge = bundle.edge()
    ends = [("target", edge.target)] + ([("base", edge.base)] if edge.base else [])
    versions = [(name, bundle.version(end.manifest)) for name, end in ends]
    return examine.verify_checkpoint(a.path, versions, context.workers)


def _graph(context: Context) -> Result:
    a = context.arguments
    remote = _remote(a)
    if a.origin is not None and a.to is None:
        raise InputError("--from needs --to")
    if a.to is None:
        return examine.list_graph(remote)
    with tempfile.TemporaryDirectory(prefix="weightsync-") as scratch:
        bundle = Bundle(Path(scratch))
        held = remote.fetch_manifest(remote.resolve(a.origin), bundle).weights if a.origin else None
        needed = remote.fetch_manifest(remote.resolve(a.to), bundle).weights
        return examine.show_path(Routes(remote), held, needed)
