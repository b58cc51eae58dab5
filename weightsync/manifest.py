"""What a version is (manifest) and what leads to it (edge): canonical JSON documents, and nothing that reads files.

Two identities. *weights* names the tensors alone and is a node of the version graph; *content* names tensors and
assets together. Both documents are named by the sha256 of their bytes, as received: readers never re-encode.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from weightsync import assets, canonical
from weightsync.assets import Asset
from weightsync.errors import FormatError, Unsupported

MANIFEST_FORMAT = "weightsync.manifest/1"
EDGE_FORMAT = "weightsync.edge/1"

FEATURES: frozenset[str] = frozenset()
"""Words in `requires` that this version understands. An edge that requires another is not usable, not an error."""

Kind: TypeAlias = Literal["Delta", "Merge", "Full"]
Profile: TypeAlias = Literal["LAN", "WAN"]


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version: sha256 (hex) of its schema, digests and layout blobs, its assets, and its two identities."""

    model: str
    schema: str
    digests: str
    layout: str
    assets: tuple[Asset, ...]
    weights: str
    requires: tuple[str, ...] = ()
    received: bytes | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def sha256(self) -> str:
        """The digest (hex) that names it: that of the bytes it was read from, or of its canonical bytes."""
        return hashlib.sha256(self.pack()).hexdigest()

    @property
    def content(self) -> str:
        """Identity (hex) of tensors and assets: sha256(weights + canonical JSON of the assets)."""
        listing = canonical.dumps([asset.document() for asset in self.assets])
        return hashlib.sha256(bytes.fromhex(self.weights) + listing).hexdigest()

    @property
    def blobs(self) -> list[str]:
        """The sha256 (hex) of every blob it names, without repeats."""
        return list(dict.fromkeys([self.schema, self.digests, self.layout, *(asset.sha256 for asset in self.assets)]))

    def pack(self) -> bytes:
        """The bytes it was read from, which may hold more than is understood here, or else its canonical bytes."""
        return self.received or canonical.dumps(
            {
                "assets": [asset.document() for asset in self.assets],
                "content": self.content,
                "digests": self.digests,
                "format": MANIFEST_FORMAT,
                "layout": self.layout,
                "model": self.model,
                "requires": list(self.requires),
                "schema": self.schema,
                "weights": self.weights,
            }
        )

    @classmethod
    def unpack(cls, data: bytes, what: str = "manifest") -> Manifest:
        """From untrusted bytes. Raises `FormatError`, or `Unsupported` for a feature that is not known here."""
        document = canonical.loads(data, what)
        _check_format(document, MANIFEST_FORMAT, what)
        manifest = cls(
            model=_text(document, "model", what),
            schema=_digest(document, "schema", what),
            digests=_digest(document, "digests", what),
            layout=_digest(document, "layout", what),
            assets=tuple(assets.parse(entry) for entry in _list(document, "assets", what)),
            weights=_digest(document, "weights", what),
            requires=_words(document, what),
        )
        names = [asset.path for asset in manifest.assets]
        if names != sorted(set(names)):
            raise FormatError(f"{what}: assets are not in order, or one occurs twice")
        if manifest.content != _digest(document, "content", what):
            raise FormatError(f"{what}: content digest does not match weights and assets")
        unknown = set(manifest.requires) - FEATURES
        if unknown:
            raise Unsupported(f"{what}: requires {', '.join(sorted(unknown))}; use a newer version of weightsync")
        object.__setattr__(manifest, "received", data)  # readers never re-encode
        return manifest


@dataclass(frozen=True, slots=True)
class End:
    """One end of an edge: the weights digest (hex) and the sha256 (hex) of the manifest that describes them."""

    weights: str
    manifest: str


@dataclass(frozen=True, slots=True)
class Data:
    """A data file of an edge: sha256 (hex) and length in bytes."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Edge:
    """What leads from `base` (None: from nothing) to `target`; `changed` counts words that differ."""

    kind: Kind
    base: End | None
    target: End
    data: tuple[Data, ...]
    changed: int
    reversible: bool
    profile: Profile = "LAN"
    requires: tuple[str, ...] = ()
    received: bytes | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Length of all data files in bytes."""
        return sum(data.bytes for data in self.data)

    def pack(self) -> bytes:
        """The bytes it was read from, or else its canonical bytes."""
        return self.received or canonical.dumps(
            {
                "base": _end(self.base) if self.base else None,
                "changed": self.changed,
                "data": [{"bytes": data.bytes, "sha256": data.sha256} for data in self.data],
                "format": EDGE_FORMAT,
                "kind": self.kind,
                "profile": self.profile,
                "requires": list(self.requires),
                "reversible": self.reversible,
                "target": _end(self.target),
            }
        )

    @property
    def sha256(self) -> str:
        """The digest (hex) that names it: that of the bytes it was read from, or of its canonical bytes."""
        return hashlib.sha256(self.pack()).hexdigest()

    @classmethod
    def unpack(cls, data: bytes, what: str = "edge") -> Edge:
        """From untrusted bytes. Raises `FormatError`. Unknown words in `requires` are kept: whoever picks a path asks."""
        document = canonical.loads(data, what)
        _check_format(document, EDGE_FORMAT, what)
        kind, profile = _text(document, "kind", what), _text(document, "profile", what)
        if kind not in get_args(Kind) or profile not in get_args(Profile):
            raise FormatError(f"{what}: kind {kind!r} or profile {profile!r} is not known")
        files = tuple(
            Data(_digest(entry, "sha256", what), _count(entry, "bytes", what))
            for entry in (_object(item, what) for item in _list(document, "data", what))
        )
        base, reversible = document.get("base"), document.get("reversible")
        if (base is None) != (kind == "Full") or not isinstance(reversible, bool) or (reversible and base is None):
            raise FormatError(f"{what}: base, kind and reversible do not go together")
        edge = cls(
            kind=kind,  # type: ignore[arg-type]  # checked above; mypy does not narrow str by get_args
            base=_parse_end(base, what) if base is not None else None,
            target=_parse_end(document.get("target"), what),
            data=files,
            changed=_count(document, "changed", what),
            reversible=reversible,
            profile=profile,  # type: ignore[arg-type]  # likewise
            requires=_words(document, what),
        )
        object.__setattr__(edge, "received", data)
        return edge

    def check_features(self, what: str) -> None:
        """Raise `Unsupported` when it requires something that this version does not understand."""
        unknown = sorted(set(self.requires) - FEATURES)
        if unknown:
            raise Unsupported(f"{what}: requires {', '.join(unknown)}; use a newer version of weightsync")


def _end(end: End) -> dict[str, str]:
    return {"manifest": end.manifest, "weights": end.weights}


def _parse_end(value: Any, what: str) -> End:
    document = _object(value, what)
    return End(_digest(document, "weights", what), _digest(document, "manifest", what))


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{what}: an object is missing where one must be")
    return value


def _check_format(document: dict[str, Any], expected: str, what: str) -> None:
    found = document.get("format")
    if found == expected:
        return
    if isinstance(found, str) and found.partition("/")[0] == expected.partition("/")[0]:
        raise Unsupported(f"{what}: has format {found!r}, this version reads {expected!r}")
    raise FormatError(f"{what}: has format {found!r}, expected {expected!r}")


def _text(document: dict[str, Any], key: str, what: str) -> str:
    value = document.get(key)
    if not isinstance(value, str):
        raise FormatError(f"{what}: `{key}` must be text")
    return value


def _digest(document: dict[str, Any], key: str, what: str) -> str:
    value = document.get(key)
    if not isinstance(value, str) or not canonical.is_sha256(value):
        raise FormatError(f"{what}: `{key}` must be a sha256 in lower-case hex")
    return value


def _count(document: dict[str, Any], key: str, what: str) -> int:
    value = document.get(key)
    if type(value) is not int or value < 0:
        raise FormatError(f"{what}: `{key}` must be a count")
    return value


def _list(document: dict[str, Any], key: str, what: str) -> list[Any]:
    value = document.get(key)
    if not isinstance(value, list):
        raise FormatError(f"{what}: `{key}` must be a list")
    return value


def _words(document: dict[str, Any], what: str) -> tuple[str, ...]:
    value = _list(document, "requires", what)
    if not all(isinstance(word, str) for word in value):
        raise FormatError(f"{what}: `requires` must be a list of words")
    return tuple(value)
