"""Certificates and their keys, for servers of HTTPS."""

from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)


def certificate(folder: Path, name: str = "one", password: bytes | None = None) -> tuple[str, str]:
    """Write a certificate for ``localhost`` and its key, and return the paths of both."""
    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    made = (
        x509.CertificateBuilder(who, who, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2120, 1, 1, tzinfo=UTC))
        .sign(key, hashes.SHA256())
    )
    secret = NoEncryption() if password is None else BestAvailableEncryption(password)
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    paths[0].write_bytes(made.public_bytes(Encoding.PEM))
    paths[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret))
    return str(paths[0]), str(paths[1])
