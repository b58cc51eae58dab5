"""What the API server must accept and refuse in a ModelVersion and a WeightSync, rule by rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

PLURALS = {"ModelVersion": "modelversions", "WeightSync": "weightsyncs"}
SMALLEST: dict[str, Json] = {
    "ModelVersion": {"model": "m", "source": {"volume": {"claimName": "c"}}},
    "WeightSync": {"model": "m", "target": {"version": "v"}, "selector": {"matchLabels": {"app": "chat"}}},
}
AT_LEAST_0 = "should be greater than or equal to 0"
SHA = "sha256:" + "0123456789abcdef" * 4
NOW = "2026-01-01T00:00:00Z"
CONDITION = {"type": "Ready", "status": "True", "lastTransitionTime": NOW, "reason": "Published", "message": ""}
FULL = {"kind": "Full", "bytes": 9, "reversible": False, "digest": SHA}
DELTA = {**FULL, "kind": "Delta", "base": SHA, "reversible": True, "requires": ["schema-change"]}
FAILURE = {"pod": "p", "reason": "DigestMismatch", "message": "", "time": NOW}


@dataclass(frozen=True)
class Case:
    """A rule: `build` puts a value into an object; `path` and `words` are where and how a bad one is refused."""

    kind: str
    path: str
    words: str
    build: Callable[[Any], Json]
    good: tuple[Any, ...]
    bad: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.kind}-{self.path}-{self.words[:24]}"


def inside(*keys: str, beside: Json | None = None) -> Callable[[Any], Json]:
    """A builder that puts the value under these keys, `beside` going next to the last of them."""

    def build(value: Any) -> Json:
        result = {**(beside or {}), keys[-1]: value}
        for key in reversed(keys[:-1]):
            result = {key: result}
        return result

    return build


def dns(kind: str, *keys: str, beside: Json | None = None) -> Case:
    good = ("a", "0", "smollm2-0042", "a.b-c.d", "a" * 253)
    bad = ("", "A", "a_b", "-a", "a-", "a..b", ".a", "a.", "a/b", "a\n", "é")
    return Case(
        kind, ".".join(("spec", *keys)), "must be a DNS-1123 subdomain", inside(*keys, beside=beside), good, bad
    )


def owned(*keys: str) -> Case:
    good = ("o/n", "Org-1/na.me_2", "o" * 96 + "/" + "n" * 96)
    bad = ("", "n", "/n", "o/", "o/n/x", "o /n", "-o/n", "o/..", "o" * 97 + "/n")
    return Case("ModelVersion", ".".join(("spec", *keys)), "must be written owner/name", inside(*keys), good, bad)


def relative(*keys: str, beside: Json) -> Case:
    good = ("", "a", "runs/7/step-42", "a..b/.c/...", "é b", "p" * 512)
    bad = ("/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/..", "./a", "a\\b", "a\nb", "a\0b")
    path = ".".join(("spec", *keys))
    return Case("ModelVersion", path, "must be a relative path", inside(*keys, beside=beside), good, bad)


def whole(kind: str, path: str, words: str, good: tuple[Any, ...], bad: tuple[Any, ...]) -> Case:
    """A case whose values stand at `path` itself."""
    return Case(kind, path, words, inside(*path.split(".")[1:]), good, bad)


def label_map(kind: str, *keys: str) -> list[Case]:
    path, build = ".".join(("spec", *keys)), inside(*keys)
    good = ({"app": ""}, {"a.b/C_d.e": "X-1_2.z"}, {"k" * 63: "v" * 63})
    keys_bad = ({"": "v"}, {"a b": "v"}, {"/a": "v"}, {"A/b": "v"}, {"a/b/c": "v"}, {"k" * 64: "v"}, {"-a": "v"})
    return [
        Case(kind, path, "a key must be a label key", build, good, keys_bad),
        Case(kind, path, "a value must be a label value", build, good, ({"a": "b c"}, {"a": "-"}, {"a": "b/c"})),
    ]


def selector(*keys: str) -> list[Case]:
    """The rules of a LabelSelector."""
    path = ".".join(("spec", *keys, "matchExpressions[]"))
    one = {"key": "a", "operator": "In", "values": ["b"]}

    def build(expression: Any) -> Json:
        return inside(*keys, "matchExpressions")([expression])

    def with_(field: str) -> Callable[[Any], Json]:
        return lambda value: build({**one, field: value})

    operators = (
        {**one, "operator": "NotIn"},
        {"key": "a", "operator": "Exists"},
        {"key": "a", "operator": "DoesNotExist"},
    )
    mixed = ({"key": "a", "operator": "In"}, {**one, "values": []}, {**one, "operator": "Exists"})
    sync = "WeightSync"
    return [
        *label_map(sync, *keys, "matchLabels"),
        Case(sync, path, "values are needed with In and NotIn", build, (one, *operators), mixed),
        Case(sync, path + ".operator", "Unsupported value", with_("operator"), ("In", "NotIn"), ("in", "Gt")),
        Case(sync, path + ".key", "must be a label key", with_("key"), ("a", "a.b/C"), ("", "a b", "a/b/c", "-")),
        Case(sync, path + ".key", "Required value", build, (one,), ({"operator": "Exists"},)),
        Case(sync, path + ".operator", "Required value", build, (one,), ({"key": "a"},)),
        Case(
            sync, path + ".values[]", "a value must be a label value", lambda v: with_("values")([v]),
            ("", "b", "v" * 63), ("b c", "-", "b/c"),
        ),
    ]  # fmt: skip


def quantity(*keys: str) -> Callable[[Any], Json]:
    return lambda value: {"job": {"resources": {keys[0]: {keys[1]: value}}}}


def toleration(value: Any) -> Json:
    return {"job": {"tolerations": [value]}}


def source(*kinds: str) -> Json:
    every = {"hub": {"repo": "o/n"}, "bucket": {"id": "o/n"}, "volume": {"claimName": "c"}}
    return {kind: every[kind] for kind in kinds}


VERSION = "ModelVersion"
SYNC = "WeightSync"
TAINTS = "spec.job.tolerations[]"

SPEC_CASES: list[Case] = [
    dns(VERSION, "model"),
    dns(VERSION, "parent"),
    Case(VERSION, "", "names this object itself", inside("parent"), ("another",), ("itself",)),
    whole(VERSION, "spec.source", "set exactly one of source.hub, source.bucket and source.volume",
          (source("hub"), source("bucket"), source("volume")),
          ({}, source("hub", "bucket"), source("bucket", "volume"), source("hub", "bucket", "volume"))),
    owned("source", "hub", "repo"),
    Case(VERSION, "spec.source.hub.revision", "must be a branch, a tag or a commit",
         inside("source", "hub", "revision", beside={"repo": "o/n"}),
         ("main", "refs/pr/7", "v1.2_x-3", "0" * 40), ("", "/main", "a b", "a..b", "-x")),
    owned("source", "bucket", "id"),
    relative("source", "bucket", "path", beside={"id": "o/n"}),
    dns(VERSION, "source", "volume", "claimName"),
    relative("source", "volume", "path", beside={"claimName": "c"}),
    whole(VERSION, "spec.store", "set exactly one of store.bucket and store.volume",
          (source("bucket"), source("volume"), {**source("bucket"), "secretRef": {"name": "s"}}),
          ({}, source("bucket", "volume"), {"secretRef": {"name": "s"}})),
    owned("store", "bucket", "id"),
    relative("store", "bucket", "prefix", beside={"id": "o/n"}),
    dns(VERSION, "store", "volume", "claimName"),
    relative("store", "volume", "path", beside={"claimName": "c"}),
    Case(VERSION, "spec.store.secretRef.name", "must be a DNS-1123 subdomain",
         lambda name: {"store": {**source("bucket"), "secretRef": {"name": name}}}, ("hub-token",), ("", "A", "a/b")),
    whole(VERSION, "spec.profile", "Unsupported value", ("LAN",), ("WAN", "lan", "")),
    whole(VERSION, "spec.deletionPolicy", "Unsupported value", ("Retain",), ("Delete", "retain", "")),
    whole(VERSION, "spec.job.gpus", AT_LEAST_0, (0, 1), (-1,)),
    whole(VERSION, "spec.job.gpus", "should be less than or equal to 16", (16,), (17,)),
    whole(VERSION, "spec.job.activeDeadlineSeconds", "should be greater than or equal to 1", (1,), (0, -1)),
    whole(VERSION, "spec.job.activeDeadlineSeconds", "should be less than or equal to 604800", (604800,), (604801,)),
    *(Case(VERSION, f"spec.job.resources.{which}.*", "must be a quantity that is not negative", quantity(which, "cpu"),
           (0, 2, "500m", "8Gi", "1.5", "0", "1e3"),
                (-1, "-1", "8GiB", "", "many")) for which in ("limits", "requests")),
    *label_map(VERSION, "job", "nodeSelector"),
    *label_map(VERSION, "job", "labels"),
    Case(VERSION, TAINTS, "set key, or set operator to Exists", toleration,
         ({"operator": "Exists"}, {"key": "a"}, {"key": "a", "operator": "Equal", "value": "b"}),
         ({}, {"key": ""}, {"operator": "Equal", "value": "b"})),
    Case(VERSION, TAINTS, "leave value out where operator is Exists", toleration,
         ({"key": "a", "operator": "Exists"}, {"key": "a", "operator": "Exists", "value": ""}),
         ({"key": "a", "operator": "Exists", "value": "b"},)),
    Case(VERSION, TAINTS, "set effect to NoExecute", toleration,
         ({"key": "a", "effect": "NoExecute", "tolerationSeconds": 9},),
         ({"key": "a", "tolerationSeconds": 9}, {"key": "a", "effect": "NoSchedule", "tolerationSeconds": 9})),
    Case(VERSION, TAINTS + ".operator", "Unsupported value", lambda v: toleration({"key": "a", "operator": v}),
         ("Equal", "Exists"), ("In",)),
    Case(VERSION, TAINTS + ".effect", "Unsupported value", lambda v: toleration({"key": "a", "effect": v}),
         ("NoSchedule", "PreferNoSchedule", "NoExecute"), ("Never",)),
    Case(VERSION, TAINTS + ".key", "Too long", lambda v: toleration({"key": v}), ("a",), ("a" * 318,)),
    Case(VERSION, TAINTS + ".value", "Too long", lambda v: toleration({"key": "a", "value": v}), ("b",), ("b" * 64,)),
    dns(VERSION, "job", "priorityClassName"),
    dns(VERSION, "job", "serviceAccountName"),
    Case(VERSION, "spec.job.scratch.size", "must be a quantity above zero", inside("job", "scratch", "size"),
         (1, "40Gi", "1"), (0, "0", "0Gi", -1, "-1Gi", "big", "")),
    dns(VERSION, "job", "scratch", "storageClassName", beside={"size": "1Gi"}),
    dns(SYNC, "model"),
    whole(SYNC, "spec.target", "set exactly one of target.version and target.latest",
          ({"version": "v"}, {"latest": {}}, {"latest": {"selector": {}}}), ({}, {"version": "v", "latest": {}})),
    dns(SYNC, "target", "version"),
    *selector("target", "latest", "selector"),
    whole(SYNC, "spec.selector", "selector is empty and would take every pod",
          ({"matchLabels": {"a": "b"}}, {"matchExpressions": [{"key": "a", "operator": "Exists"}]}),
          ({}, {"matchLabels": {}}, {"matchExpressions": []}, {"matchLabels": {}, "matchExpressions": []})),
    *selector("selector"),
    whole(SYNC, "spec.paused", "must be of type boolean", (True, False), ("true", 1)),
    whole(SYNC, "spec.strategy.maxUnavailable", "must be a number of pods from 1, or a share from 1% to 100%",
          (1, 7, 1000000, "1%", "25%", "99%", "100%"), (0, -1, "0%", "101%", "5", "5.5%", "%", "-1%", "05%", "")),
]  # fmt: skip

# What must be there, and how many there may be: where the limit itself still passes.
REQUIRED_CASES: list[Case] = [
    *(Case(kind, path, "Required value", inside(*(path.split(".")[1:-1])), (good,), ({},)) for kind, path, good in (
        (VERSION, "spec.source.hub.repo", {"repo": "o/n"}),
        (VERSION, "spec.source.bucket.id", {"id": "o/n"}),
        (VERSION, "spec.source.volume.claimName", {"claimName": "c"}),
        (VERSION, "spec.store.bucket.id", {"id": "o/n"}),
        (VERSION, "spec.store.volume.claimName", {"claimName": "c"}),
        (VERSION, "spec.job.scratch.size", {"size": "1Gi"}),
    )),
    Case(VERSION, "spec.store.secretRef.name", "Required value",
         lambda ref: {"store": {**source("bucket"), "secretRef": ref}}, ({"name": "s"},), ({},)),
]  # fmt: skip


def many(count: int) -> Json:
    return {f"k{number}": "1" for number in range(count)}


def expressions(count: int) -> list[Json]:
    return [{"key": f"k{number}", "operator": "Exists"} for number in range(count)]


def values(count: int) -> Json:
    return {"matchExpressions": [{"key": "a", "operator": "In", "values": [str(n) for n in range(count)]}]}


COUNT_CASES: list[Case] = [
    *(whole(VERSION, f"spec.job.{path}", "Too many", (many(most),), (many(most + 1),)) for path, most in (
        ("resources.limits", 16), ("resources.requests", 16), ("nodeSelector", 32), ("labels", 32))),
    whole(VERSION, "spec.job.tolerations", "Too many", ([{"key": "a"}] * 32,), ([{"key": "a"}] * 33,)),
    *(case for keys in (("selector",), ("target", "latest", "selector")) for case in (
        Case(SYNC, f"spec.{'.'.join(keys)}.matchLabels", "Too many", inside(*keys, "matchLabels"),
             (many(16),), (many(17),)),
        Case(SYNC, f"spec.{'.'.join(keys)}.matchExpressions", "Too many", inside(*keys, "matchExpressions"),
             (expressions(16),), (expressions(17),)),
        Case(SYNC, f"spec.{'.'.join(keys)}.matchExpressions[].values", "Too many", inside(*keys),
             (values(32),), (values(33),)),
    )),
]  # fmt: skip


def digest(path: str, build: Callable[[Any], Json]) -> Case:
    bad = ("", SHA[:-1], SHA[:-1] + "g", SHA.upper(), SHA[7:], "sha512:" + SHA[7:])
    return Case(VERSION, path, "should match '^sha256:", build, (SHA,), bad)


def without(full: Json, field: str) -> Json:
    return {key: value for key, value in full.items() if key != field}


def condition(kind: str) -> list[Case]:
    def build(value: Any) -> Json:
        return {"conditions": [{**CONDITION, **value}]}

    def lacking(field: str) -> Json:
        return {"conditions": [without(CONDITION, field)]}

    at = "status.conditions[]"
    twice = ([CONDITION, {**CONDITION, "type": "Stalled"}],), ([CONDITION, CONDITION],)
    nine = [{**CONDITION, "type": f"T{number}"} for number in range(9)]
    return [
        Case(kind, at, "Duplicate value", inside("conditions"), *twice),
        Case(kind, "status.conditions", "Too many", inside("conditions"), (nine[:8],), (nine,)),
        Case(kind, at + ".status", "Unsupported value", build, ({"status": "Unknown"},), ({"status": "true"},)),
        Case(kind, at + ".type", "should match", build, ({"type": "a.b/Ready"},), ({"type": "not one"}, {"type": ""})),
        Case(kind, at + ".reason", "should match", build, ({"reason": "NoPods"},), ({"reason": "No pods"},)),
        Case(kind, at + ".lastTransitionTime", "must be of type date-time", build, ({},),
             ({"lastTransitionTime": "1"},)),
        Case(kind, at + ".observedGeneration", AT_LEAST_0, build, ({"observedGeneration": 0},),
             ({"observedGeneration": -1},)),
        Case(kind, "status.observedGeneration", AT_LEAST_0, inside("observedGeneration"), (0, 7), (-1,)),
        *(Case(kind, f"{at}.{field}", "Required value", lacking, ("observedGeneration",), (field,))
          for field in CONDITION),
    ]  # fmt: skip


def edges(*several: Json) -> Json:
    return {"edges": list(several)}


STATUS_CASES: list[Case] = [
    *condition(VERSION),
    *condition(SYNC),
    digest("status.manifestDigest", inside("manifestDigest")),
    digest("status.weightsDigest", inside("weightsDigest")),
    digest("status.edges[].base", lambda v: edges({**DELTA, "base": v})),
    digest("status.edges[].digest", lambda v: edges({**DELTA, "digest": v})),
    Case(VERSION, "status.edges[]", "set base, except where kind is Full", lambda v: edges(v),
         (DELTA, FULL), ({**FULL, "base": SHA}, {**FULL, "kind": "Delta"})),
    Case(VERSION, "status.edges[]", "an edge without base cannot be reversible", lambda v: edges(v),
         (DELTA, {**DELTA, "reversible": False}), ({**FULL, "reversible": True},)),
    Case(VERSION, "status.edges[].kind", "Unsupported value", lambda v: edges({**DELTA, "kind": v}),
         ("Delta", "Merge"), ("full",)),
    Case(VERSION, "status.edges[].bytes", AT_LEAST_0, lambda v: edges({**DELTA, "bytes": v}), (0,), (-1,)),
    *(Case(VERSION, f"status.edges[].{field}", "Required value", lambda f: edges(without(DELTA, f)),
           ("requires",), (field,))
      for field in ("kind", "bytes", "reversible", "digest")),
    Case(VERSION, "status.edges[].requires", "Too many",
         lambda n: edges({**DELTA, "requires": [str(i) for i in range(n)]}),
         (0, 16), (17,)),
    whole(VERSION, "status.manifestDigest", "Too long", (SHA,), (SHA + "0",)),
    Case(VERSION, "status.edges", "Too many", lambda n: edges(*[DELTA] * n), (0, 16), (17,)),
    whole(VERSION, "status.inUseBy", "Too many", (["a"], [str(n) for n in range(16)]), ([str(n) for n in range(17)],)),
    Case(VERSION, "status.inUseBy[]", "Duplicate value", inside("inUseBy"), (["a", "b"],), (["a", "a"],)),
    Case(VERSION, "status.edges[].requires[]", "Duplicate value", lambda v: edges({**DELTA, "requires": v}),
         (["a", "b"],), (["a", "a"],)),
    *(whole(VERSION, f"status.{path}", AT_LEAST_0, (0, 2**53), (-1,))
      for path in ("bytes.full", "bytes.delta", "elements.total", "elements.changed", "job.attempts")),
    whole(SYNC, "status.failures", "Too many", ([], [FAILURE] * 10), ([FAILURE] * 11,)),
    Case(SYNC, "status.failures[].reason", "should match", lambda v: {"failures": [{**FAILURE, "reason": v}]},
         ("DigestMismatch",), ("", "two words")),
    *(Case(SYNC, f"status.failures[].{field}", "Required value", lambda f: {"failures": [without(FAILURE, f)]},
           ("none",), (field,)) for field in FAILURE),
    *(whole(SYNC, f"status.bytes.{field}", AT_LEAST_0, (0, 2**53),
           (-1,)) for field in ("downloaded", "fullEquivalent")),
    *(whole(SYNC, f"status.pods.{field}", AT_LEAST_0, (0, 7), (-1,))
      for field in ("matched", "updated", "updating", "ready", "failed", "unreachable")),
]  # fmt: skip

# Changes of a stored object: what it was, what it becomes, and the refusal, or None where it is accepted.
V, S = SMALLEST[VERSION], SMALLEST[SYNC]
OTHER = {"volume": {"claimName": "other"}}
CHANGES: list[tuple[str, Json, Json, str | None]] = [
    (VERSION, V, {**V, "model": "n"}, "model cannot be changed"),
    (VERSION, {**V, "parent": "p"}, {**V, "parent": "q"}, "parent cannot be changed, added or removed"),
    (VERSION, V, {**V, "parent": "p"}, "parent cannot be changed, added or removed"),
    (VERSION, {**V, "parent": "p"}, V, "parent cannot be changed, added or removed"),
    (VERSION, V, {**V, "source": OTHER}, "source cannot be changed"),
    (VERSION, V, {**V, "source": source("hub")}, "source cannot be changed"),
    (VERSION, V, {**V, "source": {"volume": {"claimName": "c", "path": "p"}}}, "source cannot be changed"),
    (VERSION, {**V, "store": OTHER}, {**V, "store": source("bucket")}, "store cannot be changed, added or removed"),
    (VERSION, V, {**V, "store": OTHER}, "store cannot be changed, added or removed"),
    (VERSION, {**V, "store": OTHER}, V, "store cannot be changed, added or removed"),
    (VERSION, {**V, "store": OTHER}, {**V, "store": {**OTHER, "secretRef": {"name": "s"}}}, "store cannot be changed"),
    (VERSION, {**V, "parent": "p", "store": OTHER}, {**V, "parent": "p", "store": OTHER, "job": {"gpus": 1}}, None),
    (VERSION, {**V, "job": {"gpus": 1}}, V, None),
    (SYNC, S, {**S, "model": "n"}, "model cannot be changed"),
    (SYNC, S, {**S, "target": {"version": "w"}}, None),
    (SYNC, S, {**S, "target": {"latest": {}}, "paused": True, "strategy": {"maxUnavailable": 1}}, None),
    (SYNC, S, {**S, "selector": {"matchLabels": {"app": "other"}}}, None),
]
