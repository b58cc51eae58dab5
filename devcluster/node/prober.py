"""Run the probes of one container for as long as it runs; verdicts go to a callback.

The startup probe comes first and alone. What a verdict means is up to the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from devcluster.node.hooks import Target, perform
from devcluster.node.probes import Probe, Role, Tally, counted

Verdict = Callable[[Probe, bool], None]
Failure = Callable[[Probe, str], None]


async def probe_container(probes: dict[Role, Probe], target: Target, verdict: Verdict, failure: Failure) -> None:
    """Probe until cancelled, or until a startup or liveness probe has condemned the container."""
    startup = probes.get(Role.STARTUP)
    if startup and not await _watch(startup, target, verdict, failure):
        return
    rest = [_watch(probe, target, verdict, failure) for role, probe in probes.items() if role is not Role.STARTUP]
    await asyncio.gather(*rest)


async def _watch(probe: Probe, target: Target, verdict: Verdict, failure: Failure) -> bool:
    """One probe; ends with True when a startup probe succeeds, with False when its container must go."""
    await asyncio.sleep(probe.initial_delay)
    tally = Tally()
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        outcome = await perform(probe.action, target, probe.timeout)
        if not outcome.passed:
            failure(probe, outcome.message)
        before, tally = tally.verdict, counted(probe, tally, outcome.passed)
        if tally.verdict is not None and tally.verdict is not before:
            verdict(probe, tally.verdict)
            if probe.role is Role.STARTUP or (probe.role is Role.LIVENESS and not tally.verdict):
                return tally.verdict
        await asyncio.sleep(max(0.0, probe.period - (loop.time() - began)))
