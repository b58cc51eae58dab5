"""What objects in a store are called, so that a listing of names alone tells which versions and edges exist.

Pure functions from digests to paths and back. Names are immutable and made of what they hold: a retry
writes the same names, and nobody needs to read an object to know what it is. The part of the address
in front of a model (a bucket's prefix, a directory) belongs to the store and never appears here.

Must not read or write anything, and must not accept a name that could leave its model's folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from weightsync.canonical import is_sha256
from weightsync.errors import InputError
from weightsync.files import TEMPORARY

NAME_LIMIT = 253
"""Most characters of a model's or version's name; Kubernetes' limit for an object's name."""

PATH_LIMIT = 1024
"""Most UTF-8 bytes of an object's path, and 255 of each part: what object stores and file systems agree on."""

_BYTES_LIMIT = 1 << 53
_SUBDOMAIN = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_EDGE = re.compile(r"([0-9a-f]{16})\.([0-9a-f]{16}|full)\.(0|[1-9][0-9]{0,15})\.([0-9a-f]{64})\.json")


@dataclass(frozen=True, slots=True)
class EdgeName:
    """What an edge's name says: 16 hex digits of the weights it leads to and from, and what it costs.

    `base16` is None for an edge that needs no base. `bytes` is the size of the edge's data, `sha256` the
    digest of the edge itself. The shortened digests serve to draw the graph; the edge holds the whole ones.
    """

    target16: str
    base16: str | None
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class VersionName:
    """What a version's empty marker says: the version's name and the sha256 (hex) of its manifest."""

    version: str
    manifest: str


def check_name(name: str, what: str = "model") -> str:
    """`name` itself when it can name a model or version (`what` says which, for the message), else `InputError`."""
    if len(name) <= NAME_LIMIT and _SUBDOMAIN.fullmatch(name):
        return name
    raise InputError(
        f"{name[:300]!r} cannot name a {what}: use lower-case letters, digits, '-' and '.', at most {NAME_LIMIT} "
        "characters, with a letter or digit at both ends and around every '.'"
    )


def check_version(name: str) -> str:
    """`name` itself when it can name a version, else `InputError`; 64 hex digits would be taken for a manifest."""
    if is_sha256(name):
        raise InputError(f"{name!r} cannot name a version: it looks like a sha256; choose another name")
    return check_name(name, "version")


def check_path(path: str) -> str:
    """`path` itself when every store can hold an object of that name below its own root, else `InputError`.

    Refused: an empty or absolute path, empty parts, "." and "..", backslashes, control characters (NUL among
    them), text that is not UTF-8, names of temporaries, and what is longer than `PATH_LIMIT`.
    """
    why = _path_fault(path)
    if why is None:
        return path
    raise InputError(f"{path[:300]!r} cannot be an object's path: {why}; use relative parts separated by single '/'")


def _path_fault(path: str) -> str | None:
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        return "it is not valid UTF-8"
    if not path or path.startswith("/"):
        return "it is absolute" if path else "it is empty"
    if size > PATH_LIMIT:
        return f"it is longer than {PATH_LIMIT} bytes"
    if "\\" in path or any(ord(c) < 32 or ord(c) == 127 for c in path):
        return "it holds a backslash or control character"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return f"it holds the part {part!r}"
        if part.startswith(TEMPORARY):
            return f"names that begin with {TEMPORARY!r} are temporaries"
        if len(part.encode()) > 255:
            return "one part is longer than 255 bytes"
    return None


def is_path(path: str) -> bool:
    """Whether `check_path` would accept `path`."""
    return _path_fault(path) is None


def check_prefix(prefix: str) -> str:
    """`prefix` itself when it names a folder ("" or a path that ends in one "/"), else `InputError`."""
    if prefix and not prefix.endswith("/"):
        raise InputError(
            f"{prefix[:300]!r} cannot be listed: a folder's name ends in '/' (or is empty, for everything)"
        )
    if prefix:
        check_path(prefix[:-1])
    return prefix


def data_path(model: str, sha256: str) -> str:
    """Path of a data file (a delta or full shard, a valid safetensors file) of that content."""
    return f"{check_name(model)}/data/{_digest(sha256)}.safetensors"


def blob_path(model: str, sha256: str) -> str:
    """Path of a blob (schema, digests, layout or asset) of that content."""
    return f"{check_name(model)}/blobs/{_digest(sha256)}"


def manifest_path(model: str, sha256: str) -> str:
    """Path of the manifest of that content."""
    return f"{check_name(model)}/manifests/{_digest(sha256)}.json"


def edge_path(model: str, target: str, base: str | None, bytes: int, sha256: str) -> str:
    """Path of the edge with digest `sha256` that leads from weights `base` (None: from nothing) to `target`.

    `target` and `base` are weights digests (64 hex digits), `bytes` the size of the edge's data. Together the
    names in one listing are the graph.
    """
    if not 0 <= bytes < _BYTES_LIMIT:
        raise InputError(f"an edge cannot carry {bytes} bytes: the count must be from 0 to 2^53 - 1")
    name = EdgeName(_digest(target)[:16], None if base is None else _digest(base)[:16], bytes, _digest(sha256))
    return listed_edge_path(model, name)


def listed_edge_path(model: str, name: EdgeName) -> str:
    """Path of an edge from what a listing said of it, the inverse of `parse_edge_path`."""
    return f"{check_name(model)}/edges/{name.target16}.{name.base16 or 'full'}.{name.bytes}.{name.sha256}.json"


def parse_edge_path(path: str) -> EdgeName | None:
    """What the path of an edge says, or None when `path` is not one that `edge_path` makes."""
    parts = _parts(path, "edges", 3)
    found = _EDGE.fullmatch(parts[2]) if parts else None
    if found is None or int(found[3]) >= _BYTES_LIMIT:
        return None
    return EdgeName(found[1], None if found[2] == "full" else found[2], int(found[3]), found[4])


def name_path(model: str, version: str, manifest: str) -> str:
    """Path of the empty marker which says that `version` is the manifest with sha256 `manifest`."""
    return f"{check_name(model)}/names/{check_name(version, 'version')}/{_digest(manifest)}"


def parse_name_path(path: str) -> VersionName | None:
    """What the path of a version's marker says, or None when `path` is not one that `name_path` makes."""
    parts = _parts(path, "names", 4)
    if parts is None or not is_sha256(parts[3]):
        return None
    version = parts[2]
    return VersionName(version, parts[3]) if len(version) <= NAME_LIMIT and _SUBDOMAIN.fullmatch(version) else None


def _parts(path: str, folder: str, count: int) -> list[str] | None:
    """The path's parts when it lies in a model's `folder` and has `count` of them."""
    parts = path.split("/")
    if len(parts) != count or parts[1] != folder:
        return None
    return parts if len(parts[0]) <= NAME_LIMIT and _SUBDOMAIN.fullmatch(parts[0]) else None


def _digest(value: str) -> str:
    if is_sha256(value):
        return value
    raise InputError(f"{value[:100]!r} is not a sha256: 64 lower-case hex digits are needed, without a prefix")
