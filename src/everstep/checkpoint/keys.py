"""Keys that checkpoints are signed with: ed25519, in PEM files.

Apart from the signatures, which take manifests and so torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from everstep.base.errors import ConfigError
from everstep.base.given import read_given

_MOST_BYTES = 1 << 16


def read_public_key(path: str | os.PathLike[str]) -> str:
    """The public key in a PEM file, or that of the private one in it; 64 hex digits.

    Raises: ConfigError if it holds neither.
    """
    data = _read(Path(path))
    if b"PRIVATE KEY" in data:
        return str(read_private_key(Path(path)).public_key().public_bytes_raw().hex())
    try:
        key = serialization.load_pem_public_key(data)
    except Exception as error:  # of three kinds
        raise _no_key(path, "public or private", error) from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise _no_key(path, "public or private", None)
    return str(key.public_bytes_raw().hex())


def make_keys(path: Path) -> tuple[Path, str]:
    """A new pair: the private key in the file, for its owner alone, the public one in FILE.pub. Returns the latter's
    path, and the public key in hex digits.

    Raises: ConfigError if one of the files is there, or cannot be written.
    """
    key = ed25519.Ed25519PrivateKey.generate()
    public = key.public_key()
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    private_text = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none)
    public_text = public.public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    beside = path.with_name(f"{path.name}.pub")
    for where, text in ((path, private_text), (beside, public_text)):
        try:
            with open(os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(
                f"{where} exists already: choose another file, because keys are never overwritten"
            ) from None
        except OSError as error:
            raise ConfigError(f"cannot write {where}: {error.strerror or error}") from None
    return beside, public.public_bytes_raw().hex()


def is_signature(key: bytes, value: bytes, message: bytes) -> bool:
    """Whether a value is the signature of a message by who has the private key of a public one."""
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(key).verify(value, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def read_private_key(path: str | os.PathLike[str]) -> ed25519.Ed25519PrivateKey:
    """Raises: ConfigError if the file holds no such key."""
    data = _read(Path(path))
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except Exception as error:  # of four kinds, one of them for keys with a password
        raise _no_key(path, "private", error) from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise _no_key(path, "private", None)
    found: ed25519.Ed25519PrivateKey = key
    return found


def _no_key(path: str | os.PathLike[str], kind: str, error: Exception | None) -> ConfigError:
    why = f" ({' '.join(str(error).split())[:100]})" if error is not None else ""
    return ConfigError(
        f"{os.fspath(path)} holds no {kind} ed25519 key in PEM form, without a password{why}: "
        "'everstep checkpoints keygen FILE' makes a pair"
    )


def _read(path: Path) -> bytes:
    try:
        return read_given(path, _MOST_BYTES, pipes=True)
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror or error}") from None
