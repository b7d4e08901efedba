"""What the kernel says of other processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from everstep.runtime.process import parent_began_s


def test_when_a_process_began_is_told_to_its_child() -> None:
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    began_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, str(parent_began_s()).encode())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    found = os.read(read, 100).decode()
    os.close(read)
    os.close(write)
    assert found.isdecimal() and abs(int(found) - began_s) <= 2, "whole seconds, each rounded down"
