"""Where published weights are kept: the seam that the library uses, and how an address becomes a store.

Must stay cheap to import: the Hub client is loaded by the Hub store's first request.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from weightsync.errors import InputError
from weightsync.store.base import READ_LIMIT, Download, Entry, Store
from weightsync.store.hub import HubStore
from weightsync.store.volume import VolumeStore

__all__ = ["READ_LIMIT", "Download", "Entry", "HubStore", "Store", "VolumeStore", "open_store"]

_FORMS = "a store's address is hf://buckets/owner/name[/prefix], file:///directory, or a directory's path"


def open_store(url: str, *, token: str | None = None, endpoint: str | None = None) -> Store:
    """The store at `url`: hf://buckets/owner/name[/prefix], file:///directory, or a directory's path.

    `token` and `endpoint` are for the Hub, see `HubStore`. Nothing is read or made yet, so a store that does not
    exist is noticed by its first use. Raises `InputError` for other forms.
    """
    if url.startswith("hf://"):
        parts = url.removeprefix("hf://").strip("/").split("/")
        if parts[0] != "buckets" or len(parts) < 3:
            raise InputError(f"{url!r} is not a bucket: {_FORMS}")
        return HubStore("/".join(parts[1:3]), "/".join(parts[3:]), token=token, endpoint=endpoint)
    if url.startswith("file:"):
        try:
            address = urlsplit(url)
        except ValueError as error:
            raise InputError(f"{url!r} is not a local directory: {_FORMS}") from error
        if (
            address.netloc not in ("", "localhost")
            or not address.path.startswith("/")
            or address.query
            or address.fragment
        ):
            raise InputError(f"{url!r} is not a local directory: {_FORMS}")
        return _directory(unquote(address.path), url)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", url):
        raise InputError(f"{url!r} is not a store: {_FORMS}")
    return _directory(url, url)


def _directory(path: str, url: str) -> Store:
    if not path.strip() or "\0" in path:
        raise InputError(f"{url!r} is not a store: {_FORMS}")
    return VolumeStore(Path(path))
