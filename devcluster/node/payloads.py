"""What the files of ConfigMap, Secret, downward and projected volumes hold. Pure.

`needs` says what has to be fetched, `files` turns what was fetched into names, bytes and modes.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from devcluster.node import pods
from devcluster.node.environment import Missing
from devcluster.node.fields import Facts, field_value, resource_value
from devcluster.node.pods import Json

KINDS = ("configMap", "secret", "downwardAPI", "projected")
DEFAULT_MODE = 0o644


@dataclass(frozen=True)
class Ref:
    """Something to fetch: a ConfigMap, a Secret, or a token for an audience."""

    kind: str  # ConfigMap, Secret, Token
    name: str  # of the object, or the audience
    seconds: int = 0  # a token's lifetime


@dataclass(frozen=True)
class File:
    """One file of a volume."""

    data: bytes
    mode: int


Fetched = Mapping[Ref, Any]  # an object, None if it does not exist, or a token's text


def needs(volume: Mapping[str, Any]) -> list[Ref]:
    """What the files of a volume are made of."""
    return [ref for source, _ in _sources(volume) if (ref := _ref(source)) is not None]


def files(volume: Mapping[str, Any], fetched: Fetched, facts: Facts) -> dict[str, File]:
    """The files of a volume by relative path; raises Missing for what must be there and is not."""
    result: dict[str, File] = {}
    for source, mode in _sources(volume):
        result |= _files(source, mode, fetched, facts)
    return result


def private(
    found: Mapping[str, File], token_paths: set[str], fs_group: int | None, user: int | None
) -> dict[str, File]:
    """Close tokens to others once the pod names a user or group for them, as the kubelet does."""
    if fs_group is None and user is None:
        return dict(found)
    mode = 0o640 if fs_group is not None else 0o600
    return {path: File(f.data, mode) if path in token_paths else f for path, f in found.items()}


def token_paths(volume: Mapping[str, Any]) -> set[str]:
    """The files of a volume that are tokens."""
    return {source["serviceAccountToken"]["path"] for source, _ in _sources(volume) if "serviceAccountToken" in source}


def _sources(volume: Mapping[str, Any]) -> list[tuple[Json, int]]:
    """A volume as a list of projections with their default mode."""
    for kind in KINDS:
        body = volume.get(kind)
        if body is None:
            continue
        mode = int(body.get("defaultMode") or DEFAULT_MODE)
        if kind == "projected":
            return [(source, mode) for source in body.get("sources") or ()]
        if kind == "secret":
            return [({"secret": {**body, "name": body.get("secretName")}}, mode)]
        return [({kind: body}, mode)]
    return []


def _ref(source: Json) -> Ref | None:
    if source.get("configMap"):
        return Ref("ConfigMap", source["configMap"]["name"])
    if source.get("secret"):
        return Ref("Secret", source["secret"]["name"])
    token = source.get("serviceAccountToken")
    return (
        Ref("Token", str(token.get("audience") or ""), int(token.get("expirationSeconds") or 3600)) if token else None
    )


def _files(source: Json, mode: int, fetched: Fetched, facts: Facts) -> dict[str, File]:
    ref = _ref(source)
    if ref and ref.kind == "Token":
        return {source["serviceAccountToken"]["path"]: File(fetched[ref].encode(), mode)}
    if ref:
        return _data(source.get("configMap") or source["secret"], ref, fetched[ref], mode, facts)
    if source.get("downwardAPI"):
        return {
            item["path"]: File(_downward(item, facts).encode(), int(item.get("mode") or mode))
            for item in source["downwardAPI"].get("items") or ()
        }
    raise Missing(f"a projection of {sorted(source)} is not supported on this node")


def _data(body: Json, ref: Ref, found: Json | None, mode: int, facts: Facts) -> dict[str, File]:
    """The files of a ConfigMap or Secret: all its keys, or the items asked for."""
    optional = bool(body.get("optional"))
    if found is None:
        if optional:
            return {}
        raise Missing(f'{ref.kind.lower()} "{ref.name}" not found')
    encoded = dict(found.get("binaryData") or {}) if ref.kind == "ConfigMap" else dict(found.get("data") or {})
    values = {key: base64.b64decode(value) for key, value in encoded.items()}
    if ref.kind == "ConfigMap":
        values |= {key: value.encode() for key, value in (found.get("data") or {}).items()}
    items = body.get("items")
    if not items:
        return {key: File(value, mode) for key, value in values.items()}
    result = {}
    for item in items:
        if item["key"] in values:
            result[item["path"]] = File(values[item["key"]], int(item.get("mode") or mode))
        elif not optional:
            where = f"{pods.namespace(facts.pod)}/{ref.name}"
            raise Missing(f"references non-existent {ref.kind.lower()} key: {item['key']} of {where}")
    return result


def _downward(item: Json, facts: Facts) -> str:
    if item.get("fieldRef"):
        return field_value(facts, item["fieldRef"]["fieldPath"])
    return resource_value(facts, item["resourceFieldRef"])
