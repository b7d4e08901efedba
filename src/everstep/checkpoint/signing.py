"""Signed checkpoints: who has the private key vouches for a manifest, and for every byte of the files that it lists.

A manifest's own digests find damage, not an enemy: xxh3 is made for speed, and who can write a file can make one that
has the digest of another. So what is signed names each file's SHA-256 besides, and the whole text of the manifest:
step, job, task, files and the digest of the state. The signature stands in the manifest itself, after its body, so that
there is none without the other. `docs/checkpoint-format.md` has the bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.base.errors import BlobMissing, CheckpointCorrupt, ConfigError
from everstep.checkpoint.keys import is_signature, read_private_key
from everstep.checkpoint.manifest import Manifest, PartFile
from everstep.checkpoint.pointers import attach, detach
from everstep.checkpoint.reader import checked_bytes, read_manifest
from everstep.checkpoint.store import BlobStore

_PURPOSE = b"everstep checkpoint signature 1\n"


class Signer:
    """Signs manifests with the private key in a file, which is read when it is needed. For one thread at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._known: dict[tuple[str, str], str] = {}

    def sign(self, store: BlobStore, manifest: Manifest, text: bytes) -> bytes:
        """The text of a manifest, signed. Reads all files that it lists and this one has not read before, and compares
        them with their digests on the way.

        Raises: ConfigError if there is no such key. CheckpointCorrupt if a file is not as the manifest says.
        """
        private = read_private_key(self._path)
        marked = [(file.name, file.mark) for file in manifest.files]
        before, self._known = self._known, {}
        for mark, file in zip(marked, manifest.files, strict=True):
            self._known[mark] = before.get(mark) or _sha256(store, file)
        files = [*self._known.values()]
        key, value = private.public_key().public_bytes_raw(), private.sign(_message(text, files))
        return attach(text, {"key": key.hex(), "files": files, "value": value.hex()})


def check_signature(store: BlobStore, step: int, key: str, *, job: str | None = None, with_files: bool = True) -> None:
    """That the checkpoint of a step is signed with this key, and of this job. job: None for any. with_files: read them
    all; else only the manifest is known to be right.

    Raises: ConfigError, saying what is wrong with it. BlobMissing, CheckpointCorrupt, StoreError.
    """
    manifest, text = read_manifest(store, step)
    where = f"the checkpoint of step {step} in {store.url}"
    signature = detach(text)[1]
    if signature is None:
        raise ConfigError(f"{where} is not signed: expected the signature of {key[:16]}")
    if signature["key"] != key:
        raise ConfigError(f"{where} is signed by {signature['key'][:16]}: expected {key[:16]}")
    files = list(signature["files"])
    if len(files) != len(manifest.files) or not _verified(key, text, signature):
        raise ConfigError(f"{where} does not match its signature: it was altered, or the signature is of another one")
    if job is not None and manifest.identity["job"] != job:
        theirs = str(manifest.identity["job"])[:40] or "none"
        raise ConfigError(f"{where} is signed, but of job {theirs}, not of {job}: it was brought here from elsewhere")
    for file, digest in zip(manifest.files, files if with_files else (), strict=False):
        try:
            found = _sha256(store, file)
        except (BlobMissing, CheckpointCorrupt) as error:
            raise ConfigError(f"{where} is not what was signed: {error}") from None
        if found != digest:
            raise ConfigError(f"{where} is not what was signed: {file.name} has another SHA-256")


def _verified(key: str, text: bytes, signature: Mapping[str, Any]) -> bool:
    message = _message(detach(text)[0], signature["files"])
    return is_signature(bytes.fromhex(key), bytes.fromhex(signature["value"]), message)


def _message(text: bytes, files: list[str]) -> bytes:
    """What is signed. text: the manifest without a signature."""
    return _PURPOSE + "\n".join([hashlib.sha256(text).hexdigest(), *files, ""]).encode()


def _sha256(store: BlobStore, file: PartFile) -> str:
    digest = hashlib.sha256()
    for chunk in checked_bytes(store, file):
        digest.update(chunk)
    return digest.hexdigest()
