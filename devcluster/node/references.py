"""Fetch what pods refer to: ConfigMaps, Secrets, tokens.

Always read fresh, so that a pod never starts with less than what was written before it; the informers
elsewhere only say when to look again. While the API server is away what was read last must do, so that
containers can be restarted. Tokens are kept until most of their life is over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from devcluster.node import pods
from devcluster.node.api import UNREACHABLE, Api
from devcluster.node.payloads import Ref
from devcluster.node.pods import Json

PLURALS = {"ConfigMap": "configmaps", "Secret": "secrets"}
WORN = 0.8  # of its life, after which a token is replaced
MAX_AGE = 24 * 3600.0


@dataclass(frozen=True)
class Token:
    """A token and when to replace it."""

    text: str
    renew_at: float


def renew_at(issued: float, expires: float) -> float:
    """When a token is due for replacement: at 80 % of its life, at the latest after a day."""
    return issued + min(WORN * (expires - issued), MAX_AGE)


class References:
    """What one pod refers to."""

    def __init__(self, api: Api, clock: Callable[[], float]) -> None:
        self._api, self._clock = api, clock
        self._tokens: dict[Ref, Token] = {}
        self._last: dict[tuple[str, str], Json | None] = {}

    @property
    def renew_at(self) -> float | None:
        """When the next token is due."""
        return min((token.renew_at for token in self._tokens.values()), default=None)

    async def objects(self, namespace: str, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], Json | None]:
        """ConfigMaps and Secrets by (kind, name); None for those that do not exist."""
        for key in sorted(set(wanted)):
            try:
                kind, name = key
                self._last[key] = await self._api.find(f"/api/v1/namespaces/{namespace}/{PLURALS[kind]}/{name}")
            except UNREACHABLE:
                if key not in self._last:
                    raise
        return {key: self._last[key] for key in wanted}

    async def fetch(self, pod: Mapping[str, Any], wanted: Iterable[Ref]) -> dict[Ref, Any]:
        """Objects and tokens for a pod's volumes."""
        refs = set(wanted)
        objects = await self.objects(pods.namespace(pod), [(r.kind, r.name) for r in refs if r.kind in PLURALS])
        found: dict[Ref, Any] = {}
        for ref in refs:
            found[ref] = (await self._token(pod, ref)).text if ref.kind == "Token" else objects[ref.kind, ref.name]
        return found

    async def _token(self, pod: Mapping[str, Any], ref: Ref) -> Token:
        """A token of the pod's service account, for one audience and good only while the pod exists."""
        now = self._clock()
        known = self._tokens.get(ref)
        if known and now < known.renew_at:
            return known
        account = pod["spec"].get("serviceAccountName") or "default"
        request: Json = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "audiences": [ref.name] if ref.name else [],
                "expirationSeconds": ref.seconds,
                "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": pods.name(pod), "uid": pods.uid(pod)},
            },
        }
        path = f"/api/v1/namespaces/{pods.namespace(pod)}/serviceaccounts/{account}/token"
        status = (await self._api.create(path, request))["status"]
        token = Token(status["token"], renew_at(now, pods.seconds(status["expirationTimestamp"])))
        self._tokens[ref] = token
        return token
