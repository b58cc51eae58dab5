"""Reach a control plane that someone runs: addresses, credentials, kubectl and plain requests.

Knows nothing of the processes behind it, so that one control plane can serve several test processes.
Requests are not retried; what a failure means is the caller's to know.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import urllib.parse
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from devcluster.certs import Credentials

Json = dict[str, Any]


class ApiError(RuntimeError):
    """The API server's refusal; `status` is the Status object that came with it."""

    def __init__(self, code: int, status: Json) -> None:
        super().__init__(f"{code} {status.get('reason', '')}: {status.get('message', '')}")
        self.code, self.status = code, status


class KubectlFailed(RuntimeError):
    """What kubectl said when it failed."""


@dataclass(frozen=True)
class Access:
    """A control plane, seen as its administrator."""

    url: str
    folder: Path
    programs: Path

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig file."""
        return self.folder / "kubeconfig"

    @property
    def ca_file(self) -> Path:
        """The certificate that the API server's is signed with."""
        return self.folder / "ca.crt"

    @property
    def admin(self) -> Credentials:
        """The administrator's client certificate: in the group system:masters, which may do everything."""
        return Credentials(self.folder / "admin.crt", self.folder / "admin.key")

    def kubectl(self, *arguments: str, input: str | None = None, timeout: float = 60.0) -> str:
        """Run kubectl as the administrator; returns what it printed."""
        # Its cache is by host and port, so another cluster's could be found in the usual place.
        own = {"KUBECONFIG": str(self.kubeconfig), "KUBECACHEDIR": str(self.folder / "kubectl-cache")}
        done = subprocess.run(
            [str(self.programs / "kubectl"), *arguments],
            env=os.environ | own,
            input=input,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise KubectlFailed(done.stderr.strip() or f"kubectl ended with status {done.returncode}")
        return done.stdout

    def request(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        content: str = "application/json",
        token: str | None = None,
        credentials: Credentials | None = None,
        timeout: float = 30.0,
    ) -> Json:
        """Send one request, as the administrator or whom a token or credentials say; raises ApiError or OSError."""
        context = self._context(credentials) if credentials else self._anonymous if token else self._as_admin
        host = urllib.parse.urlsplit(self.url).netloc
        headers = {"Accept": "application/json", "Content-Type": content}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        connection = http.client.HTTPSConnection(host, timeout=timeout, context=context)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            data = response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{self.url}: {error!r}") from error
        finally:
            connection.close()
        answer = _json(data)
        if response.status >= 400:
            raise ApiError(response.status, answer)
        return answer

    @cached_property
    def _as_admin(self) -> ssl.SSLContext:
        return self._context(self.admin)

    @cached_property
    def _anonymous(self) -> ssl.SSLContext:
        return self._context(None)

    def _context(self, credentials: Credentials | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca_file))
        if credentials:
            context.load_cert_chain(str(credentials.certificate), str(credentials.key))
        return context


def _json(data: bytes) -> Json:
    """The answer as an object; the health endpoints and some errors are plain text."""
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"message": data.decode(errors="replace")}
