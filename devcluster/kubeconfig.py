"""Write kubeconfig files. As JSON, which is YAML too and needs no library."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from devcluster.certs import Credentials, write_private


def write(path: Path, url: str, ca_file: Path, credentials: Credentials, user: str) -> None:
    """Write a file that needs no other, so that it may be copied away."""

    def embed(file: Path) -> str:
        return base64.b64encode(file.read_bytes()).decode()

    cluster = {"server": url, "certificate-authority-data": embed(ca_file)}
    keys = {"client-certificate-data": embed(credentials.certificate), "client-key-data": embed(credentials.key)}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "devcluster", "cluster": cluster}],
        "users": [{"name": user, "user": keys}],
        "contexts": [{"name": "devcluster", "context": {"cluster": "devcluster", "user": user}}],
        "current-context": "devcluster",
    }
    write_private(path, json.dumps(config, indent=2).encode())
