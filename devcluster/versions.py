"""Which programs the control plane is made of, in which versions, and the checksums of the official files.

Only facts. To move to another version change them here and in hyper/go.mod, and run `go mod tidy` there.
"""

from __future__ import annotations

KUBERNETES = "v1.35.4"
ETCD = "v3.6.5"  # the version that this Kubernetes is itself built and tested with

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")

# Keyed by Go's name of the processor. Kubernetes: the programs themselves; etcd: the release archive.
SHA256 = {
    "amd64": {
        "etcd": "66bad39ed920f6fc15fd74adcb8bfd38ba9a6412f8c7852d09eb11670e88cac3",
        "kube-apiserver": "d5fff07e41f6826963254685667cfb3ec354dd676aa697e75c1e973e86d28fc7",
        "kube-controller-manager": "be0dc23daaf568c51017ea867707bd38ab36a78a83982bc12af9184e8e370c2c",
        "kube-scheduler": "c796c9e54fc56745b9f50d2aa464d97d10007adc7cf0ba36a9cbf450a6f11770",
        "kubectl": "b529430df69a688fd61b64ad2299edb5fd71cb58be2a4779dba624c7d3510efd",
    },
    "arm64": {
        "etcd": "7010161787077b07de29b15b76825ceacbbcedcb77fe2e6832f509be102cab6b",
        "kube-apiserver": "ef055372df04d541c84ab8cb6dabfa67c3f5f35e6cbe7642673f94e1ca560cf3",
        "kube-controller-manager": "0ba5bc092a1fe68987f2b4ae072146962ed31b73819c1552153894eff67968c0",
        "kube-scheduler": "ad75d09987d28f69d12959b880074ae3d2fedcf7491f5d41d6f23456d822333c",
        "kubectl": "6a5a4cc4e396d7626a7a693a3044b51c75520f81db30fe6816c2554e53be336f",
    },
}


def url(program: str, processor: str) -> str:
    """Where the official file is."""
    if program == "etcd":
        return f"https://github.com/etcd-io/etcd/releases/download/{ETCD}/etcd-{ETCD}-linux-{processor}.tar.gz"
    return f"https://dl.k8s.io/release/{KUBERNETES}/bin/linux/{processor}/{program}"
