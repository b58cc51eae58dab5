"""What the server holds: accounts, buckets and stored chunks, and the rules of the Hub that govern them.

No HTTP here: every method either answers plain data or raises `HubError` with the status that the Hub
would give. One lock guards everything; data volumes of tests do not need more.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from .xet import EMPTY, Chunk, Term, parse_shard, parse_xorb

TOKEN_SECONDS = 3600
Json = dict[str, Any]


class HubError(Exception):
    """A refusal: HTTP status, message, and the code by which the client tells some refusals apart."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass
class Bucket:
    """A bucket: who may see it, and its objects as the Hub describes them."""

    private: bool
    created: str
    updated: str
    files: dict[str, Json] = field(default_factory=dict)


@dataclass
class Grant:
    """Leave to upload one xorb of `length` bytes; `data` is what arrived."""

    xorb: str
    length: int
    data: bytes | None = None


def iso(seconds: float | None = None) -> str:
    """Unix seconds (default: now) as the Hub writes times: UTC, milliseconds."""
    moment = datetime.fromtimestamp(time.time() if seconds is None else seconds, tz=UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


class State:
    """Everything the server knows. `tokens` maps an access token to its user; None: everybody is `user`."""

    def __init__(self, tokens: dict[str, str] | None, user: str = "tester", grants: bool = True) -> None:
        self.lock = threading.RLock()
        self.tokens, self.user = tokens, user
        self.buckets: dict[str, Bucket] = {}
        self.xorbs: dict[str, bytes] = {}
        self.chunks: dict[str, list[Chunk]] = {}
        self.files: dict[str, list[Term]] = {}
        self._grants: dict[str, Grant] | None = {} if grants else None
        self._xet_tokens: dict[str, tuple[str, float]] = {}
        self._serial = itertools.count()

    # ---- accounts

    def who(self, authorization: str) -> str | None:
        """The user behind an Authorization header; None for nobody. Raises 401 for a wrong token."""
        if self.tokens is None:
            return self.user
        token = authorization.removeprefix("Bearer ")
        with self.lock:
            user = self.tokens.get(token)
        if token and user is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        return user

    def revoke(self, token: str) -> None:
        """Make an access token invalid from now on."""
        with self.lock:
            if self.tokens is not None:
                self.tokens.pop(token, None)

    def expire_storage_tokens(self) -> None:
        """Let every storage token that was handed out expire now."""
        with self.lock:
            self._xet_tokens = {token: (kind, 0.0) for token, (kind, _) in self._xet_tokens.items()}

    def storage_token(self, bucket_id: str, who: str | None, kind: str) -> tuple[str, int]:
        """A new token to read or write chunks, and when it expires in Unix seconds."""
        with self.lock:
            self.bucket(bucket_id, who, write=kind == "write")
            token, expires = f"xet_{kind}_{next(self._serial)}", int(time.time()) + TOKEN_SECONDS
            self._xet_tokens[token] = (kind, expires)
        return token, expires

    def check_storage_token(self, authorization: str, write: bool) -> None:
        """Raise 401 or 403 unless the header carries a storage token that is valid for this."""
        with self.lock:
            kind, expires = self._xet_tokens.get(authorization.removeprefix("Bearer "), ("", 0.0))
        if expires <= time.time():
            raise HubError(401, "storage token missing, unknown or expired")
        if write and kind != "write":
            raise HubError(403, "storage token allows reading only")

    # ---- buckets

    def bucket(self, bucket_id: str, who: str | None, write: bool = False) -> Bucket:
        """The bucket, or the Hub's own answer when it is absent or not for this user."""
        bucket = self.buckets.get(bucket_id)
        mine = self.tokens is None or who == bucket_id.split("/")[0]
        if bucket is not None and (mine or not (bucket.private or write)):
            return bucket
        if self.tokens is not None and who is None:
            raise HubError(401, "Invalid username or password.")
        if bucket is not None and not bucket.private:
            raise HubError(403, "You don't have the required permissions")
        raise HubError(404, "Repository not found", "RepoNotFound")

    def create(self, bucket_id: str, who: str | None, private: bool) -> bool:
        """Make a bucket; False when it is there already."""
        if who is None:
            raise HubError(401, "Invalid username or password.")
        if self.tokens is not None and bucket_id.split("/")[0] != who:
            raise HubError(403, "You don't have the rights to create a bucket under this namespace")
        with self.lock:
            if bucket_id in self.buckets:
                return False
            self.buckets[bucket_id] = Bucket(private, iso(), iso())
        return True

    def drop(self, bucket_id: str, who: str | None) -> None:
        """Remove a bucket with all it holds."""
        with self.lock:
            self.bucket(bucket_id, who, write=True)
            del self.buckets[bucket_id]

    def info(self, bucket_id: str, who: str | None) -> Json:
        """A bucket's description."""
        with self.lock:
            bucket = self.bucket(bucket_id, who)
            sizes = [entry["size"] for entry in bucket.files.values()]
        return {
            "id": bucket_id,
            "private": bucket.private,
            "createdAt": bucket.created,
            "updatedAt": bucket.updated,
            "size": sum(sizes),
            "totalFiles": len(sizes),
        }

    def tree(self, bucket_id: str, who: str | None, prefix: str, recursive: bool) -> list[Json]:
        """Objects whose path begins with `prefix`, and folders in place of their content unless `recursive`."""
        with self.lock:
            files = dict(self.bucket(bucket_id, who).files)
        folder = prefix.rpartition("/")[0] + "/" if "/" in prefix else ""
        rows: dict[str, Json] = {}
        for path in sorted(files):
            if not path.startswith(prefix):
                continue
            head, slash, _ = path[len(folder) :].partition("/")
            if recursive or not slash:
                rows[path] = files[path]
            else:
                row = {"type": "directory", "path": folder + head, "uploadedAt": files[path]["uploadedAt"]}
                rows.setdefault(folder + head + "/", row)
        return list(rows.values())

    def paths_info(self, bucket_id: str, who: str | None, paths: list[str]) -> list[Json]:
        """Descriptions of those of the paths that exist."""
        with self.lock:
            files = self.bucket(bucket_id, who).files
            return [files[path] for path in paths if path in files]

    def batch(self, bucket_id: str, who: str | None, operations: list[Json], refuse: re.Pattern[str] | None) -> Json:
        """Do each operation by itself, without a transaction, and report; `refuse` matches "type path"."""
        failed = []
        with self.lock:
            bucket = self.bucket(bucket_id, who, write=True)
            for operation in operations:
                path = operation.get("path", "")
                struck = refuse is not None and refuse.search(f"{operation.get('type')} {path}")
                why = "Internal error" if struck else self._operate(bucket, operation)
                if why is not None:
                    failed.append({"path": path, "error": why})
            bucket.updated = iso()
        count = len(operations)
        return {"success": not failed, "processed": count, "succeeded": count - len(failed), "failed": failed}

    def _operate(self, bucket: Bucket, operation: Json) -> str | None:
        path, kind, content = operation.get("path", ""), operation.get("type"), operation.get("xetHash", "")
        if not path or path.strip("/") != path or "//" in path or "../" in path or "\\" in path:
            return "Invalid path"
        if kind == "deleteFile":
            return None if bucket.files.pop(path, None) else "File not found"
        if kind not in ("addFile", "copyFile"):
            return f"Unknown operation {kind}"
        terms = [] if content == EMPTY else self.files.get(content)
        if terms is None:
            return "Xet hash not found"
        bucket.files[path] = {
            "type": "file",
            "path": path,
            "size": sum(term.length for term in terms),
            "xetHash": content,
            "mtime": iso(operation["mtime"] / 1000) if operation.get("mtime") else iso(),
            "uploadedAt": iso(),
        }
        return None

    # ---- storage of chunks

    def grant(self, xorb: str, length: int) -> str | None:
        """The id of a leave to upload this xorb, None when it is stored already."""
        with self.lock:
            if self._grants is None:
                raise HubError(404, "this server gives no grants")
            if xorb in self.xorbs:
                return None
            name = f"g{next(self._serial)}"
            self._grants[name] = Grant(xorb, length)
        return name

    def receive(self, grant: str, data: bytes) -> None:
        """Keep what was uploaded on a grant until it is committed."""
        with self.lock:
            found = (self._grants or {}).get(grant)
            if found is None:
                raise HubError(404, "no such grant")
            found.data = data

    def commit(self, xorb: str, grant: str) -> bool:
        """Store a granted xorb; whether it is new."""
        with self.lock:
            found = (self._grants or {}).pop(grant, None)
        if found is None or found.xorb != xorb or found.data is None:
            raise HubError(404, "no uploaded data for this grant")
        if len(found.data) != found.length:
            raise HubError(400, "length mismatch")
        return self.store_xorb(xorb, found.data)

    def store_xorb(self, xorb: str, data: bytes) -> bool:
        """Store a xorb; whether it is new."""
        try:
            chunks = parse_xorb(data)
        except ValueError as error:
            raise HubError(400, str(error)) from error
        with self.lock:
            new = xorb not in self.xorbs
            self.xorbs[xorb], self.chunks[xorb] = data, chunks
        return new

    def store_shard(self, data: bytes) -> None:
        """Register the files of a shard; every chunk they name must be stored."""
        try:
            files = parse_shard(data)
        except ValueError as error:
            raise HubError(400, str(error)) from error
        with self.lock:
            for term in itertools.chain.from_iterable(files.values()):
                chunks = self.chunks.get(term.xorb, [])[term.first : term.last]
                if sum(chunk.length for chunk in chunks) != term.length:
                    raise HubError(400, f"the shard names unknown or mismatched chunks of {term.xorb}")
            self.files.update(files)
