"""Certificates as an organisation's CA would make them."""

from __future__ import annotations

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from everstep.runtime.link.tls import Shown


def own_ca(address: str, days: int = 1, seed: bytes = b"o" * 32, name: str = "host") -> Shown:
    """A certificate for this address and its key, by the CA that the seed makes. days: until it is over. name: its
    common name, "" for none."""
    key = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
    issuer, subject = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)] if text else [])
        for text in ("organisation", name)
    )
    now = datetime.datetime.now(datetime.UTC)
    pem = serialization.Encoding.PEM

    def made(
        name: x509.Name, public: ed25519.Ed25519PublicKey, extension: x509.ExtensionType, until: datetime.datetime
    ) -> str:
        begin = now - datetime.timedelta(days=10)
        builder = x509.CertificateBuilder(issuer, name, public, x509.random_serial_number(), begin, until)
        return builder.add_extension(extension, True).sign(key, None).public_bytes(pem).decode()

    ca = made(issuer, key.public_key(), x509.BasicConstraints(True, None), now + datetime.timedelta(days=10))
    own = ed25519.Ed25519PrivateKey.generate()
    san = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    cert = made(subject, own.public_key(), san, now + datetime.timedelta(days=days))
    private = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode()
    return Shown(cert, private, ca)
