"""When a row of probe results is a verdict, and how containers are probed over time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from devcluster.node.hooks import Target, perform
from devcluster.node.prober import probe_container
from devcluster.node.probes import Probe, Role, Tally, counted, port, probes, url

READY = Probe(Role.READINESS, {}, failures=3, successes=2)
ROWS = {
    "nothing yet": ("", None),
    "one success of two": ("+", None),
    "two successes": ("++", True),
    "two failures of three": ("++--", True),
    "three failures": ("++---", False),
    "a success breaks the row": ("++--+--", True),
    "back again": ("---++", True),
}


@pytest.mark.parametrize(("results", "verdict"), ROWS.values(), ids=ROWS.keys())
def test_rows_of_results(results: str, verdict: bool | None) -> None:
    """Thresholds count results in a row."""
    tally = Tally()
    for result in results:
        tally = counted(READY, tally, result == "+")
    assert tally.verdict is verdict


def test_defaults() -> None:
    """Are the kubelet's."""
    found = probes({"livenessProbe": {"exec": {"command": ["x"]}}})
    probe = found[Role.LIVENESS]
    assert (probe.initial_delay, probe.period, probe.timeout, probe.successes, probe.failures) == (0, 10, 1, 1, 3)
    assert list(found) == [Role.LIVENESS]


CONTAINER = {"ports": [{"name": "web", "containerPort": 8080}]}


@pytest.mark.parametrize(("value", "number"), [(80, 80), ("web", 8080), ("81", 81)])
def test_ports(value: int | str, number: int) -> None:
    """A number, a name, or a number as text."""
    assert port(value, CONTAINER) == number


def test_unknown_port() -> None:
    """Is named."""
    with pytest.raises(ValueError, match="named 'none'"):
        port("none", CONTAINER)


def test_url() -> None:
    """The pod's own address unless the probe names a host."""
    assert url({"port": "web", "path": "x/y"}, CONTAINER, "127.64.0.2") == "http://127.64.0.2:8080/x/y"
    assert url({"port": 1, "scheme": "HTTPS", "host": "h"}, {}, "ip") == "https://h:1/"


def run_probes(container: dict[str, Any], results: dict[str, list[int]]) -> list[tuple[Role, bool]]:
    """Probe a container whose commands give these exit codes, the last one for ever; returns the verdicts."""
    verdicts: list[tuple[Role, bool]] = []

    async def execute(argv: list[str], timeout: float) -> tuple[int, str]:
        codes = results[argv[0]]
        return (codes.pop(0) if len(codes) > 1 else codes[0]), ""

    async def main() -> None:
        async with aiohttp.ClientSession() as http:
            target = Target(container, "127.0.0.1", execute, http)
            work = probe_container(
                {r: Probe(r, p.action, 0, 0.005, 1, p.successes, p.failures) for r, p in probes(container).items()},
                target,
                lambda probe, passed: verdicts.append((probe.role, passed)),
                lambda probe, message: None,
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(work, 0.15)

    asyncio.run(main())
    return verdicts


def test_the_startup_probe_comes_first_and_alone() -> None:
    """The others begin when it has succeeded."""
    container = {
        "startupProbe": {"exec": {"command": ["start"]}, "failureThreshold": 5},
        "readinessProbe": {"exec": {"command": ["ready"]}},
        "livenessProbe": {"exec": {"command": ["live"]}, "failureThreshold": 2},
    }
    found = run_probes(container, {"start": [1, 1, 0], "ready": [0], "live": [0, 1, 1]})
    assert found[0] == (Role.STARTUP, True)
    assert sorted(found[1:], key=str) == sorted(
        [(Role.READINESS, True), (Role.LIVENESS, True), (Role.LIVENESS, False)], key=str
    )


def test_a_failed_startup_probe_ends_all_probing() -> None:
    """The container is condemned; readiness is never asked."""
    container = {
        "startupProbe": {"exec": {"command": ["start"]}, "failureThreshold": 2},
        "readinessProbe": {"exec": {"command": ["ready"]}},
    }
    assert run_probes(container, {"start": [1], "ready": [0]}) == [(Role.STARTUP, False)]


def test_whatever_goes_wrong_is_an_outcome() -> None:
    """A closed port, a silent server, an unknown kind: failures, never exceptions."""

    async def main() -> list[str]:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        async def execute(argv: list[str], timeout: float) -> tuple[int, str]:
            raise TimeoutError

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        number = server.sockets[0].getsockname()[1]
        actions: list[dict[str, Any]] = [
            {"httpGet": {"port": number}},
            {"httpGet": {"port": 1}},
            {"tcpSocket": {"port": 1}},
            {"exec": {"command": ["x"]}},
            {"grpc": {"port": 1}},
        ]
        async with aiohttp.ClientSession() as http:
            target = Target({}, "127.0.0.1", execute, http)
            outcomes = [await perform(action, target, 0.05) for action in actions]
            good = await perform({"tcpSocket": {"port": number}}, target, 1)
        server.close()
        assert good.passed
        assert not any(outcome.passed for outcome in outcomes)
        return [outcome.message for outcome in outcomes]

    messages = asyncio.run(main())
    assert messages[0] == "timed out after 0.05s"
    assert messages[3] == "timed out after 0.05s"
    assert messages[4] == "unsupported: grpc"
