"""The API server accepts what a ModelVersion and a WeightSync may say, and refuses the rest in words that help."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devcluster.access import Access, ApiError
from integration.crd_cases import (
    CHANGES,
    CONDITION,
    COUNT_CASES,
    PLURALS,
    REQUIRED_CASES,
    SMALLEST,
    SPEC_CASES,
    STATUS_CASES,
    SYNC,
    VERSION,
    Case,
    inside,
)

pytest_plugins = ["devcluster.testing"]

CRDS = Path(__file__).parent.parent.parent / "crds"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GROUP = "weightsync.dev"
CASES = [*SPEC_CASES, *REQUIRED_CASES, *COUNT_CASES, *STATUS_CASES]
Json = dict[str, Any]


class Place:
    """A namespace on a cluster that knows both kinds."""

    def __init__(self, cluster: Access, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def path(self, kind: str, name: str = "", *, group: str = GROUP) -> str:
        path = f"/apis/{group}/v1alpha1/namespaces/{self.namespace}/{kind.lower()}s"
        return f"{path}/{name}" if name else path

    def create(self, kind: str, spec: Json, name: str = "", options: str = "", *, group: str = GROUP) -> Json:
        body = {
            "apiVersion": f"{group}/v1alpha1",
            "kind": kind,
            "metadata": {"name": name or f"o-{uuid.uuid4().hex[:12]}"},
            "spec": spec,
        }
        path = self.path(kind, group=group)
        return self.cluster.request("POST", f"{path}?fieldValidation=Strict{options}", body)

    def put(self, made: Json, *, status: bool = False, options: str = "") -> Json:
        group = made["apiVersion"].partition("/")[0]
        path = self.path(made["kind"], made["metadata"]["name"], group=group) + ("/status" if status else "")
        return self.cluster.request("PUT", f"{path}?fieldValidation=Strict{options}", made)

    def get(self, made: Json) -> Json:
        return self.cluster.request("GET", self.path(made["kind"], made["metadata"]["name"]))


@pytest.fixture(scope="module")
def place(cluster: Access) -> Iterator[Place]:
    """Give a new namespace; both CRDs are installed. Several workers may do so at once."""
    for plural in PLURALS.values():
        cluster.kubectl("apply", "--server-side", "-f", str(CRDS / f"{plural}.{GROUP}.yaml"))
    for plural in PLURALS.values():
        established(cluster, f"{plural}.{GROUP}")
    place = Place(cluster, f"crds-{uuid.uuid4().hex[:8]}")
    cluster.request("POST", "/api/v1/namespaces", {"metadata": {"name": place.namespace}})
    for kind in PLURALS:
        served(place, kind, GROUP)
    yield place
    cluster.request("DELETE", f"/api/v1/namespaces/{place.namespace}")


def established(cluster: Access, name: str) -> None:
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", f"crd/{name}")


def served(place: Place, kind: str, group: str) -> None:
    """Wait until the API server answers for a kind, which it refuses with 404, then 429, at first."""
    deadline = time.monotonic() + 30
    while True:
        try:
            place.cluster.request("GET", place.path(kind, group=group))
            return
        except ApiError as error:
            if error.code not in (404, 429) or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def attempt(place: Place, case: Case, value: object) -> None:
    """Send one value of a case to the API server, which keeps nothing; raises its refusal."""
    fields = case.build(value)
    if case.path.startswith("status"):
        made = place.create(case.kind, SMALLEST[case.kind])
        place.put({**made, "status": fields}, status=True, options="&dryRun=All")
    else:
        place.create(case.kind, {**SMALLEST[case.kind], **fields}, "itself", "&dryRun=All")


def plain(field: str) -> str:
    """The path of a field without the numbers of items."""
    return re.sub(r"\[\d+\]", "[]", field)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_keeps_a_rule_is_accepted(place: Place, case: Case):
    assert case.good
    for value in case.good:
        attempt(place, case, value)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_breaks_a_rule_is_refused_at_its_field_in_its_words(place: Place, case: Case):
    assert case.bad
    for value in case.bad:
        with pytest.raises(ApiError) as caught:
            attempt(place, case, value)
        assert caught.value.code == 422, (value, caught.value)
        causes = caught.value.status["details"]["causes"]
        found = [(plain(cause["field"]), cause["message"]) for cause in causes]
        assert any(is_at(case.path, field) and case.words in message for field, message in found), (value, found)


def is_at(path: str, field: str) -> bool:
    """Whether the API server's name for a field means the path; it calls the whole object <nil>."""
    if path.endswith(".*"):
        return re.fullmatch(re.escape(path[:-2]) + r"\[.+\]", field) is not None
    return field == (path or "<nil>")


@pytest.mark.parametrize(("kind", "before", "after", "refusal"), CHANGES)
def test_only_what_is_mutable_can_be_changed(place: Place, kind: str, before: Json, after: Json, refusal: str | None):
    made = place.create(kind, before)
    if refusal is None:
        assert place.put({**made, "spec": after})["metadata"]["generation"] == 2
        return
    with pytest.raises(ApiError) as caught:
        place.put({**made, "spec": after})
    assert caught.value.code == 422
    assert refusal in str(caught.value)
    assert place.get(made)["spec"] == made["spec"]


def test_the_profile_stays_once_there_are_several(place: Place):
    """Today there is one profile, so that the rule shows on a copy of the CRD that has two."""
    group = f"g{uuid.uuid4().hex[:8]}.example"
    copied = place.cluster.request("GET", f"{DEFINITIONS}/modelversions.{GROUP}")
    spec = copied["spec"] | {"group": group}
    spec["names"] = {"kind": "Duplicate", "plural": "duplicates"}  # so that kubectl finds one modelversion
    schema(copied)["properties"]["spec"]["properties"]["profile"]["enum"] = ["LAN", "WAN"]
    body = {**copied, "metadata": {"name": f"duplicates.{group}"}, "spec": spec}
    place.cluster.request("POST", DEFINITIONS, {key: value for key, value in body.items() if key != "status"})
    try:
        established(place.cluster, f"duplicates.{group}")
        served(place, "Duplicate", group)
        made = place.create("Duplicate", {**SMALLEST[VERSION], "profile": "WAN"}, group=group)
        with pytest.raises(ApiError, match="profile cannot be changed"):
            place.put({**made, "spec": {**made["spec"], "profile": "LAN"}})
    finally:
        place.cluster.request("DELETE", f"{DEFINITIONS}/duplicates.{group}")


def test_what_is_left_out_gets_its_default(place: Place):
    version = place.create(VERSION, {**SMALLEST[VERSION], "source": {"hub": {"repo": "o/n"}}})["spec"]
    assert version == {
        "model": "m",
        "source": {"hub": {"repo": "o/n", "revision": "main"}},
        "profile": "LAN",
        "deletionPolicy": "Retain",
    }
    defaults = {"paused": False, "strategy": {"maxUnavailable": "25%"}}
    assert place.create(SYNC, SMALLEST[SYNC])["spec"] == {**SMALLEST[SYNC], **defaults}
    assert place.create(SYNC, {**SMALLEST[SYNC], "strategy": {}})["spec"]["strategy"] == {"maxUnavailable": "25%"}


@pytest.mark.parametrize(
    ("kind", "field"), [(VERSION, "model"), (VERSION, "source"), *((SYNC, f) for f in SMALLEST[SYNC])]
)
def test_an_object_without_a_required_field_is_refused(place: Place, kind: str, field: str):
    spec = {key: value for key, value in SMALLEST[kind].items() if key != field}
    with pytest.raises(ApiError, match=rf"spec\.{field}: Required value") as caught:
        place.create(kind, spec)
    assert caught.value.code == 422


@pytest.mark.parametrize("kind", PLURALS)
def test_an_object_without_a_spec_is_refused(place: Place, kind: str):
    body = {"apiVersion": f"{GROUP}/v1alpha1", "kind": kind, "metadata": {"name": "bare"}}
    with pytest.raises(ApiError, match="spec: Required value"):
        place.cluster.request("POST", place.path(kind), body)


UNKNOWN = [
    (VERSION, inside("surprise")),
    (VERSION, inside("source", "volume", "surprise", beside={"claimName": "c"})),
    (VERSION, inside("job", "resources", "surprise")),
    (VERSION, lambda value: {"job": {"tolerations": [{"key": "a", "surprise": value}]}}),
    (SYNC, inside("surprise")),
    (SYNC, inside("strategy", "surprise", beside={"maxUnavailable": 1})),
    (SYNC, inside("target", "latest", "selector", "surprise")),
]


@pytest.mark.parametrize(("kind", "build"), UNKNOWN)
def test_an_unknown_field_is_refused_where_asked_and_else_dropped(place: Place, kind: str, build: Any):
    spec = {**SMALLEST[kind], **build("x")}
    if "latest" in spec.get("target", {}):
        spec["target"].pop("version", None)
    with pytest.raises(ApiError, match=r'unknown field "spec\..*surprise"') as caught:
        place.create(kind, spec)
    assert caught.value.code == 400
    body = {"apiVersion": f"{GROUP}/v1alpha1", "kind": kind, "metadata": {"name": "dropped"}, "spec": spec}
    kept = place.cluster.request("POST", f"{place.path(kind)}?fieldValidation=Ignore&dryRun=All", body)
    assert "surprise" not in str(kept["spec"])
    assert kept["spec"]["model"] == "m"


@pytest.mark.parametrize("kind", PLURALS)
def test_status_and_spec_are_written_apart(place: Place, kind: str):
    made = place.create(kind, SMALLEST[kind])
    status = {"observedGeneration": 1, "conditions": [CONDITION]}
    assert "status" not in place.put({**made, "status": status})
    written = place.put({**made, "spec": {**made["spec"], "model": "n"}, "status": status}, status=True)
    assert (written["spec"], written["status"]) == (made["spec"], status)
    assert written["metadata"]["generation"] == 1
    place.cluster.kubectl(
        "-n", place.namespace, "wait", "--for=condition=Ready", "--timeout=10s", f"{kind}/{made['metadata']['name']}"
    )


SHOWN = {
    VERSION: (
        {**SMALLEST[VERSION], "parent": "p"},
        {"conditions": [CONDITION], "summary": {"changed": "0.84 %", "delta": "2.1 MiB", "saved": "183x"}},
        {"Model": "m", "Parent": "p", "Ready": "True", "Changed": "0.84 %", "Delta": "2.1 MiB", "Saved": "183x"},
        {"Reason": "Published"},
    ),
    SYNC: (
        SMALLEST[SYNC],
        {
            "targetVersion": "w",
            "currentVersion": "v",
            "conditions": [CONDITION],
            "summary": {"pods": "2/3", "saved": "183x"},
        },
        {"Target": "w", "Current": "v", "Pods": "2/3", "Saved": "183x", "Ready": "True"},
        {"Model": "m", "Reason": "Published"},
    ),
}


@pytest.mark.parametrize("kind", PLURALS)
@pytest.mark.parametrize("short", [True, False])
def test_kubectl_get_shows_what_a_person_on_call_asks(place: Place, kind: str, short: bool):
    spec, status, narrow, wide = SHOWN[kind]
    made = place.create(kind, spec)
    place.put({**made, "status": status}, status=True)
    name = made["metadata"]["name"]
    word = {VERSION: "mver", SYNC: "wsync"}[kind] if short else kind.lower()
    for options, wanted in (([], narrow), (["-o", "wide"], narrow | wide)):
        printed = place.cluster.kubectl("-n", place.namespace, "get", word, name, *options).splitlines()
        cells = [re.split(r"\s{2,}", line.strip()) for line in printed]
        row = dict(zip(*cells, strict=True))
        assert row.pop("NAME") == name
        assert row.pop("AGE")
        assert row == {column.upper(): value for column, value in wanted.items()}


def test_both_kinds_are_in_the_category(place: Place):
    made = [place.create(kind, SMALLEST[kind])["metadata"]["name"] for kind in PLURALS]
    listed = place.cluster.kubectl("-n", place.namespace, "get", "weights", "-o", "name").split()
    assert {f"modelversion.{GROUP}/{made[0]}", f"weightsync.{GROUP}/{made[1]}"} <= set(listed)


# ---- the definitions themselves


def schema(definition: Json) -> Json:
    return definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(node: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Every node of a schema with its path, the object's own metadata aside."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        if path or name != "metadata":
            yield from nodes(child, f"{path}.{name}" if path else name)
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")
    if "additionalProperties" in node:
        yield from nodes(node["additionalProperties"], f"{path}.*")


@pytest.fixture(params=PLURALS)
def kind_and_nodes(request: pytest.FixtureRequest, place: Place) -> tuple[str, list[tuple[str, Json]]]:
    """Give a kind and all nodes of its schema, as the API server holds it."""
    name = f"{PLURALS[request.param]}.{GROUP}"
    return request.param, list(nodes(schema(place.cluster.request("GET", f"{DEFINITIONS}/{name}"))))


# What the API server says of a keyword of the schema, in its first words.
WORDS = {
    "enum": "Unsupported value",
    "minimum": "should be greater than or equal to",
    "maximum": "should be less than or equal to",
    "pattern": "should match",
    "maxItems": "Too many",
    "maxProperties": "Too many",
}


def test_every_rule_has_a_case(kind_and_nodes: tuple[str, list[tuple[str, Json]]]):
    kind, all_nodes = kind_and_nodes
    tried = [(case.path, case.words) for case in CASES if case.kind == kind]
    tried += [("spec", refusal) for changed, _, _, refusal in CHANGES if changed == kind and refusal]
    tried += [("spec", "profile cannot be changed")]
    tried += [("spec", "Required value"), *((f"spec.{field}", "Required value") for field in SMALLEST[kind])]
    rules = [(path, rule["message"]) for path, node in all_nodes for rule in node.get("x-kubernetes-validations", [])]
    for keyword, words in WORDS.items():
        rules += [(path, words) for path, node in all_nodes if keyword in node]
    for path, node in all_nodes:
        rules += [(f"{path}.{name}" if path else name, "Required value") for name in node.get("required", [])]
    assert len(rules) > 15
    missing = [
        (path, said)
        for path, said in rules
        if not any(path == where and (words in said or words.startswith(said)) for where, words in tried)
    ]
    assert missing == []


def test_everything_is_bounded_and_described(kind_and_nodes: tuple[str, list[tuple[str, Json]]]):
    for path, node in kind_and_nodes[1]:
        assert node.get("description", "").endswith(".") or path.endswith(".*"), path
        assert "x-kubernetes-preserve-unknown-fields" not in node, path
        if path in ("apiVersion", "kind"):
            continue
        if node.get("type") == "string":
            assert {"maxLength", "enum", "format"} & set(node), path
        if "x-kubernetes-int-or-string" in node:
            assert "maxLength" in node, path
        assert node.get("type") != "array" or "maxItems" in node, path
        assert "additionalProperties" not in node or "maxProperties" in node, path


LONG = [case for case in SPEC_CASES if "must be" in case.words and any(isinstance(value, str) for value in case.good)]


@pytest.mark.parametrize("case", LONG, ids=str)
def test_what_is_too_long_is_refused(place: Place, case: Case):
    with pytest.raises(ApiError, match=r"Too long: may not be more than \d+ bytes") as caught:
        attempt(place, case, "1" * 600)
    assert caught.value.code == 422
