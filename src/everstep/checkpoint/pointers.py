"""`latest`, `best` and the pins: small files beside the checkpoints. What is lost of them can be found again from the
manifests, pins excepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.base.errors import BlobMissing, CheckpointCorrupt
from everstep.checkpoint.names import MAX_STEP, PINS
from everstep.checkpoint.sealed import seal, unseal
from everstep.checkpoint.store import BlobStore

_POINTER, _PINS = "pointer", "pins"


def write_pointer(store: BlobStore, name: str, step: int, **more: Any) -> None:
    """name: LATEST or BEST. more: what else it says (JSON). Raises: StoreError."""
    data = seal(_POINTER, {"step": step, **more})
    store.write(name, [data], len(data))


def read_pointer(store: BlobStore, name: str) -> int | None:
    """The step that it points at; None if there is no such pointer.

    Raises: CheckpointCorrupt if it was altered. StoreError.
    """
    try:
        body = unseal(_POINTER, store.read(name), name)
    except BlobMissing:
        return None
    if not _is_step(body.get("step")):
        raise CheckpointCorrupt(f"{name} names no step: expected a whole number from 0 to {MAX_STEP}")
    return int(body["step"])


def read_pointer_value(store: BlobStore, name: str) -> float | None:
    """The value that made a checkpoint the best; None if nothing is known of it.

    Raises: CheckpointCorrupt if it was altered. StoreError.
    """
    try:
        value = unseal(_POINTER, store.read(name), name).get("value")
    except BlobMissing:
        return None
    try:
        return float.fromhex(value) if isinstance(value, str) else None
    except (ValueError, OverflowError):
        raise CheckpointCorrupt(f"{name} names no value: expected a hexadecimal number") from None


def write_pins(store: BlobStore, pins: Mapping[str, int]) -> None:
    """pins: name -> step that is kept for ever. Raises: StoreError."""
    data = seal(_PINS, {"pins": dict(pins)})
    store.write(PINS, [data], len(data))


def read_pins(store: BlobStore) -> dict[str, int]:
    """Raises: CheckpointCorrupt if the file was altered. StoreError."""
    try:
        body = unseal(_PINS, store.read(PINS), PINS)
    except BlobMissing:
        return {}
    pins = body.get("pins")
    if not isinstance(pins, dict) or not all(_is_step(step) for step in pins.values()):
        raise CheckpointCorrupt(f"{PINS} holds no names with steps: expected whole numbers from 0 to {MAX_STEP}")
    return pins


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_STEP
