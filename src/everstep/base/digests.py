"""What the digests of a finished job are made of, as a number: those of different versions say nothing of each other.

Version 1: xxh3-128 of the rows (name, type, shape, xxh3-128 of the elements) of all tensors, by name; that of the state
with the step and the values that are no tensors besides (`exact/digest.py`, `exact/image.py: rows_digest`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DIGEST_VERSION = 1


def version_of(digest: Mapping[str, Any]) -> Any:
    """Of what a job's digest.json says; 1 where it says none, as before there were several. Any JSON."""
    return digest.get("version", 1)
