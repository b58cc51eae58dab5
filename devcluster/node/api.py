"""A small client of the API server: JSON over HTTPS with a client certificate, and watches.

No retries and no cache here: callers are level-triggered and decide what a failure means to them.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from devcluster.node.pods import Json

TIMEOUT = 15.0
CONNECTIONS = 40  # each costs memory; five of them are watches
# What a caller may expect when the server is away, besides ApiError.
UNREACHABLE = (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError, OSError)
METADATA_ONLY = "application/json;as=PartialObjectMetadata{suffix};g=meta.k8s.io;v=v1"


class ApiError(RuntimeError):
    """The API server's refusal."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason


class Api:
    """Speaks to one API server as one user."""

    def __init__(self, server: str, ca: Path, certificate: Path, key: Path) -> None:
        self.server = server.rstrip("/")
        context = ssl.create_default_context(cafile=str(ca))
        context.load_cert_chain(str(certificate), str(key))
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=CONNECTIONS))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def get(self, path: str, **query: str) -> Json:
        """Read an object or a list."""
        return await self._call("GET", path, query=query)

    async def find(self, path: str) -> Json | None:
        """Read an object that may not exist."""
        try:
            return await self.get(path)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def create(self, path: str, body: Json) -> Json:
        """Create an object in a collection."""
        return await self._call("POST", path, body)

    async def replace(self, path: str, body: Json) -> Json:
        """Write a whole object."""
        return await self._call("PUT", path, body)

    async def patch(self, path: str, body: Json, kind: str = "strategic-merge-patch") -> Json:
        """Change part of an object."""
        return await self._call("PATCH", path, body, content=f"application/{kind}+json")

    async def delete(self, path: str, options: Json | None = None) -> Json:
        """Delete an object."""
        return await self._call("DELETE", path, options)

    async def _call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        content: str = "application/json",
        query: dict[str, str] | None = None,
        accept: str = "application/json",
    ) -> Json:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Accept": accept, "Content-Type": content}
        timeout = aiohttp.ClientTimeout(total=TIMEOUT)
        async with self._session.request(
            method, self.server + path, data=data, params=query, headers=headers, timeout=timeout
        ) as response:
            text = await response.read()
            if response.status >= 400:
                raise _error(response.status, text)
            result: Json = json.loads(text)
            return result

    async def list(self, path: str, query: dict[str, str], *, metadata_only: bool = False) -> Json:
        """Read a collection, or only the metadata of its objects."""
        accept = METADATA_ONLY.format(suffix="List") if metadata_only else "application/json"
        return await self._call("GET", path, query=query, accept=accept)

    async def watch(
        self, path: str, query: dict[str, str], seconds: int, *, metadata_only: bool = False
    ) -> AsyncIterator[Json]:
        """The events of a collection, until the server ends the watch."""
        accept = METADATA_ONLY.format(suffix="") if metadata_only else "application/json"
        query = {**query, "watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT, sock_read=seconds + TIMEOUT)
        async with self._session.get(
            self.server + path, params=query, headers={"Accept": accept}, timeout=timeout
        ) as response:
            if response.status >= 400:
                raise _error(response.status, await response.read())
            rest = b""
            # Not by lines: aiohttp bounds those, and an object may be a megabyte.
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event: dict[str, Any] = json.loads(line)
                    yield event


def _error(code: int, text: bytes) -> ApiError:
    try:
        status = json.loads(text)
        return ApiError(code, str(status.get("reason", "")), str(status.get("message", "")))
    except (ValueError, AttributeError):
        return ApiError(code, "", text.decode(errors="replace")[:500])
