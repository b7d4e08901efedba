"""Signed checkpoints: the owner of the private key vouches for a manifest, and for every byte of the files that it
lists.

A manifest's own digests find damage, but not an enemy: xxh3 is made for speed, and an attacker can make a file with
a given digest. So the signed text also names each file's SHA-256, with the whole text of the manifest: step, job,
task, files and the digest of the state. The writer of a file computes its SHA-256 from memory (`part_digest`) and
sends it to the signer over the job's own connections. The signature stands in the manifest itself, after its body,
so that neither exists without the other. `docs/checkpoint-format.md` has the bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.base.errors import BlobMissing, CheckpointCorrupt, ConfigError, StoreError
from everstep.checkpoint.keys import is_signature, read_private_key, read_public_key
from everstep.checkpoint.manifest import Manifest, PartFile
from everstep.checkpoint.part_digest import digest_of
from everstep.checkpoint.pointers import attach, detach
from everstep.checkpoint.reader import checked_bytes, read_manifest
from everstep.checkpoint.store import BlobStore

_PURPOSE = b"everstep checkpoint signature 2\n"
_IN_ORDER = b"everstep checkpoint signature 1\n"
"""Older mark: its digests are of the files' bytes from first to last."""


class Signer:
    """Signs manifests with the private key in a file, which is read when it is needed. For one thread at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._known: dict[tuple[str, str], str] = {}

    def knows(self, manifest: Manifest, text: bytes) -> bool:
        """Whether this key has signed an older manifest, so that the next one may have files of it.

        Raises: ConfigError if there is no such key.
        """
        found = sums_signed(read_public_key(self._path), manifest, text)
        self._known |= found or {}
        return found is not None

    def sign(self, manifest: Manifest, text: bytes, sums: Mapping[str, str]) -> bytes:
        """The text of a manifest, signed. sums: SHA-256 of new files by name, from their writers. Nothing is read
        from the store, so bytes that others put there cannot be signed.

        Raises: ConfigError if there is no such key. StoreError if a file's digest is missing.
        """
        private = read_private_key(self._path)
        known = {(f.name, f.mark): sums.get(f.name) or self._known.get((f.name, f.mark), "") for f in manifest.files}
        unknown = next((name for (name, _), digest in known.items() if not digest), None)
        if unknown is not None:
            raise StoreError(f"{unknown} cannot be signed: expected its SHA-256 from its writer, got none")
        self._known, files = known, [*known.values()]
        key, value = private.public_key().public_bytes_raw(), private.sign(_message(_PURPOSE, text, files))
        return attach(text, {"key": key.hex(), "files": files, "value": value.hex()})


def sums_signed(key: str, manifest: Manifest, text: bytes) -> dict[tuple[str, str], str] | None:
    """Digests of files in a manifest that this key has signed, by name and mark, from their writers; None if the key
    has not signed it, or by an older version that names none."""
    signature = detach(text)[1]
    if signature is None or signature["key"] != key or len(signature["files"]) != len(manifest.files):
        return None
    if _purpose(key, text, signature) != _PURPOSE:
        return None
    return {(f.name, f.mark): digest for f, digest in zip(manifest.files, signature["files"], strict=True)}


def check_signature(store: BlobStore, step: int, key: str, *, job: str | None = None, with_files: bool = True) -> None:
    """Check that the checkpoint of a step is signed with this key, and of this job.

    job: None for any. with_files: read them all; else only the manifest is known to be right.

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
    purpose = _purpose(key, text, signature)
    if len(files) != len(manifest.files) or purpose is None:
        raise ConfigError(
            f"{where} does not match its signature: it was altered, or the signature belongs to another checkpoint"
        )
    if job is not None and manifest.identity["job"] != job:
        theirs = str(manifest.identity["job"])[:40] or "none"
        raise ConfigError(f"{where} is signed for job {theirs}, not for {job}: it was copied here from elsewhere")
    for file, digest in zip(manifest.files, files if with_files else (), strict=False):
        try:
            found = _sha256(store, file, in_order=purpose == _IN_ORDER)
        except (BlobMissing, CheckpointCorrupt) as error:
            raise ConfigError(f"{where} is not what was signed: {error}") from None
        if found != digest:
            raise ConfigError(f"{where} is not what was signed: {file.name} has another SHA-256")


def _purpose(key: str, text: bytes, signature: Mapping[str, Any]) -> bytes | None:
    """Purpose of the signature; None if it is not of this key, or of another text."""
    public, value, bare = bytes.fromhex(key), bytes.fromhex(signature["value"]), detach(text)[0]
    made = (p for p in (_PURPOSE, _IN_ORDER) if is_signature(public, value, _message(p, bare, signature["files"])))
    return next(made, None)


def _message(purpose: bytes, text: bytes, files: list[str]) -> bytes:
    """The bytes that are signed. text: the manifest without a signature."""
    return purpose + "\n".join([hashlib.sha256(text).hexdigest(), *files, ""]).encode()


def _sha256(store: BlobStore, file: PartFile, *, in_order: bool) -> str:
    head, blocks = hashlib.sha256(), hashlib.sha256()
    for number, chunk in enumerate(checked_bytes(store, file)):
        (head if in_order or number == 0 else blocks).update(chunk)
    return head.hexdigest() if in_order else digest_of(head.digest(), blocks.digest())
