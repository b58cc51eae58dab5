"""Applying in a test: here, to a copy, and where it must be refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from worlds import stamps, tree, unlike

from weightsync.delta.apply import Applied, apply
from weightsync.delta.build import copy_and_apply
from weightsync.delta.step import Step
from weightsync.errors import WeightsyncError
from weightsync.parallel import Workers


def walk(target: Path, steps: list[Step], threads: int = 1, contents: Mapping[str, bytes] | None = None) -> Applied:
    """Apply here."""
    with Workers(threads) as workers:
        return apply(target, steps, workers, contents=contents)


def copy(source: Path, dest: Path, steps: list[Step]) -> None:
    """Apply to a copy."""
    with Workers(1) as workers:
        copy_and_apply(source, dest, steps, workers)


def refuses(target: Path, steps: list[Step], error: type[WeightsyncError], match: str) -> None:
    """Check that an apply is refused and not a file was touched."""
    before, content = stamps(target), tree(target)
    with pytest.raises(error, match=match):
        walk(target, steps)
    assert unlike(tree(target), content) == []
    assert stamps(target) == before
