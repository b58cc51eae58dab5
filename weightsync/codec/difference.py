"""What differs between two arrays of words, as wrapped differences.

A difference is (new - old) mod 2**w. It is what makes a delta reversible (subtract it) and mergeable without weights
(add two). Words are compared as integers, never as floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
"""A one-dimensional array of uint8, uint16 or uint32."""

BLOCK = 1 << 18
"""Words compared at a time: the mask of a block stays in the cache."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """k differences at ascending positions `at` (k,) uint32 among `n` words; no `diff` (k,) is zero."""

    n: int
    at: npt.NDArray[np.uint32]
    diff: Words

    @property
    def k(self) -> int:
        """The number of changed words."""
        return len(self.at)


@dataclass(frozen=True, slots=True)
class Dense:
    """A difference for each of `n` words, `k` of them not zero."""

    diff: Words
    k: int

    @property
    def n(self) -> int:
        """The number of words."""
        return len(self.diff)


Difference: TypeAlias = Sparse | Dense


def is_sparse(n: int, k: int) -> bool:
    """Whether k of n changes are kept as positions (at most one in five) rather than as a full array."""
    return k * 5 <= n


def compare(old: Words, new: Words) -> Difference | None:
    """The differences from `old` to `new` (equal dtype and length), or None when there are none."""
    n = len(new)
    found: list[npt.NDArray[np.uint32]] = []
    k = 0
    mask = np.empty(min(n, BLOCK), bool)
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        block = np.not_equal(old[start:stop], new[start:stop], out=mask[: stop - start])
        at = np.flatnonzero(block)
        if len(at):
            k += len(at)
            if not is_sparse(n, k):
                return dense(new - old)
            at += start
            found.append(at.astype(np.uint32))
    if not k:
        return None
    positions = found[0] if len(found) == 1 else np.concatenate(found)
    return Sparse(n, positions, new[positions] - old[positions])


def dense(diff: Words) -> Dense:
    """A `Dense` of the given differences."""
    return Dense(diff, int(np.count_nonzero(diff)))


def simplest(n: int, at: npt.NDArray[np.uint32], diff: Words) -> Difference | None:
    """The form that `compare` would have given for these ascending positions, whose zero differences are dropped."""
    keep = diff != 0
    if not keep.all():
        at, diff = at[keep], diff[keep]
    if not len(at):
        return None
    if is_sparse(n, len(at)):
        return Sparse(n, at, diff)
    full = np.zeros(n, diff.dtype)
    full[at] = diff
    return Dense(full, len(at))


def negated(change: Difference) -> Difference:
    """The way back."""
    if isinstance(change, Sparse):
        return Sparse(change.n, change.at, np.negative(change.diff))
    return Dense(np.negative(change.diff), change.k)


def summed(changes: Sequence[Difference]) -> Difference | None:
    """One after the other over the same words; None when they cancel out. Gives exactly what `compare` would."""
    n = changes[0].n
    if len(changes) == 1:
        return _settled(changes[0].diff) if isinstance(changes[0], Dense) else changes[0]
    sparse = [c for c in changes if isinstance(c, Sparse)]
    if len(sparse) == len(changes) and sum(c.k for c in sparse) * 16 <= n:
        at = np.concatenate([c.at for c in sparse])
        order = np.argsort(at, kind="stable")
        at = at[order]
        first = np.flatnonzero(np.concatenate([[True], at[1:] != at[:-1]]))
        diff = np.concatenate([c.diff for c in sparse])[order]
        return simplest(n, at[first], np.add.reduceat(diff, first, dtype=diff.dtype))
    total = np.zeros(n, changes[0].diff.dtype)
    for change in changes:
        if isinstance(change, Sparse):
            total[change.at] += change.diff
        else:
            total += change.diff
    return _settled(total)


def _settled(diff: Words) -> Difference | None:
    whole = dense(diff)
    if not is_sparse(whole.n, whole.k):
        return whole
    at = np.flatnonzero(diff).astype(np.uint32)
    return simplest(whole.n, at, diff[at])
