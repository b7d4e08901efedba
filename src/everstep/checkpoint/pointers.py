"""`latest`, `best` and the pins: small files beside the checkpoints. What is lost of them can be found again from the
manifests, pins excepted.

They are sealed, as manifests are: the first line bears a format and a digest of all that follows, so that any changed
byte shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from everstep.base.errors import BlobMissing, CheckpointCorrupt, ConfigError
from everstep.base.given import parse_json
from everstep.checkpoint.names import MAX_STEP, PINS
from everstep.checkpoint.store import BlobStore
from everstep.exact.digest import digest_bytes

_POINTER, _PINS = "pointer", "pins"


def write_pointer(store: BlobStore, name: str, step: int, **more: Any) -> None:
    """name: LATEST or BEST. more: what else it says (JSON). Raises: StoreError."""
    _write(store, _POINTER, name, {"step": step, **more})


def read_pointer(store: BlobStore, name: str) -> int | None:
    """The step that it points at; None if there is no such pointer.

    Raises: CheckpointCorrupt if it was altered. StoreError.
    """
    body = _read(store, _POINTER, name)
    if body is None:
        return None
    if not _is_step(body.get("step")):
        raise CheckpointCorrupt(f"{name} names no step: expected a whole number from 0 to {MAX_STEP}")
    return int(body["step"])


def read_pointer_value(store: BlobStore, name: str) -> float | None:
    """The value that made a checkpoint the best; None if nothing is known of it.

    Raises: CheckpointCorrupt if it was altered. StoreError.
    """
    value = (_read(store, _POINTER, name) or {}).get("value")
    try:
        return float.fromhex(value) if isinstance(value, str) else None
    except (ValueError, OverflowError):
        raise CheckpointCorrupt(f"{name} names no value: expected a hexadecimal number") from None


def write_pins(store: BlobStore, pins: Mapping[str, int]) -> None:
    """pins: name -> step that is kept for ever. Raises: StoreError."""
    _write(store, _PINS, PINS, {"pins": dict(pins)})


def read_pins(store: BlobStore) -> dict[str, int]:
    """Raises: CheckpointCorrupt if the file was altered. StoreError."""
    pins = (_read(store, _PINS, PINS) or {"pins": {}}).get("pins")
    if not isinstance(pins, dict) or not all(_is_step(step) for step in pins.values()):
        raise CheckpointCorrupt(f"{PINS} holds no names with steps: expected whole numbers from 0 to {MAX_STEP}")
    return pins


def _write(store: BlobStore, kind: str, name: str, body: Mapping[str, Any]) -> None:
    data = seal(kind, body)
    store.write(name, [data], len(data))


def _read(store: BlobStore, kind: str, name: str) -> dict[str, Any] | None:
    try:
        return unseal_one_of(kind, read_sealed(store, name), name, (FORMAT,))[1]
    except BlobMissing:
        return None


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_STEP


# ---- sealed files


FORMAT = 1
_HEAD = re.compile(rb'\{"everstep_([a-z]{1,20})":(\d{1,9}),"digest":"([0-9a-f]{32})","body":\n')
_TAIL = b"}\n"
_SIGNATURE = b',"signature":\n'
_SIGNED = re.compile(
    rb',"signature":\n\{"key":"([0-9a-f]{64})","files":\[((?:"[0-9a-f]{64}",)*"[0-9a-f]{64}"|)\],"value":"([0-9a-f]{128})"\}\}\n'
)
_HEX = re.compile("[0-9a-f]{64}")
MOST_BYTES = 512 << 20
_MOST_VALUES = 1 << 25
"""Most values of a sealed file: enough for a state of 2 TB."""


def seal(kind: str, body: Mapping[str, Any], version: int = FORMAT) -> bytes:
    """The file's bytes. kind: lower-case letters."""
    text = json.dumps(body, separators=(",", ":")).encode()
    return _head(kind.encode(), version, text) + text + _TAIL


def unseal_one_of(
    kind: str, data: bytes | bytearray | memoryview, name: str, formats: Sequence[int]
) -> tuple[int, dict[str, Any]]:
    """The format of a file and the body that it bears. name: of the file, for messages. formats: those that are read.

    Raises: CheckpointCorrupt if a byte differs. ConfigError if it is whole, but of a format that is not read here.
    """
    text = bytes(data)
    found = _HEAD.match(text)
    if found is None or not text.endswith(_TAIL):
        raise CheckpointCorrupt(f"{name} is no whole {kind} ({len(text)} bytes): altered, truncated or foreign")
    version, body = int(found[2]), text[found.end() : -len(_TAIL)]
    if _head(found[1], version, body) != found[0]:
        raise CheckpointCorrupt(f"{name} does not match its digest: it was altered")
    if found[1] != kind.encode():
        raise CheckpointCorrupt(f"{name} is no {kind} but a {found[1].decode()}")
    if version not in formats:
        read = " and ".join(map(str, formats))
        raise ConfigError(f"{name} has format {version}; this version of Everstep reads {read}: use a newer one")
    try:
        if sum(map(body.count, (b",", b"[", b"{"))) > _MOST_VALUES:
            raise ValueError(f"it holds more than {_MOST_VALUES} values")
        loaded = parse_json(body)
        if b"\\ud" in body.lower():  # halves of characters cannot be written again, nor shown
            json.dumps(loaded, ensure_ascii=False).encode()
    except ValueError as error:
        said = type(error).__name__ if isinstance(error, UnicodeError) else error
        raise CheckpointCorrupt(f"{name} is not as Everstep writes it: {said}") from None
    if not isinstance(loaded, dict):
        raise CheckpointCorrupt(f"{name} is not as Everstep writes it: expected an object")
    return version, loaded


def read_sealed(store: BlobStore, name: str) -> bytes:
    """The text of a sealed file. Raises: BlobMissing; CheckpointCorrupt if it is longer than any; StoreError."""
    text = bytes(store.read(name, 0, MOST_BYTES + 1))
    if len(text) > MOST_BYTES:
        raise CheckpointCorrupt(f"{store.url}/{name} has more than {MOST_BYTES} bytes: expected what Everstep wrote")
    return text


def attach(text: bytes, signature: Mapping[str, Any]) -> bytes:
    """A sealed file's text with a signature (key, files, value: hex digits) after its body."""
    return text.removesuffix(_TAIL) + _SIGNATURE + json.dumps(signature, separators=(",", ":")).encode() + _TAIL


def detach(text: bytes) -> tuple[bytes, dict[str, Any] | None]:
    """A sealed file's text without its signature, and that; None if it has none, or one that is not as we write it,
    which then is damage to the text."""
    at = text.rfind(_SIGNATURE)
    found = _SIGNED.fullmatch(text, at) if at >= 0 else None
    if found is None:
        return text, None
    signature = {"key": found[1].decode(), "files": _HEX.findall(found[2].decode()), "value": found[3].decode()}
    return text[:at] + _TAIL, signature


def _head(kind: bytes, version: int, body: bytes) -> bytes:
    digest = digest_bytes(b"%s %d\n" % (kind, version) + body)
    return b'{"everstep_%s":%d,"digest":"%s","body":\n' % (kind, version, digest.encode())
