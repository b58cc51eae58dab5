"""Names of objects: what they say, that they can be read back, and that none leads out of its folder."""

from __future__ import annotations

import posixpath
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import InputError
from weightsync.store import names

A, B, C = "a1" * 32, "b2" * 32, "c3" * 32
digests = st.text("0123456789abcdef", min_size=64, max_size=64)
good_names = st.from_regex(
    r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?){0,3}", fullmatch=True
)


def test_names_are_the_documented_ones() -> None:
    """Names are a format: these exact paths are what published stores hold."""
    assert names.data_path("smol", A) == f"smol/data/{A}.safetensors"
    assert names.blob_path("smol", A) == f"smol/blobs/{A}"
    assert names.manifest_path("smol", A) == f"smol/manifests/{A}.json"
    assert names.edge_path("smol", A, B, 17, C) == f"smol/edges/{A[:16]}.{B[:16]}.17.{C}.json"
    assert names.edge_path("smol", A, None, 0, C) == f"smol/edges/{A[:16]}.full.0.{C}.json"
    assert names.name_path("smol", "step-7.b", A) == f"smol/names/step-7.b/{A}"


@given(good_names, digests, st.none() | digests, st.integers(0, 2**53 - 1), digests)
def test_an_edge_name_says_what_it_was_made_of(model: str, target: str, base: str | None, size: int, sha: str) -> None:
    """Reading an edge's path gives back what went into it."""
    found = names.parse_edge_path(names.edge_path(model, target, base, size, sha))
    assert found == names.EdgeName(target[:16], base and base[:16], size, sha)


@given(good_names, good_names, digests)
def test_a_version_name_says_what_it_was_made_of(model: str, version: str, sha: str) -> None:
    """Reading a version's path gives back what went into it."""
    assert names.parse_name_path(names.name_path(model, version, sha)) == names.VersionName(version, sha)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "smol/edges/",
        f"smol/edges/{A[:16]}.{B[:16]}.17.{C}",
        f"smol/edges/{A[:16]}.{B[:16]}.017.{C}.json",
        f"smol/edges/{A[:16]}.{B[:16]}.-1.{C}.json",
        f"smol/edges/{A[:16]}.{B[:16]}.{2**53}.{C}.json",
        f"smol/edges/{A[:16]}.{B[:16]}.١.{C}.json",
        f"smol/edges/{A[:16].upper()}.{B[:16]}.1.{C}.json",
        f"smol/edges/{A[:15]}.{B[:16]}.1.{C}.json",
        f"smol/edges/{A[:16]}.FULL.1.{C}.json",
        f"smol/edges/{A[:16]}.full.1.{C}.json\n",
        f"smol/edges/deeper/{A[:16]}.full.1.{C}.json",
        f"Smol/edges/{A[:16]}.full.1.{C}.json",
        f"../edges/{A[:16]}.full.1.{C}.json",
        f"smol/blobs/{A[:16]}.full.1.{C}.json",
    ],
)
def test_what_is_no_edge_name_is_not_taken_for_one(path: str) -> None:
    """A foreign or malformed name in a listing is passed over, not misread."""
    assert names.parse_edge_path(path) is None


@pytest.mark.parametrize(
    "path",
    ["", f"smol/names/v1/{A[:63]}", f"smol/names/V1/{A}", f"smol/names/../{A}", f"smol/names/{A}", f"m/edges/v/{A}"],
)
def test_what_is_no_version_name_is_not_taken_for_one(path: str) -> None:
    """A foreign or malformed name in a listing is passed over, not misread."""
    assert names.parse_name_path(path) is None


@pytest.mark.parametrize("name", ["a", "7", "smollm2-0042", "a.b-c.d", "a" * 253])
def test_names_that_kubernetes_takes_are_taken(name: str) -> None:
    """Whatever can name a Kubernetes object can name a model."""
    assert names.check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "A", "ä", "a_b", "a/b", "-a", "a-", ".a", "a.", "a..b", "a.-b", "a b", "a\n", "a\0", "..", "a" * 254]
)
def test_other_names_are_refused_with_what_is_allowed(name: str) -> None:
    """A bad name is refused by every function that takes one, and the message says what would do."""
    makers: list[Callable[[], str]] = [
        lambda: names.blob_path(name, A),
        lambda: names.data_path(name, A),
        lambda: names.manifest_path(name, A),
        lambda: names.edge_path(name, A, B, 1, C),
        lambda: names.name_path(name, "v", A),
        lambda: names.name_path("m", name, A),
    ]
    for make in makers:
        with pytest.raises(InputError, match=r"lower-case letters, digits, '-' and '\.', at most 253"):
            make()


@pytest.mark.parametrize("digest", ["", A[:63], A + "0", A.upper(), "sha256:" + A, "g" * 64, A[:-1] + "\n"])
def test_digests_must_be_plain_hex(digest: str) -> None:
    """A digest in another spelling would name another object, so it is refused."""
    makers: list[Callable[[], str]] = [
        lambda: names.blob_path("m", digest),
        lambda: names.edge_path("m", digest, B, 1, C),
        lambda: names.edge_path("m", A, digest, 1, C),
        lambda: names.edge_path("m", A, B, 1, digest),
        lambda: names.name_path("m", "v", digest),
    ]
    for make in makers:
        with pytest.raises(InputError, match="64 lower-case hex digits"):
            make()


@pytest.mark.parametrize("size", [-1, 2**53])
def test_sizes_must_be_exact_in_json(size: int) -> None:
    """A count that JSON readers could round is refused."""
    with pytest.raises(InputError, match=r"2\^53"):
        names.edge_path("m", A, B, size, C)


parts = st.one_of(
    st.sampled_from(["", ".", "..", "a", ".tmp-1", "..a", "a" * 256, "\\", "\0", "\n", "é"]), st.text(max_size=5)
)


@given(st.lists(parts, max_size=5).map("/".join))
def test_no_accepted_path_leaves_the_root(path: str) -> None:
    """A path that is accepted stays below the root it is joined to, means the same there, and is no temporary."""
    if names.is_path(path):
        assert names.check_path(path) == path
        assert posixpath.normpath("/root/" + path) == "/root/" + path
        assert not any(part.startswith(names.TEMPORARY) for part in path.split("/"))
        assert path.encode().decode() == path
    else:
        with pytest.raises(InputError, match="cannot be an object's path"):
            names.check_path(path)


def test_ordinary_paths_are_accepted() -> None:
    """The check does not refuse what the library itself makes, nor dots that mean nothing."""
    for path in (names.edge_path("m" * 200, A, B, 2**53 - 1, C), "a", "..a/b..", "...", "ü/日本", "a" * 255):
        assert names.is_path(path)


@pytest.mark.parametrize("prefix", ["a", "/", "a//", "../", "a/../", "\0/"])
def test_only_folders_can_be_listed(prefix: str) -> None:
    """A prefix is a folder, so that no listing takes "edges2" for a part of "edges"."""
    with pytest.raises(InputError):
        names.check_prefix(prefix)
    assert names.check_prefix("a/b/") == "a/b/"
    assert names.check_prefix("") == ""
