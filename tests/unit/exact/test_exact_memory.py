"""Freed memory stays in the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
if sys.argv[1] == "keep":
    from everstep.exact.accumulate import keep_freed_memory
    if not keep_freed_memory():
        sys.exit(77)
def rounds(n):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(n):
        held = [bytearray(4 << 20) for _ in range(8)]
        for piece in held:
            piece[::4096] = b"x" * 1024
        del piece, held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
rounds(2)
print(rounds(5))
"""


def faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip("this C library has no mallopt")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_repeated_allocation_does_not_fault_again() -> None:
    kept, ordinary = faults("keep"), faults("leave")
    assert kept < 500 < ordinary, (kept, ordinary)
