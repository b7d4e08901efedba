"""The planes of a state and how many blocks each has, as sets of blocks (`base.extents`) are told. Apart because a
manifest alone says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.base.extents import Sizes


def sizes_of(manifest: Mapping[str, Any]) -> Sizes:
    """In the order of the blocks' numbers. A manifest without planes is one."""
    count = len(manifest["blocks"])
    return (("rest", count),) if count else ()
