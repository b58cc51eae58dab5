"""A Hugging Face Hub bucket as a store, through the unmodified `huggingface_hub` client.

The only file that knows that client, and it is imported on first use because that takes about a second. What the
client leaves open is closed here: its downloads are neither checked nor atomic, a batch may do half of what was
asked, its buffers grow with the machine's memory, and its faults arrive as unrelated exception classes.

A bucket has no conditional write. Between the look at what exists and the upload another writer may store the
same name; since names are made of what they hold, both then store the same bytes. The client repeats requests
itself (5 times within 23 s, and longer in its storage layer), so nothing is repeated here but a download with
wrong bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.errors import InputError, StoreConflict, StoreCorrupt, StoreError, StoreNotFound
from weightsync.store import files, names
from weightsync.store.base import READ_LIMIT, Download, Entry
from weightsync.store.hub_errors import Asked, translate

if TYPE_CHECKING:
    from huggingface_hub import BucketFile, HfApi

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")

_ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # Without these the transfer layer sizes its buffers by the machine's memory, not the container's, and holds
    # nearly 1 GB. Measured with them: 220 MB at most while fetching, 540 MB while storing several large files.
    "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_SIZE": "128mb",
    "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_PERFILE_SIZE": "32mb",
    "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_LIMIT": "192mb",
    "HF_XET_RECONSTRUCTION_MIN_RECONSTRUCTION_FETCH_SIZE": "64mb",
    "HF_XET_RECONSTRUCTION_MIN_PREFETCH_BUFFER": "128mb",
    "HF_XET_DATA_MAX_CONCURRENT_FILE_INGESTION": "2",
    "HF_XET_CLIENT_AC_MAX_UPLOAD_CONCURRENCY": "4",
}
_ALIASES = {
    "HF_XET_DATA_MAX_CONCURRENT_FILE_INGESTION": "HF_XET_MAX_CONCURRENT_FILE_INGESTION",
    "HF_XET_CLIENT_AC_MAX_UPLOAD_CONCURRENCY": "HF_XET_FIXED_UPLOAD_CONCURRENCY",
}
_USE_ALL_MEMORY = ("HF_XET_HIGH_PERFORMANCE", "HF_XET_HP")


SILENCE = 60.0
"""Seconds that the Hub may be silent within a request before it counts as unreachable; the client waits for ever."""


def _limit_silence() -> None:
    """Give every request of the client's shared session a timeout where it has none.

    The client asks for no timeout in so many words, so the session's own does not count: a hook fills it in. Looked at
    before every call, since the client makes a new session after a connection error and after a fork.
    """
    from huggingface_hub import get_session

    session = get_session()
    hooks = session.event_hooks
    if _fill_timeout not in hooks["request"]:
        hooks["request"].append(_fill_timeout)
        session.event_hooks = hooks


def _fill_timeout(request: Any) -> None:
    timeouts = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        part: SILENCE if timeouts.get(part) is None else timeouts[part] for part in ("connect", "read", "write", "pool")
    }


class HubStore:
    """The store in bucket `bucket` ("owner/name"), in its folder `prefix`. See `Store` for what the methods promise.

    Without `token` the client's own sources count (HF_TOKEN, then its token file), without `endpoint` HF_ENDPOINT
    and then the public Hub.
    """

    def __init__(self, bucket: str, prefix: str = "", *, token: str | None = None, endpoint: str | None = None) -> None:
        """Check the names; nothing is imported or asked yet."""
        if not _BUCKET.fullmatch(bucket):
            raise InputError(
                f"{bucket[:200]!r} cannot be a bucket: it is written owner/name, as in its address on the Hub"
            )
        self._bucket, self._prefix = bucket, names.check_path(prefix.rstrip("/")) + "/" if prefix else ""
        self._token, self._endpoint = (token or "").strip() or None, endpoint
        self._api: HfApi | None = None

    @property
    def url(self) -> str:
        """The address in the form `hf://buckets/owner/name/prefix`."""
        return f"hf://buckets/{self._bucket}/{self._prefix}".rstrip("/")

    def put(self, items: Mapping[str, Path | bytes], *, refresh_after: float = 12 * 3600) -> int:
        """Store objects with one look at what exists and one batch; see `Store.put`."""
        sources = [files.Source(names.check_path(path), content) for path, content in items.items()]
        present = self._present([source.path for source in sources])
        new, old = [], []
        for source in sources:
            found = present.get(source.path)
            if found is None:
                new.append(source)
            elif found.size != source.bytes:
                raise StoreConflict(
                    f"{source.path} exists in {self.url} with {found.size} bytes where {source.bytes} were to be stored; "
                    "nothing was stored. Objects never change: use another name, or find out who wrote that one"
                )
            elif time.time() - (_modified(found) or 0) >= refresh_after:
                old.append(source)
        again = self._send(new, [(source, present[source.path].xet_hash) for source in old])
        return sum(source.bytes for source in [*new, *again])

    def get(self, items: Sequence[Download]) -> None:
        """Fetch objects with one download call, and a second one for those with wrong bytes; see `Store.get`."""
        wrong = self._fetch(items)
        wrong = self._fetch(wrong) if wrong else wrong
        if wrong:
            item = wrong[0]
            raise StoreCorrupt(
                f"{item.path} in {self.url} is not the {item.bytes} bytes with sha256 {item.sha256}, also on a second try "
                f"({len(wrong)} of {len(items)} objects); {item.dest} was not touched. If trying again later does not "
                "help, publish the version again after deleting that object"
            )

    def read(self, path: str, *, sha256: str | None = None, limit: int = READ_LIMIT) -> bytes:
        """A small object's bytes; see `Store.read`. Passes through a file in the system's temporary folder.

        Without `sha256` only the size is checked, and the client does not notice wrong bytes: pass it where known.
        """
        for _ in range(2):
            found = self._present([path]).get(path)
            if found is None:
                raise StoreNotFound(f"{path} is not in {self.url}")
            if found.size > limit:
                raise StoreCorrupt(f"{path} in {self.url} has {found.size} bytes, more than the {limit} allowed here")
            data = self._read(found)
            if len(data) == found.size and sha256 in (None, hashlib.sha256(data).hexdigest()):
                return data
        raise StoreCorrupt(f"{path} in {self.url} does not have sha256 {sha256} or its size, also on a second try")

    def list(self, prefix: str) -> list[Entry]:
        """Objects below a folder; see `Store.list`. `modified` is the time of upload, not that of the file sent."""
        folder = self._prefix + names.check_prefix(prefix)
        found = []
        with self._guard(Asked(f"listing {folder or 'everything'}", write=False)):
            for item in self._client().list_bucket_tree(self._bucket, folder or None, recursive=True):
                # The server matches the prefix letter by letter; the trailing "/" must hold here too.
                if item.type == "file" and item.path.startswith(folder):
                    path, modified = item.path.removeprefix(self._prefix), _modified(item)
                    # Without a time it counts as new, so that no clean-up takes it for old.
                    found.append(Entry(path, item.size, time.time() if modified is None else modified))
        return sorted((entry for entry in found if names.is_path(entry.path)), key=lambda entry: entry.path)

    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects in one batch; see `Store.delete`."""
        present = self._present(list(paths))
        if not present:
            return
        asked = Asked(f"deleting {len(present)} objects", write=True)
        try:
            with self._guard(asked):
                self._client().batch_bucket_files(self._bucket, delete=[found.path for found in present.values()])
        except StoreError as error:
            # Refused by name: perhaps because somebody else deleted them at the same time.
            if type(error) is not StoreError or self._present(list(present)):
                raise

    # ---- what the client does

    def _client(self) -> HfApi:
        if self._api is None:
            _set_defaults()
            from huggingface_hub import HfApi

            self._api = HfApi(endpoint=self._endpoint, token=self._token)
        _limit_silence()
        return self._api

    def _present(self, paths: Sequence[str]) -> dict[str, BucketFile]:
        """The Hub's description of those of the objects that exist, by path; the client asks for 1000 at a time."""
        full = [self._prefix + names.check_path(path) for path in dict.fromkeys(paths)]
        with self._guard(Asked(f"looking up {len(full)} objects", write=False)):
            found = list(self._client().get_bucket_paths_info(self._bucket, full)) if full else []
        return {info.path.removeprefix(self._prefix): info for info in found}

    def _send(self, new: Sequence[files.Source], old: Sequence[tuple[files.Source, str]]) -> Sequence[files.Source]:
        """Upload new objects and write old ones again as what is stored; returns old ones that had to be uploaded.

        Old ones are copied onto themselves by the Hub, by their content's hash: nothing is sent, and the content
        cannot change. What the Hub does not want to copy is uploaded like new.
        """
        if not new and not old:
            return []
        total = sum(source.bytes for source in new)
        asked = Asked(f"storing {len(new) + len(old)} objects", write=True, folder=_cache(), needed=total)
        with self._guard(asked):
            from huggingface_hub.errors import BucketBatchError

            client = self._client()
            copy = [("bucket", self._bucket, content, self._prefix + source.path) for source, content in old]
            try:
                client.batch_bucket_files(self._bucket, add=_uploads(new, self._prefix), copy=copy)
            except BucketBatchError as error:
                failed = {failure.get("path", "") for failure in error.failures}
                again = [source for source, _ in old if self._prefix + source.path in failed]
                if len(again) < len(failed):
                    raise
                client.batch_bucket_files(self._bucket, add=_uploads(again, self._prefix))
                return again
        return []

    def _fetch(self, items: Sequence[Download]) -> Sequence[Download]:
        """Download and check objects; returns those that are wrong."""
        present = self._present([item.path for item in items])
        missing = [item.path for item in items if item.path not in present]
        if missing:
            raise StoreNotFound(
                f"{missing[0]} is not in {self.url} ({len(missing)} of {len(items)} objects are missing)"
            )
        right = [item for item in items if present[item.path].size == item.bytes]
        wrong = [item for item in items if present[item.path].size != item.bytes]
        with ExitStack() as stack:
            arrivals = [stack.enter_context(files.Arrival(item)) for item in right]
            self._download([(present[arrival.item.path], arrival.path) for arrival in arrivals])
            return wrong + [arrival.item for arrival in arrivals if not arrival.check()]

    def _read(self, found: BucketFile) -> bytes:
        with files.local_side(Path(tempfile.gettempdir()), found.path, found.size), _scratch() as scratch:
            self._download([(found, scratch)])
            return scratch.read_bytes()

    def _download(self, wanted: Sequence[tuple[BucketFile, Path]]) -> None:
        if not wanted:
            return
        needed = sum(found.size for found, _ in wanted)
        asked = Asked(f"fetching {len(wanted)} objects", write=False, folder=wanted[0][1].parent, needed=needed)
        with self._guard(asked):
            client = self._client()
            client.download_bucket_files(self._bucket, [*wanted], raise_on_missing_files=True)

    @contextmanager
    def _guard(self, asked: Asked) -> Iterator[None]:
        """Turn whatever the client raises into our errors. Only around the client's calls."""
        self._client()
        try:
            yield
        except _client_errors() as error:
            raise translate(error, asked, self.url, self._bucket) from error


@contextmanager
def _scratch() -> Iterator[Path]:
    """A name for a file in a temporary folder of its own."""
    with tempfile.TemporaryDirectory(prefix="weightsync-") as folder:
        yield Path(folder, "object")


def _uploads(sources: Iterable[files.Source], prefix: str) -> list[tuple[str | Path | bytes, str]]:
    """Sources as the client takes them."""
    return [(source.content, prefix + source.path) for source in sources]


def _modified(info: BucketFile) -> float | None:
    """When the Hub got the object, in Unix seconds; its `mtime` is that of the file that was sent."""
    moment = info.uploaded_at or info.mtime
    return None if moment is None else moment.timestamp()


def _client_errors() -> tuple[type[Exception], ...]:
    """The classes to catch around the client's calls; what is not among them is a bug, here or there."""
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    # Its HTTP library has had two names; the base class of all its errors is found through the client's own.
    libraries = [base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)]
    return (EntryNotFoundError, OSError, RuntimeError, ValueError, KeyError, *libraries)


def _cache() -> Path:
    """Where the client keeps its own files."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME)


def _set_defaults() -> None:
    """Settings that the client reads once, when it is imported or first transfers; what the user has set stays."""
    unlimited = any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in _USE_ALL_MEMORY)
    for name, value in _ENVIRONMENT.items():
        if name.startswith("HF_XET_") and (unlimited or _ALIASES.get(name, name) in os.environ):
            continue
        os.environ.setdefault(name, value)
