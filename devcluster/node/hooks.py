"""Do once what a probe or a lifecycle hook asks: an HTTP request, a connection, a program, a pause."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from devcluster.node.pods import Json
from devcluster.node.probes import port, url

Execute = Callable[[list[str], float], Awaitable[tuple[int, str]]]  # (argv, timeout) to (exit code, output)
MAX_BODY = 10 * 1024


@dataclass(frozen=True)
class Outcome:
    """How it went."""

    passed: bool
    message: str = ""


@dataclass(frozen=True)
class Target:
    """The container that is probed."""

    spec: Mapping[str, Any]
    pod_ip: str
    execute: Execute
    http: aiohttp.ClientSession


async def perform(action: Json, target: Target, timeout: float) -> Outcome:
    """Perform the action; whatever goes wrong is an outcome, never an exception."""
    try:
        if action.get("httpGet"):
            return await _http(action["httpGet"], target, timeout)
        if action.get("tcpSocket"):
            return await _tcp(action["tcpSocket"], target, timeout)
        if action.get("exec"):
            code, output = await target.execute(list(action["exec"].get("command") or ()), timeout)
            return Outcome(code == 0, output[:MAX_BODY].strip() or f"exit code {code}")
        if action.get("sleep"):
            await asyncio.sleep(float(action["sleep"]["seconds"]))
            return Outcome(True)
    except TimeoutError:
        return Outcome(False, f"timed out after {timeout:g}s")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Outcome(False, str(error) or type(error).__name__)
    return Outcome(False, f"unsupported: {', '.join(sorted(action))}")


async def _http(action: Json, target: Target, timeout: float) -> Outcome:
    address = url(action, target.spec, target.pod_ip)
    headers = {"User-Agent": "kube-probe/1.35", "Accept": "*/*"}
    headers |= {header["name"]: header["value"] for header in action.get("httpHeaders") or ()}
    limit = aiohttp.ClientTimeout(total=timeout)
    # The kubelet does not verify certificates either.
    async with target.http.get(address, headers=headers, timeout=limit, ssl=False, allow_redirects=False) as response:
        body = await response.content.read(MAX_BODY)
        if 200 <= response.status < 400:
            return Outcome(True)
        text = body.decode(errors="replace").strip()
        return Outcome(False, f"HTTP probe failed with statuscode: {response.status} {text}".strip())


async def _tcp(action: Json, target: Target, timeout: float) -> Outcome:
    address = action.get("host") or target.pod_ip
    async with asyncio.timeout(timeout):
        _, writer = await asyncio.open_connection(address, port(action["port"], target.spec))
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return Outcome(True)
