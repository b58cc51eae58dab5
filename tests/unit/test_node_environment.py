"""What a container's environment and command line become; what the downward API tells."""

from __future__ import annotations

import base64
from fractions import Fraction
from typing import Any

import pytest

from devcluster.node.environment import Missing, command, environment, expand, references
from devcluster.node.fields import Facts, UnknownField, field_value, resource_value
from devcluster.node.images import Image, find
from devcluster.node.quantity import quantity, whole

POD: dict[str, Any] = {
    "metadata": {
        "name": "p",
        "namespace": "n",
        "uid": "u",
        "labels": {"b": "2", "a": 'say "hi"'},
        "annotations": {"k/x": "v"},
    },
    "spec": {
        "nodeName": "node",
        "serviceAccountName": "sa",
        "containers": [
            {
                "name": "x",
                "resources": {"limits": {"cpu": "250m", "memory": "64Mi"}, "requests": {"memory": "1Mi"}},
            }
        ],
    },
}
FACTS = Facts(POD, "127.64.0.2", "127.0.0.1", {"cpu": "64"})
OBJECTS: dict[tuple[str, str], dict[str, Any]] = {
    ("ConfigMap", "cm"): {"data": {"A": "1", "B": "2"}},
    ("Secret", "s"): {"data": {"KEY": base64.b64encode(b"hidden").decode()}},
}


def lookup(kind: str, name: str) -> dict[str, Any] | None:
    """Find an object of the table above."""
    return OBJECTS.get((kind, name))


QUANTITIES = {
    "1": 1,
    "250m": Fraction(1, 4),
    "1Ki": 1024,
    "1.5Gi": 1.5 * 2**30,
    "1e3": 1000,
    "2E": 2 * 10**18,
    ".5": Fraction(1, 2),
}


@pytest.mark.parametrize(("text", "value"), QUANTITIES.items())
def test_quantities(text: str, value: float) -> None:
    """Quantities are exact; an E with digits is an exponent and without a unit."""
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "x", "1 Gi", "1KiB", "--1"])
def test_what_is_no_quantity(text: str) -> None:
    """Nonsense is refused."""
    with pytest.raises(ValueError, match="no quantity"):
        quantity(text)


def test_whole_units_are_rounded_up() -> None:
    """As resourceFieldRef does it."""
    assert (whole("250m"), whole("250m", "1m"), whole("64Mi", "1Mi"), whole("1"), whole("0")) == (1, 250, 64, 1, 0)


EXPANSIONS = {
    "$(A)": "1",
    "x$(A)y$(A)": "x1y1",
    "$(NONE)": "$(NONE)",
    "$$(A)": "$(A)",
    "$$$(A)": "$1",
    "$A ${A} $": "$A ${A} $",
    "$(A": "$(A",
}


@pytest.mark.parametrize(("text", "result"), EXPANSIONS.items())
def test_expansion(text: str, result: str) -> None:
    """`$(VAR)` and its escape, exactly as Kubernetes has them."""
    assert expand(text, {"A": "1"}) == result


FIELDS = {
    "metadata.name": "p",
    "metadata.namespace": "n",
    "metadata.uid": "u",
    "metadata.labels['b']": "2",
    "metadata.labels['none']": "",
    "metadata.annotations['k/x']": "v",
    "metadata.labels": 'a="say \\"hi\\""\nb="2"',
    "spec.nodeName": "node",
    "spec.serviceAccountName": "sa",
    "status.podIP": "127.64.0.2",
    "status.hostIP": "127.0.0.1",
}


@pytest.mark.parametrize(("path", "value"), FIELDS.items())
def test_fields(path: str, value: str) -> None:
    """Every field that pods may ask for."""
    assert field_value(FACTS, path) == value


def test_unknown_fields() -> None:
    """What no pod has is refused."""
    with pytest.raises(UnknownField):
        field_value(FACTS, "spec.secret")
    with pytest.raises(UnknownField):
        resource_value(FACTS, {"resource": "limits.cpu", "containerName": "none"})


RESOURCES = [
    ({"resource": "limits.cpu"}, "1"),
    ({"resource": "limits.cpu", "divisor": "1m"}, "250"),
    ({"resource": "limits.memory", "divisor": "1Mi"}, "64"),
    ({"resource": "requests.memory"}, "1048576"),
    ({"resource": "requests.cpu"}, "0"),
]


@pytest.mark.parametrize(("ref", "value"), RESOURCES)
def test_resources(ref: dict[str, str], value: str) -> None:
    """Limits and requests in units of the divisor."""
    assert resource_value(FACTS, ref, "x") == value


def test_a_limit_that_is_not_set_is_the_nodes() -> None:
    """As the kubelet answers for an unlimited container."""
    pod = POD | {"spec": {"containers": [{"name": "x"}]}}
    assert resource_value(Facts(pod, "", "", {"cpu": "64"}), {"resource": "limits.cpu"}, "x") == "64"


def test_environment_in_its_order() -> None:
    """The base, then envFrom, then env, which may refer to all before it."""
    container = {
        "name": "x",
        "envFrom": [{"prefix": "CM_", "configMapRef": {"name": "cm"}}, {"secretRef": {"name": "s"}}],
        "env": [
            {"name": "FROM", "value": "$(CM_A)-$(BASE)-$(LATER)"},
            {"name": "LATER", "value": "x"},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
            {"name": "ONE", "valueFrom": {"configMapKeyRef": {"name": "cm", "key": "B"}}},
            {"name": "GONE", "valueFrom": {"secretKeyRef": {"name": "none", "key": "k", "optional": True}}},
            {"name": "BASE", "value": "over"},
            {"name": "EMPTY"},
        ],
    }
    assert references(container) == {("ConfigMap", "cm"), ("Secret", "s"), ("Secret", "none")}
    assert environment(container, FACTS, lookup, {"BASE": "base"}) == {
        "BASE": "over",
        "CM_A": "1",
        "CM_B": "2",
        "KEY": "hidden",
        "FROM": "1-base-$(LATER)",
        "LATER": "x",
        "POD_IP": "127.64.0.2",
        "CPU": "1",
        "ONE": "2",
        "EMPTY": "",
    }


MISSING = {
    'configmap "none" not found': {"envFrom": [{"configMapRef": {"name": "none"}}]},
    'secret "none" not found': {"env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "none", "key": "k"}}}]},
    "couldn't find key k in ConfigMap n/cm": {
        "env": [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "cm", "key": "k"}}}]
    },
}


@pytest.mark.parametrize(("words", "container"), MISSING.items())
def test_what_is_missing_is_named(words: str, container: dict[str, Any]) -> None:
    """In the kubelet's words."""
    with pytest.raises(Missing, match=words):
        environment({"name": "x", **container}, FACTS, lookup, {})


COMMANDS = {
    "neither": ({}, ["run", "-a"]),
    "args": ({"args": ["$(V)"]}, ["run", "v"]),
    "command": ({"command": ["sh"]}, ["sh"]),
    "both": ({"command": ["sh", "-c"], "args": ["echo $(V)"]}, ["sh", "-c", "echo v"]),
}


@pytest.mark.parametrize(("container", "line"), COMMANDS.values(), ids=COMMANDS.keys())
def test_command_lines(container: dict[str, Any], line: list[str]) -> None:
    """Command replaces the image's whole line, args only its arguments."""
    assert command(container, ["run"], ["-a"], {"V": "v"}) == line


def test_images_are_found_by_name_tag_or_pattern() -> None:
    """The most exact entry of the table wins."""
    exact, bare, near, far = (Image((name,)) for name in ("exact", "bare", "near", "far"))
    table = {"r.io/a:1": exact, "r.io/a": bare, "r.io/team/*": near, "*": far, "r.io:5000/b": exact}
    assert find(table, "r.io/a:1") is exact
    assert find(table, "r.io/a:2") is bare
    assert find(table, "r.io/a:1@sha256:00") is exact
    assert find(table, "r.io:5000/b:9") is exact
    assert find(table, "r.io/team/c:1") is near
    assert find(table, "other") is far
    assert find({"a": exact}, "b") is None
