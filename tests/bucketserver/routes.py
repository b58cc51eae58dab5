"""HTTP in front of the state: which request means what, and how a fault bends the answer.

Paths and bodies are those the client sends; what they mean is decided in `state`. Requests whose path
begins with "/_" steer the server itself and are neither struck by faults nor logged.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from .faults import Fault, Faults
from .reconstruct import reconstruction
from .state import HubError, State

PAGE = 1000
BINARY = "application/octet-stream"


class BucketHTTPServer(ThreadingHTTPServer):
    """The listening server with what its request threads share; port 0 picks a free one."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, state: State, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.state = state
        self.faults = Faults()
        self.log: list[tuple[str, str, int, int, int]] = []
        """(method, path with query, status, bytes received, bytes sent); status 0: no answer was given."""
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.log_lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: BucketHTTPServer

    routes: ClassVar[list[tuple[str, re.Pattern[str], Callable[..., None]]]] = []

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr; the log is kept for the test."""

    # ---- one request

    def _go(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.fault: Fault | None = None
        self.received = 0
        try:
            self.data = self._body()
            self.received = len(self.data)
            if not url.path.startswith("/_"):
                self.fault = self.server.faults.take(self.command, url.path)
            if self.fault is not None and self.fault.action == "status":
                self.answer(self.fault.status, {"error": "injected fault"}, **self.fault.headers)
                return
            if self.fault is not None and self.fault.action == "cut" and self.fault.after < 0:
                self._log(0, 0)
                self.close_connection = True
                return
            self._dispatch(url.path)
        except HubError as error:
            code = {"X-Error-Code": error.code} if error.code else {}
            self.answer(error.status, {"error": error.message}, **{"X-Error-Message": error.message}, **code)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _dispatch(self, path: str) -> None:
        for method, pattern, act in self.routes:
            if method == self.command and (found := pattern.fullmatch(path)):
                act(self, *[unquote(group or "") for group in found.groups()])
                return
        raise HubError(404, f"no route {self.command} {path}")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, status: int, body: bytes | dict[str, Any] | list[Any] = b"", /, **headers: str) -> None:
        """Send an answer, bent by the fault that struck this request; headers win over the usual ones."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        fault = self.fault
        if fault is not None and fault.action == "flip" and fault.at < len(data):
            data = data[: fault.at] + bytes([data[fault.at] ^ 0xFF]) + data[fault.at + 1 :]
        cut = fault is not None and fault.action == "cut"
        kind = BINARY if isinstance(body, bytes) else "application/json"
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "Content-Type": kind, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if cut and fault is not None:
            data = data[: fault.after]
            self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(data)
        self._log(status, len(data))

    def _log(self, status: int, sent: int) -> None:
        if not self.path.startswith("/_"):
            with self.server.log_lock:
                self.server.log.append((self.command, self.path, status, self.received, sent))

    # ---- helpers of the routes

    @property
    def state(self) -> State:
        """What the server holds."""
        return self.server.state

    def who(self) -> str | None:
        """The user who asks."""
        return self.state.who(self.headers.get("Authorization") or "")

    def span(self) -> tuple[int, int] | None:
        """The asked byte range as [start, end), None without one."""
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        return (int(found[1]), int(found[2]) + 1 if found[2] else 1 << 62) if found else None

    def described(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows of a listing, with sizes bent when that is the fault."""
        if self.fault is None or self.fault.action != "understate":
            return rows
        by = self.fault.by
        return [{**row, "size": row["size"] - by} if "size" in row else row for row in rows]

    # ---- buckets

    def whoami(self) -> None:
        """Who the token belongs to."""
        who = self.who()
        if who is None:
            raise HubError(401, "Invalid username or password.")
        access = {"accessToken": {"role": "write", "displayName": "token"}}
        self.answer(200, {"type": "user", "name": who, "fullname": who, "orgs": [], "auth": access})

    def create(self, namespace: str, name: str) -> None:
        """Make a bucket; 409 with its address when it is there."""
        who = self.who()
        bucket_id = f"{who if namespace == 'me' else namespace}/{name}"
        private = json.loads(self.data or b"{}").get("visibility") == "private"
        new = self.state.create(bucket_id, who, private)
        document = {"url": f"{self.server.endpoint}/buckets/{bucket_id}", "name": bucket_id, "id": bucket_id}
        self.answer(200 if new else 409, document if new else {"error": "You already created this bucket", **document})

    def info(self, namespace: str, name: str) -> None:
        """Describe a bucket."""
        self.answer(200, self.state.info(f"{namespace}/{name}", self.who()))

    def drop(self, namespace: str, name: str) -> None:
        """Remove a bucket."""
        self.state.drop(f"{namespace}/{name}", self.who())
        self.answer(200, {})

    def tree(self, namespace: str, name: str, prefix: str = "") -> None:
        """List a bucket, in pages."""
        recursive = self.query.get("recursive", ["true"])[0].lower() == "true"  # absent means recursive
        rows = self.state.tree(f"{namespace}/{name}", self.who(), prefix, recursive)
        at = int(self.query.get("cursor", ["0"])[0])
        more: dict[str, str] = {}
        if at + PAGE < len(rows):
            query = f"recursive={str(recursive).lower()}&cursor={at + PAGE}"
            more["Link"] = f'<{self.server.endpoint}{urlsplit(self.path).path}?{query}>; rel="next"'
        self.answer(200, self.described(rows[at : at + PAGE]), **more)

    def paths_info(self, namespace: str, name: str) -> None:
        """Describe some objects."""
        paths = json.loads(self.data)["paths"]
        self.answer(200, self.described(self.state.paths_info(f"{namespace}/{name}", self.who(), paths)))

    def batch(self, namespace: str, name: str) -> None:
        """Add, copy and delete objects; 422 when everything failed."""
        operations = [json.loads(line) for line in self.data.splitlines() if line.strip()]
        refuse = None
        if self.fault is not None and self.fault.action == "refuse":
            refuse = re.compile(f"^{self.fault.kind or r'[a-zA-Z]+'} .*(?:{self.fault.paths})")
        report = self.state.batch(f"{namespace}/{name}", self.who(), operations, refuse)
        self.answer(422 if operations and report["succeeded"] == 0 else 200, report)

    def resolve(self, namespace: str, name: str, path: str) -> None:
        """Where an object's content is stored."""
        bucket_id = f"{namespace}/{name}"
        found = self.described(self.state.paths_info(bucket_id, self.who(), [path]))
        if not found:
            raise HubError(404, "Entry not found", "EntryNotFound")
        token_url = f"{self.server.endpoint}/api/buckets/{bucket_id}/xet-read-token"
        headers = {
            "X-Xet-Hash": found[0]["xetHash"],
            "X-Linked-Size": str(found[0]["size"]),
            "ETag": f'"{found[0]["xetHash"]}"',
            "Content-Length": str(found[0]["size"]),
            "Link": f'<{token_url}>; rel="xet-auth"',
        }
        self.answer(200, b"", **headers)

    def storage_token(self, namespace: str, name: str, kind: str) -> None:
        """Hand out a token for the storage of chunks."""
        token, expires = self.state.storage_token(f"{namespace}/{name}", self.who(), kind)
        url = self.server.endpoint + "/cas"
        headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(expires)}
        self.answer(200, {"accessToken": token, "exp": expires, "casUrl": url}, **headers)

    # ---- storage of chunks

    def allowed(self, write: bool) -> None:
        """Raise unless the request carries a storage token for this."""
        self.state.check_storage_token(self.headers.get("Authorization") or "", write)

    def xorb_post(self, xorb: str) -> None:
        """Store a xorb at once: clients before grants, and the fallback."""
        self.allowed(write=True)
        self.answer(200, {"was_inserted": self.state.store_xorb(xorb, self.data)})

    def xorb_grant(self, xorb: str) -> None:
        """Allow the upload of a xorb, 200 when it is stored already."""
        self.allowed(write=True)
        name = self.state.grant(xorb, json.loads(self.data)["length"])
        if name is None:
            self.answer(200, {})
            return
        url = f"{self.server.endpoint}/xorb-put/{name}"
        self.answer(201, {"id": name, "method": "PUT", "url": url, "headers": {}})

    def xorb_put(self, grant: str) -> None:
        """Receive a granted xorb; the address alone is the right to do so."""
        self.state.receive(grant, self.data)
        self.answer(200)

    def xorb_commit(self, xorb: str, grant: str) -> None:
        """Store a received xorb."""
        self.allowed(write=True)
        self.answer(200, {"was_inserted": self.state.commit(xorb, grant)})

    def shard_post(self, version: str) -> None:
        """Register files."""
        self.allowed(write=True)
        self.state.store_shard(self.data)
        if version == "1":
            self.answer(200, {"result": 1})
        else:
            self.answer(200, b'{"type":"result"}\n', **{"Content-Type": "application/x-ndjson"})

    def reconstruct(self, version: str, file: str) -> None:
        """Say of which chunks a file is made."""
        self.allowed(write=False)
        terms = self.state.files.get(file)
        if terms is None:
            raise HubError(404, "file not found")
        base = self.server.endpoint + "/xorb-data/"
        document = reconstruction(terms, self.state.chunks, self.span(), base, int(version))
        if document is None:
            raise HubError(416, "range not satisfiable")
        self.answer(200, document)

    def xorb_data(self, xorb: str) -> None:
        """Serve a xorb's bytes; the address alone is the right to do so."""
        data = self.state.xorbs.get(xorb)
        if data is None:
            raise HubError(404, "no such xorb")
        span = self.span()
        if span is None:
            self.answer(200, data)
            return
        low, high = span[0], min(span[1], len(data))
        self.answer(206, data[low:high], **{"Content-Range": f"bytes {low}-{high - 1}/{len(data)}"})

    def nothing(self) -> None:
        """Accept and forget: telemetry."""
        self.answer(200, {})

    def unknown_chunk(self) -> None:
        """No deduplication across files."""
        raise HubError(404, "not found")

    # ---- steering

    def add_fault(self) -> None:
        """Switch a fault on."""
        try:
            self.server.faults.add(json.loads(self.data))
        except (TypeError, ValueError, re.error) as error:
            raise HubError(400, f"not a fault: {error}") from error
        self.answer(200, {})

    def clear_faults(self) -> None:
        """Switch all faults off."""
        self.server.faults.clear()
        self.answer(200, {})

    def show_log(self) -> None:
        """All requests so far."""
        with self.server.log_lock:
            rows = list(self.server.log)
        self.answer(200, rows)

    def clear_log(self) -> None:
        """Forget the requests so far."""
        with self.server.log_lock:
            self.server.log.clear()
        self.answer(200, {})

    def revoke(self, token: str) -> None:
        """Make an access token invalid."""
        self.state.revoke(token)
        self.answer(200, {})

    def expire(self) -> None:
        """Let all storage tokens expire."""
        self.state.expire_storage_tokens()
        self.answer(200, {})


for _method in ("GET", "POST", "HEAD", "DELETE", "PUT"):
    setattr(Handler, f"do_{_method}", Handler._go)

_BUCKET = r"/api/buckets/([^/]+)/([^/]+)"
_HASH = r"([0-9a-f]{64})"

Handler.routes = [
    (method, re.compile(pattern), act)
    for method, pattern, act in (
        ("GET", r"/api/whoami-v2", Handler.whoami),
        ("GET", r"/api/agent-harnesses", Handler.nothing),
        ("POST", _BUCKET, Handler.create),
        ("GET", _BUCKET, Handler.info),
        ("DELETE", _BUCKET, Handler.drop),
        ("GET", _BUCKET + r"/tree", Handler.tree),
        ("GET", _BUCKET + r"/tree/(.*)", Handler.tree),
        ("POST", _BUCKET + r"/paths-info", Handler.paths_info),
        ("POST", _BUCKET + r"/batch", Handler.batch),
        ("GET", _BUCKET + r"/xet-(read|write)-token", Handler.storage_token),
        ("HEAD", r"/buckets/([^/]+)/([^/]+)/resolve/(.*)", Handler.resolve),
        ("POST", rf"/cas/v1/xorbs/default/{_HASH}", Handler.xorb_post),
        ("POST", rf"/cas/v1/xorb-grants/default/{_HASH}", Handler.xorb_grant),
        ("PUT", r"/xorb-put/(\w+)", Handler.xorb_put),
        ("POST", rf"/cas/v1/xorb-commits/default/{_HASH}/grant/(\w+)", Handler.xorb_commit),
        ("POST", r"/cas/v([12])/shards", Handler.shard_post),
        ("GET", rf"/cas/v([12])/reconstructions/{_HASH}", Handler.reconstruct),
        ("GET", r"/cas/v1/chunks/[^/]+/[0-9a-f]{64}", Handler.unknown_chunk),
        ("POST", r"(?:/cas)?/v1/telemetry", Handler.nothing),
        ("GET", rf"/xorb-data/{_HASH}", Handler.xorb_data),
        ("POST", r"/_faults", Handler.add_fault),
        ("DELETE", r"/_faults", Handler.clear_faults),
        ("GET", r"/_log", Handler.show_log),
        ("DELETE", r"/_log", Handler.clear_log),
        ("DELETE", r"/_tokens/(.+)", Handler.revoke),
        ("DELETE", r"/_storage-tokens", Handler.expire),
    )
]
