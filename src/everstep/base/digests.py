"""Version of the digests of a finished job; digests of different versions cannot be compared.

Version 1: xxh3-128 over the rows (name, type, shape, xxh3-128 of the elements) of all tensors, by name; the state's
also covers the step and the values that are no tensors (`exact/digest.py`, `exact/image.py: rows_digest`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DIGEST_VERSION = 1


def version_of(digest: Mapping[str, Any]) -> Any:
    """Version of a job's digest.json; 1 if it names none, as in older jobs. The result may be any JSON value."""
    return digest.get("version", 1)
