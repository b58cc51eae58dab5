"""Commands that only look: inspect, verify, and the list of a model's versions and edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weightsync import assets, digests
from weightsync.bundle import Bundle, Version
from weightsync.checkpoint import Checkpoint
from weightsync.cli.text import Result, percent, plural, size
from weightsync.codec import Mode
from weightsync.delta.format import HEADER_BYTES, RECORD, Header
from weightsync.delta.reader import Delta
from weightsync.delta.step import Step, open_full
from weightsync.errors import CheckpointError, FormatError, InputError
from weightsync.parallel import Workers
from weightsync.remote import Remote, Routes

MISMATCH = 1
LISTED = 20


def inspect(path: Path) -> Result:
    """What a checkpoint, a delta's directory or a data file holds."""
    if path.is_dir() and (path / "edges").is_dir():
        return _inspect_bundle(Bundle(path))
    if path.name == "data" and (path.parent / "edges").is_dir():
        return _inspect_bundle(Bundle(path.parent))
    if path.is_file():
        try:
            with path.open("rb") as file:
                head = file.read(HEADER_BYTES)
        except OSError as e:
            raise CheckpointError(f"{path}: cannot be read: {e.strerror or e}") from e
        if b'"weightsync.delta/' in head:
            return _inspect_data(path, Header.unpack(head, str(path)))
    return _inspect_checkpoint(Checkpoint.open(path))


def _inspect_checkpoint(checkpoint: Checkpoint) -> Result:
    schema = checkpoint.schema
    contents, ignored = checkpoint.contents
    types = {
        dtype: {"bytes": int(schema.nbytes[schema.types == i].sum()), "tensors": int((schema.types == i).sum())}
        for i, dtype in enumerate(schema.dtypes)
    }
    data = {
        "assets": sorted(contents),
        "bytes": schema.total_bytes,
        "files": [path.name for path in checkpoint.paths],
        "ignored": ignored,
        "kind": "checkpoint",
        "tensors": len(schema),
        "types": types,
        "words": schema.total_words,
    }
    files = plural(len(checkpoint.paths), "file")
    lines = [f"checkpoint: {plural(len(schema), 'tensor')}, {size(schema.total_bytes)} in {files}"]
    lines += [
        f"  {name}: {plural(entry['tensors'], 'tensor')}, {size(entry['bytes'])}" for name, entry in types.items()
    ]
    lines.append(f"assets: {', '.join(sorted(contents)) or 'none'}")
    if ignored:
        lines.append(f"ignored: {', '.join(ignored)}")
    return Result(data, lines)


def _inspect_bundle(bundle: Bundle) -> Result:
    edge = bundle.edge()
    target = bundle.version(edge.target.manifest)
    delta = open_full(bundle, edge)[0] if edge.base is None else Step.open(bundle).delta
    modes = _modes(delta.records)
    data = {
        "base": edge.base.weights if edge.base else None,
        "bytes": edge.size,
        "changed": edge.changed,
        "data": [file.sha256 for file in edge.data],
        "edge": edge.sha256,
        "kind": edge.kind,
        "modes": modes,
        "profile": edge.profile,
        "records": len(delta),
        "requires": list(edge.requires),
        "reversible": edge.reversible,
        "target": edge.target.weights,
        "total": target.schema.total_words,
    }
    origin = edge.base.weights[:16] if edge.base else "nothing"
    lines = [
        f"{edge.kind} edge {edge.sha256[:16]}: {origin} -> {edge.target.weights[:16]}, "
        f"{'both ways' if edge.reversible else 'one way'}, {size(edge.size)} in {plural(len(edge.data), 'file')}",
        f"changed: {edge.changed:,} of {target.schema.total_words:,} values "
        f"({percent(edge.changed, target.schema.total_words)}) in {plural(len(delta), 'record')}",
        *_mode_lines(modes),
    ]
    return Result(data, lines)


def _inspect_data(path: Path, header: Header) -> Result:
    with path.open("rb") as file:
        file.seek(HEADER_BYTES + header.payload)
        table = file.read(header.directory)
    if len(table) != header.directory or len(table) % RECORD.itemsize:
        raise FormatError(f"{path}: is truncated in its directory")
    modes = _modes(np.frombuffer(table, RECORD))
    data = {"bytes": header.file_bytes, "kind": "data file", "modes": modes, "shard": header.shard}
    return Result(data, [f"data file {header.shard} of an edge, {size(header.file_bytes)}", *_mode_lines(modes)])


def _modes(records: Any) -> dict[str, dict[str, int]]:
    """Records, changes, words and coded bytes by mode."""
    found: dict[str, dict[str, int]] = {}
    for mode in np.unique(records["mode"]).tolist():
        rows = records[records["mode"] == mode]
        name = Mode(mode).name.lower() if mode in list(Mode) else f"mode {mode}"
        found[name] = {
            "bytes": int(rows["streams"]["coded"].astype(np.int64).sum()),
            "changed": int(rows["k"].sum()),
            "records": len(rows),
            "words": int(rows["n"].sum()),
        }
    return found


def _mode_lines(modes: dict[str, dict[str, int]]) -> list[str]:
    return [
        f"  {name}: {plural(entry['records'], 'record')}, {entry['changed']:,} of {entry['words']:,} words, {size(entry['bytes'])}"
        for name, entry in modes.items()
    ]


def verify_bundle(bundle: Bundle, workers: Workers) -> Result:
    """Check every digest and decode every record; raises the error of the first fault."""
    edge = bundle.edge()
    if edge.base is None:
        delta: Delta = open_full(bundle, edge)[0]
    else:
        delta = Step.open(bundle).delta
    for end in (edge.base, edge.target):
        if end is not None:
            version = bundle.version(end.manifest)
            bundle.layout(version)
            bundle.assets(version)
    workers.run(delta.decode, range(len(delta)))
    line = f"{bundle.root}: whole; {plural(len(delta), 'record')} of {size(edge.size)} decoded"
    return Result({"edge": edge.sha256, "records": len(delta), "verified": True}, [line])


def verify_checkpoint(path: Path, versions: Sequence[tuple[str, Version]], workers: Workers) -> Result:
    """Which of the versions the checkpoint is; status 1, with the tensors that differ from the first, when none."""
    if not path.exists():
        raise InputError(f"{path}: does not exist")
    checkpoint = Checkpoint.open(path)
    name, first = versions[0]
    if checkpoint.schema != first.schema:
        lines = checkpoint.schema.differences(first.schema)
        return Result(
            {"matches": None, "tensors": lines}, [f"{path} holds other tensors than the {name}:", *lines], MISMATCH
        )
    found = digests.of_checkpoint(checkpoint, workers)
    for name, version in versions:
        if (found == version.digests).all():
            wanted = {asset.path: asset.sha256 for asset in version.manifest.assets}
            held = _assets(checkpoint)
            wrong_files = [] if checkpoint.single else sorted(dict(held.items() ^ wanted.items()))
            data = {"different_files": wrong_files, "matches": name, "weights": version.manifest.weights}
            line = f"{path} is the {name}: weights {version.manifest.weights[:16]}"
            if not wrong_files:
                return Result(data, [line])
            return Result(data, [f"{line}, but small files differ: {', '.join(wrong_files)}"], MISMATCH)
    wrong = np.flatnonzero((found != first.digests).any(axis=1))
    counts = Counter(checkpoint.schema.name(checkpoint.schema.locate(index)[0]) for index in wrong.tolist())
    counted: dict[str, Any] = {
        "chunks": len(found),
        "different_chunks": len(wrong),
        "matches": None,
        "tensors": sorted(counts),
    }
    listed = [f"  {tensor}: {plural(count, 'chunk')}" for tensor, count in sorted(counts.items())[:LISTED]]
    if len(counts) > LISTED:
        listed.append(f"  and {len(counts) - LISTED} more tensors")
    head = (
        f"{path} is not the {' or the '.join(name for name, _ in versions)}: {len(wrong)} of {len(found)} chunks differ"
    )
    return Result(counted, [head, *listed], MISMATCH)


def _assets(checkpoint: Checkpoint) -> dict[str, str]:
    return {asset.path: asset.sha256 for asset in assets.describe(checkpoint.contents[0])}


def list_graph(remote: Remote) -> Result:
    """Every version by name and every edge of the listing."""
    versions = remote.versions()
    edges = [
        {"base": link.base, "bytes": link.bytes, "edge": link.name, "target": link.target}
        for link in sorted(remote.links(), key=lambda link: (link.target, link.base or "", link.bytes, link.name))
    ]
    lines = [
        f"{name}  manifest {', '.join(sha256[:16] for sha256 in found)}{'  CONFLICT' if len(found) > 1 else ''}"
        for name, found in sorted(versions.items())
    ]
    lines += [f"{edge['base'] or 'nothing':>16} -> {edge['target']}  {size(int(str(edge['bytes'])))}" for edge in edges]
    return Result({"edges": edges, "model": remote.model, "versions": versions}, lines or ["no version is published"])


def show_path(routes: Routes, held: str | None, needed: str) -> Result:
    """The path from one weights digest (None: nothing) to another, and why it is taken."""
    path = routes.choose(held, needed)
    hops = [
        {
            "base": hop.link.base,
            "bytes": hop.link.bytes,
            "edge": hop.link.name,
            "kind": hop.link.kind,
            "reverse": hop.reverse,
            "target": hop.link.target,
        }
        for hop in path.hops
    ]
    lines = [
        f"{'back' if hop.reverse else 'forward'} {hop.link.kind} {hop.link.name[:16]}  {size(hop.link.bytes)}"
        for hop in path.hops
    ]
    lines += [f"left out edge {name[:16]}: {why}" for name, why in routes.left_out.items()]
    data = {"bytes": path.bytes, "hops": hops, "left_out": routes.left_out, "why": path.why}
    return Result(data, [*lines, path.why])
