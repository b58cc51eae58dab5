"""When a container that ended may start again: the kubelet's rule, with a base that tests can bear.

The first restart comes at once, the next after `base`, then twice that and so on up to `cap`; it all
begins anew when a run ended later than twice `cap` after the delay last grew. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from devcluster.node.states import Backoff


@dataclass(frozen=True)
class BackoffRule:
    """The scale of restart delays; the kubelet's own is base 10 and cap 300."""

    base: float = 1.0
    cap: float = 30.0

    def _expired(self, backoff: Backoff, finished_at: float) -> bool:
        return finished_at - backoff.since > 2 * self.cap

    def restart_at(self, backoff: Backoff | None, finished_at: float) -> float:
        """When the container that ended at `finished_at` may start again."""
        if backoff is None or self._expired(backoff, finished_at):
            return finished_at
        return finished_at + backoff.delay

    def after_restart(self, backoff: Backoff | None, finished_at: float, now: float) -> Backoff:
        """What the restart that happens now leaves for the one after it."""
        if backoff is None or self._expired(backoff, finished_at):
            return Backoff(self.base, now)
        return Backoff(min(2 * backoff.delay, self.cap), now)
