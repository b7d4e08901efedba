"""Memory in whole pages of its own, which takes none until it is written."""

from __future__ import annotations

import mmap

NORESERVE = 0x4000
"""Of mmap, on Linux: no memory is set aside for pages that nobody has written. Without it a mapping that may be written
is refused where it is larger than all memory and swap, however little of it is ever used."""


def own_pages(nbytes: int) -> memoryview:
    """Zeros, in pages of their own: malloc would keep what a copy of a state took, for it keeps all freed memory.

    Raises: OSError.
    """
    return memoryview(mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE))
