"""The small files of a checkpoint that are not weights: configuration, tokenizer, chat template.

They travel with manifests. An allow-list says which; everything else in the directory is left alone and listed.
"""

from __future__ import annotations

import fnmatch
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsync import canonical
from weightsync.errors import CheckpointError, FormatError
from weightsync.files import FOLDER
from weightsync.layout import is_plain_name, is_weight_file

PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
SIZE_LIMIT = 64 << 20
"""Largest asset in bytes; a larger file is ignored and listed."""


@dataclass(frozen=True, slots=True, order=True)
class Asset:
    """One small file: plain name, length in bytes, sha256 (hex)."""

    path: str
    bytes: int
    sha256: str

    def document(self) -> dict[str, Any]:
        """Its entry in a manifest."""
        return {"bytes": self.bytes, "path": self.path, "sha256": self.sha256}


def is_asset_name(name: str) -> bool:
    """Whether a file of this name travels with the weights."""
    if not is_plain_name(name) or name.endswith(".safetensors.index.json"):
        return False
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in PATTERNS)


def scan(folder: Path) -> tuple[dict[str, bytes], list[str]]:
    """The assets of a directory with their contents, and the names of what is ignored (weights and index aside)."""
    found: dict[str, bytes] = {}
    ignored: list[str] = []
    try:
        for path in sorted(folder.iterdir()):
            name = path.name
            if is_weight_file(name) or name.endswith(".safetensors.index.json") or name == FOLDER:
                continue
            if not is_asset_name(name) or not path.is_file():
                ignored.append(name + ("/" if path.is_dir() else ""))
            elif path.stat().st_size > SIZE_LIMIT:
                ignored.append(f"{name} (larger than {SIZE_LIMIT >> 20} MiB)")
            else:
                found[name] = path.read_bytes()
    except OSError as e:
        raise CheckpointError(f"{folder}: cannot be read: {e}") from e
    return found, ignored


def describe(contents: dict[str, bytes]) -> tuple[Asset, ...]:
    """Names, lengths and digests, in order of their names."""
    assets = (Asset(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items())
    return tuple(sorted(assets))


def parse(entry: Any) -> Asset:
    """One untrusted manifest entry. Raises `FormatError`."""
    try:
        asset = Asset(entry["path"], entry["bytes"], entry["sha256"])
        ok = is_asset_name(asset.path) and type(asset.bytes) is int and 0 <= asset.bytes <= SIZE_LIMIT
        ok = ok and canonical.is_sha256(asset.sha256)
    except (KeyError, TypeError, AttributeError) as e:
        raise FormatError(f"an asset entry lacks a field or has a wrong one: {e!r}") from e
    if not ok:
        raise FormatError(f"an asset entry is refused: {asset.path!r}, {asset.bytes!r} bytes, sha256 {asset.sha256!r}")
    return asset
