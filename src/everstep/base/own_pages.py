"""Memory in whole pages of its own, which takes none until it is written."""

from __future__ import annotations

import ctypes
import mmap

NORESERVE = 0x4000
"""A flag of mmap on Linux: memory counts only once a page is written. Without it the system refuses a mapping that is
larger than all memory and swap, however little of it is used."""


def own_pages(nbytes: int) -> memoryview:
    """Zeros, in pages of their own: malloc would keep what a copy of a state took, for it keeps all freed memory.

    Raises: OSError.
    """
    return memoryview(mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE))


def is_untouched(address: int, nbytes: int) -> bool:
    """Whether nobody has read or written a page of this memory since `own_pages` made it. False if that is unknown."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    seen = (ctypes.c_ubyte * -(-(address + nbytes - start) // mmap.PAGESIZE))()
    failed = _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(address + nbytes - start), seen)
    return not failed and not any(bytes(seen))


_libc = ctypes.CDLL(None, use_errno=True)
