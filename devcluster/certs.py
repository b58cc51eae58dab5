"""A certificate authority of the control plane's own, and what it signs.

Who you are to the API server is in the certificate: the common name is the user, the organizations are
its groups. Valid for a year, since a control plane here lives for minutes and its authority dies with it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = timedelta(days=365)
CLOCK_SKEW = timedelta(minutes=5)


@dataclass(frozen=True)
class Credentials:
    """Where a certificate and its key are."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates and puts them into a folder. The only one who knows its key is this object."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = new_key()
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "devcluster")])
        key_usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(key_usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.file = folder / "ca.crt"
        write_private(self.file, certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, stem: str, user: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()) -> Credentials:
        """Write `stem`.crt and `stem`.key: for a client, and for a server too where `hosts` are given."""
        key = new_key()
        attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        subject = x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, user)])
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(subject, self._name, key.public_key())
        if hosts:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
            builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_host, hosts))), critical=False)
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        written = Credentials(self._folder / f"{stem}.crt", self._folder / f"{stem}.key")
        write_private(written.certificate, certificate.public_bytes(serialization.Encoding.PEM))
        write_key(written.key, key)
        return written


def new_key() -> ec.EllipticCurvePrivateKey:
    """A P-256 key: made in a moment, and good for TLS and for ServiceAccount tokens alike."""
    return ec.generate_private_key(ec.SECP256R1())


def write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Write a private key as every component reads it."""
    form = serialization.PrivateFormat.TraditionalOpenSSL
    write_private(path, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read from its first moment on."""
    path.touch(mode=0o600)
    path.write_bytes(data)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - CLOCK_SKEW).not_valid_after(now + LIFETIME)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
