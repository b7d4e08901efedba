"""Sleeping until a 32-bit word in shared memory changes, and waking those who sleep on it.

Linux futexes, shared between processes (no FUTEX_PRIVATE_FLAG: the key is the file's page, so the waiter may have it
mapped read-only). Where there is no futex, waiting is a short sleep. Waiters must be ready for spurious returns.

Source: man 2 futex. ctypes releases the interpreter lock during the call; both calls are full memory barriers.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time

_NUMBERS = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT = 0
_WAKE = 1
_POLL_S = 0.0002


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def _find() -> tuple[ctypes._NamedFuncPointer, int] | None:
    number = _NUMBERS.get(platform.machine())
    if not sys.platform.startswith("linux") or number is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    call.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.POINTER(_Timespec),
        ctypes.c_void_p,
        ctypes.c_uint32,
    )
    return call, number


_FUTEX = _find()
_FENCE = ctypes.c_uint32(0)


def wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep while the word at `address` is `expected`, `timeout_s` seconds at most (below one second)."""
    if _FUTEX is None:
        time.sleep(min(_POLL_S, timeout_s))
        return
    call, number = _FUTEX
    call(number, address, _WAIT, expected, ctypes.byref(_Timespec(0, int(timeout_s * 1e9))), None, 0)


def load_fence() -> None:
    """What was read before stays before what is read afterwards. x86 keeps that order by itself."""
    if platform.machine() not in ("x86_64", "AMD64"):
        wake(ctypes.addressof(_FENCE))


def wake(address: int) -> None:
    """Wake everybody who sleeps on the word at `address`."""
    if _FUTEX is not None:
        call, number = _FUTEX
        call(number, address, _WAKE, 0x7FFFFFFF, None, None, 0)
