"""The command lines of the components: what the control plane is, in one place. Pure.

Everything is as strict as Kubernetes is by default. Switched off is only what needs a network of pods
(endpoints of the API server, cloud routes) or a second replica (leader election).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from devcluster.certs import Credentials
from devcluster.ports import LOOPBACK

ISSUER = "https://kubernetes.default.svc.cluster.local"
SERVICES = "10.96.0.0/16"
# Nothing answers there (RFC 5737): pods reach the API server at its loopback address, not by a Service.
ADVERTISED = "192.0.2.1"


@dataclass(frozen=True)
class Layout:
    """Where everything is; file names are those that `ControlPlane` writes into `folder`."""

    folder: Path
    programs: Path
    api_port: int
    etcd_port: int
    etcd_peer_port: int

    def credentials(self, stem: str) -> Credentials:
        """A certificate that was issued as `stem`."""
        return Credentials(self.folder / f"{stem}.crt", self.folder / f"{stem}.key")

    @property
    def ca_file(self) -> Path:
        """The authority's certificate."""
        return self.folder / "ca.crt"

    @property
    def token_key(self) -> Path:
        """What ServiceAccount tokens are signed with."""
        return self.folder / "service-accounts.key"

    @property
    def etcd_data(self) -> Path:
        """All that the cluster knows."""
        return self.folder / "etcd"


def etcd(layout: Layout) -> list[str]:
    """One member. Only holders of a certificate get in, and nothing waits for the disk."""
    client, peer = f"https://{LOOPBACK}:{layout.etcd_port}", f"https://{LOOPBACK}:{layout.etcd_peer_port}"
    tls = layout.credentials("etcd")
    return [
        str(layout.programs / "etcd"),
        "--name=devcluster",
        f"--data-dir={layout.etcd_data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=devcluster={peer}",
        f"--cert-file={tls.certificate}",
        f"--key-file={tls.key}",
        f"--trusted-ca-file={layout.ca_file}",
        "--client-cert-auth",
        f"--peer-cert-file={tls.certificate}",
        f"--peer-key-file={tls.key}",
        f"--peer-trusted-ca-file={layout.ca_file}",
        "--peer-client-cert-auth",
        "--socket-reuse-port",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def api_server(layout: Layout) -> list[str]:
    """Node and RBAC authorization, all default admission plug-ins and NodeRestriction."""
    serving, to_etcd, to_node = (
        layout.credentials(stem) for stem in ("api-server", "api-server-etcd", "api-server-node")
    )
    return [
        str(layout.programs / "kube-apiserver"),
        f"--bind-address={LOOPBACK}",
        f"--secure-port={layout.api_port}",
        "--permit-port-sharing",
        f"--advertise-address={ADVERTISED}",
        "--endpoint-reconciler-type=none",
        f"--service-cluster-ip-range={SERVICES}",
        f"--tls-cert-file={serving.certificate}",
        f"--tls-private-key-file={serving.key}",
        f"--client-ca-file={layout.ca_file}",
        f"--etcd-servers=https://{LOOPBACK}:{layout.etcd_port}",
        f"--etcd-cafile={layout.ca_file}",
        f"--etcd-certfile={to_etcd.certificate}",
        f"--etcd-keyfile={to_etcd.key}",
        f"--kubelet-certificate-authority={layout.ca_file}",
        f"--kubelet-client-certificate={to_node.certificate}",
        f"--kubelet-client-key={to_node.key}",
        "--kubelet-preferred-address-types=InternalIP",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--service-account-issuer={ISSUER}",
        f"--service-account-key-file={layout.token_key}",
        f"--service-account-signing-key-file={layout.token_key}",
        # Ends watches when it is to end; otherwise they would hold it up for a minute.
        "--shutdown-watch-termination-grace-period=3s",
    ]


def controller_manager(layout: Layout) -> list[str]:
    """All default controllers, each with a ServiceAccount and rights of its own."""
    return [
        str(layout.programs / "kube-controller-manager"),
        f"--kubeconfig={layout.folder / 'controller-manager.kubeconfig'}",
        f"--service-account-private-key-file={layout.token_key}",
        f"--root-ca-file={layout.ca_file}",
        "--use-service-account-credentials",
        # It starts with some hundred requests, one after the other; by default twenty a second.
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        "--leader-elect=false",
        "--secure-port=0",
    ]


def scheduler(layout: Layout) -> list[str]:
    """The default scheduler with its default profile."""
    return [
        str(layout.programs / "kube-scheduler"),
        f"--kubeconfig={layout.folder / 'scheduler.kubeconfig'}",
        "--leader-elect=false",
        "--secure-port=0",
    ]
