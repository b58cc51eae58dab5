"""Keep a local copy of a collection true, whatever happens to the connection or the API server.

List, then watch from there. A watch that ends in order is resumed where it was; after anything else (a
lost connection, 410, a server that was restored to an older state) comes a new list, all of which is told
like events. Consumers are only told which object changed and must not care how often.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from devcluster.node.api import UNREACHABLE, Api, ApiError
from devcluster.node.pods import Json

log = logging.getLogger(__name__)
WATCH_SECONDS = 280
RETRY_SECONDS = 0.5

Key = tuple[str, str]  # (namespace, name)


class Informer:
    """The objects of one collection by namespace and name."""

    def __init__(
        self,
        api: Api,
        path: str,
        changed: Callable[[Key, Json | None], None],
        *,
        query: dict[str, str] | None = None,
        metadata_only: bool = False,
    ) -> None:
        self._api, self._path, self._changed = api, path, changed
        self._query = query or {}
        self._metadata_only = metadata_only
        self.objects: dict[Key, Json] = {}
        self.listed = asyncio.Event()
        self.lists = 0  # how often all was listed: from one to the next, the server may have forgotten things

    async def run(self) -> None:
        """Follow the collection until cancelled."""
        version = ""
        while True:
            try:
                version = await self._watch(version or await self._list())
            except (ApiError, *UNREACHABLE, ValueError) as error:
                # ValueError: a line cut in two by a dying server.
                log.info("watching %s: %s: %s", self._path, type(error).__name__, error)
                version = ""
                await asyncio.sleep(RETRY_SECONDS)

    async def _list(self) -> str:
        found = await self._api.list(self._path, self._query, metadata_only=self._metadata_only)
        fresh = {key_of(item): item for item in found.get("items") or ()}
        for key in [key for key in self.objects if key not in fresh]:
            self._put(key, None)
        self.lists += 1
        for key, item in fresh.items():
            self._put(key, item)
        self.listed.set()
        return str(found["metadata"]["resourceVersion"])

    async def _watch(self, version: str) -> str:
        query = {**self._query, "resourceVersion": version}
        async for event in self._api.watch(self._path, query, WATCH_SECONDS, metadata_only=self._metadata_only):
            kind, item = event["type"], event["object"]
            if kind == "ERROR":
                raise ApiError(int(item.get("code") or 500), str(item.get("reason")), str(item.get("message")))
            version = version_of(item)
            if kind == "DELETED":
                self._put(key_of(item), None)
            elif kind != "BOOKMARK":
                self._put(key_of(item), item)
        return version

    def _put(self, key: Key, item: Json | None) -> None:
        if item is None:
            self.objects.pop(key, None)
        else:
            self.objects[key] = item
        self._changed(key, item)


def key_of(item: Json) -> Key:
    """An object's namespace and name."""
    return str(item["metadata"].get("namespace") or ""), str(item["metadata"]["name"])


def version_of(item: Json) -> str:
    """An object's resource version."""
    return str(item["metadata"]["resourceVersion"])
