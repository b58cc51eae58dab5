"""One edge of a chain, opened and checked against both of its versions before anything is written.

Whatever can be wrong with a delta is found here: features, digests of files, fields of records, which chunks the records
touch, and whether edges follow each other. Knows bundles, not the directories that edges are applied to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from weightsync.bundle import Bundle, Version
from weightsync.delta.journal import Intent
from weightsync.delta.reader import Delta
from weightsync.errors import BaseMismatch, FormatError, InputError, Unsupported
from weightsync.manifest import Edge


@dataclass(frozen=True)
class Step:
    """An edge in the direction in which it is walked: its records, and the versions it starts from and leads to."""

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
        edge.check_features(str(bundle.root))
        if edge.base is None:
            raise Unsupported(
                f"{bundle.root}: a Full edge makes a new directory, it changes none in place; use --output"
            )
        if reverse and not edge.reversible:
            raise Unsupported(f"{bundle.root}: this edge is not reversible")
        base, target = bundle.version(edge.base.manifest), bundle.version(edge.target.manifest)
        if (base.manifest.weights, target.manifest.weights) != (edge.base.weights, edge.target.weights):
            raise FormatError(f"{bundle.root}: the edge and its manifests name different weights")
        if base.schema != target.schema:
            raise FormatError(f"{bundle.root}: base and target hold different tensors")
        delta = _open_data(bundle, edge, target, proven=proven)
        if (_touched(delta, target) != (base.digests != target.digests).any(axis=1)).any():
            raise FormatError(f"{bundle.root}: the records do not touch the chunks that differ between base and target")
        start, goal = (target, base) if reverse else (base, target)
        return cls(bundle, edge, delta, reverse, start, goal)

    @property
    def intent(self) -> Intent:
        """What the journal says of this step."""
        return Intent(self.edge.sha256, self.reverse, self.start.end, self.goal.end)


def open_full(bundle: Bundle, edge: Edge, *, proven: bool = False) -> tuple[Delta, Version]:
    """A Full edge's records, which hold every chunk, and its version; `proven` as in `Step.open`."""
    edge.check_features(str(bundle.root))
    if edge.base is not None:
        raise Unsupported(f"{bundle.root}: this edge needs a base")
    version = bundle.version(edge.target.manifest)
    if version.manifest.weights != edge.target.weights:
        raise FormatError(f"{bundle.root}: the edge and its manifest name different weights")
    delta = _open_data(bundle, edge, version, proven=proven)
    touched = _touched(delta, version)
    if not touched.all():
        raise FormatError(f"{bundle.root}: a Full edge holds {int(touched.sum())} of {len(touched)} chunks")
    return delta, version


def check_chain(steps: Sequence[Step], start: Version | None = None, goal: Version | None = None) -> None:
    """Raise `BaseMismatch` unless the chain leads from `start` to `goal` (where given) without a gap."""
    ends = [(step.start.manifest.weights, step.goal.manifest.weights, str(step.bundle.root)) for step in steps]
    if start is not None:
        ends.insert(0, ("", start.manifest.weights, "the start"))
    if goal is not None:
        ends.append((goal.manifest.weights, "", "the goal"))
    for (_, end, _), (begin, _, where) in pairwise(ends):
        if end != begin:
            raise BaseMismatch(
                f"{where}: starts from weights {begin[:16]}, the edge before it ends at {end[:16]}: these edges do not "
                "follow each other; nothing was written"
            )


def need_steps(steps: Sequence[Step]) -> None:
    """Raise `InputError` for an empty chain, `BaseMismatch` for one with a gap."""
    if not steps:
        raise InputError("no edge was given")
    check_chain(steps)


def _open_data(bundle: Bundle, edge: Edge, target: Version, *, proven: bool) -> Delta:
    paths = [bundle.data_path(data.sha256) for data in edge.data] if proven else bundle.data(edge)
    delta = Delta.open(paths, target.schema, full=edge.base is None)
    if edge.reversible and not delta.reversible:
        raise FormatError(f"{bundle.root}: the edge says it is reversible, a record is not")
    return delta


def _touched(delta: Delta, version: Version) -> npt.NDArray[np.bool_]:
    """(C,) which chunks the records touch."""
    touched = np.zeros(version.schema.chunks, bool)
    touched[version.schema.chunk_starts[delta.segments["tensor"]] + delta.segments["chunk"]] = True
    return touched
