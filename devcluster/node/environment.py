"""A container's environment and command line: `env`, `envFrom`, `$(VAR)`. Pure.

A ConfigMap or Secret that must be there and is not raises Missing; the worker then waits, as the
kubelet does, with CreateContainerConfigError.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from devcluster.node.fields import Facts, field_value, resource_value
from devcluster.node.pods import Json

Lookup = Callable[[str, str], Mapping[str, Any] | None]  # (kind, name) to object
_REFERENCE = re.compile(r"\$(\$|\(([^()]*)\))")


class Missing(LookupError):
    """An object, or a key of it, that a container needs."""


def references(container: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The ConfigMaps and Secrets a container's environment refers to, as (kind, name)."""
    found = set()
    for source in container.get("envFrom") or ():
        found |= {(kind, source[ref]["name"]) for kind, ref in _FROM if source.get(ref)}
    for entry in container.get("env") or ():
        found |= {(kind, ref["name"]) for kind, ref in _key_references(entry)}
    return found


def environment(container: Mapping[str, Any], facts: Facts, lookup: Lookup, base: Mapping[str, str]) -> dict[str, str]:
    """The variables of a container, over those its image and the node give it."""
    result = dict(base)
    for source in container.get("envFrom") or ():
        for kind, field in _FROM:
            if source.get(field):
                values = _values(kind, source[field], lookup)
                result |= {str(source.get("prefix") or "") + key: value for key, value in values.items()}
    for entry in container.get("env") or ():
        value = _value(entry, container, facts, lookup, result)
        if value is not None:
            result[entry["name"]] = value
    return result


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)`; `$$` is one dollar, and what is not known stays as it is written."""

    def replacement(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return variables.get(match[2], match[0])

    return _REFERENCE.sub(replacement, text)


def command(
    container: Mapping[str, Any], entrypoint: Iterable[str], arguments: Iterable[str], variables: Mapping[str, str]
) -> list[str]:
    """What to execute: a container's command replaces the image's whole line, its args only the arguments."""
    own, args = container.get("command"), container.get("args")
    if own:
        line = [*own, *(args or ())]
        return [expand(word, variables) for word in line]
    return [*entrypoint, *([expand(word, variables) for word in args] if args else arguments)]


_FROM = (("ConfigMap", "configMapRef"), ("Secret", "secretRef"))


def _key_references(entry: Json) -> list[tuple[str, Json]]:
    source = entry.get("valueFrom") or {}
    pairs = (("ConfigMap", source.get("configMapKeyRef")), ("Secret", source.get("secretKeyRef")))
    return [(kind, ref) for kind, ref in pairs if ref]


def _value(
    entry: Json, container: Mapping[str, Any], facts: Facts, lookup: Lookup, sofar: Mapping[str, str]
) -> str | None:
    source = entry.get("valueFrom")
    if not source:
        return expand(str(entry.get("value") or ""), sofar)
    if source.get("fieldRef"):
        return field_value(facts, source["fieldRef"]["fieldPath"])
    if source.get("resourceFieldRef"):
        return resource_value(facts, source["resourceFieldRef"], container["name"])
    for kind, ref in _key_references(entry):
        values = _values(kind, ref, lookup)
        if ref["key"] in values:
            return values[ref["key"]]
        if not ref.get("optional"):
            raise Missing(
                f"couldn't find key {ref['key']} in {kind} {facts.pod['metadata']['namespace']}/{ref['name']}"
            )
        return None
    raise Missing(f"the source of variable {entry['name']} is not supported on this node")


def _values(kind: str, ref: Json, lookup: Lookup) -> dict[str, str]:
    """The data of a referenced object as text."""
    found = lookup(kind, ref["name"])
    if found is None:
        if ref.get("optional"):
            return {}
        raise Missing(f'{kind.lower()} "{ref["name"]}" not found')
    data = found.get("data") or {}
    if kind == "ConfigMap":
        return dict(data)
    return {key: base64.b64decode(value).decode(errors="replace") for key, value in data.items()}
