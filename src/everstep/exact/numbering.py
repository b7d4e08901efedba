"""The planes of a state and how many blocks each has, as sets of blocks (`base.extents`) are told. Apart because a
manifest alone says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.base.extents import Sizes
from everstep.exact.planes import planes_of


def sizes_of(manifest: Mapping[str, Any]) -> Sizes:
    """In the order of the blocks' numbers, which follow each other from plane to plane."""
    return tuple((plane.name, plane.stop - plane.start) for plane in planes_of(manifest))
