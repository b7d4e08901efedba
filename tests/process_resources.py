"""What a process holds, as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path


def resources(pid: int | str = "self") -> dict[str, int]:
    """Descriptors, mappings (of which shared segments), threads, and KiB of own and of shared memory.

    Own memory includes pages that a fork still shares with its parent, so that touching them changes nothing.
    """
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    kib = {name: int(status[name].split()[0]) for name in ("RssAnon", "VmSwap", "RssShmem")}
    maps = (folder / "maps").read_text()
    return {
        "descriptors": len(os.listdir(folder / "fd")),
        "segments": maps.count("everstep-"),
        "maps": maps.count("\n"),
        "threads": len(os.listdir(folder / "task")),
        "resident_kib": kib["RssAnon"] + kib["VmSwap"],
        "shared_kib": kib["RssShmem"],
    }


def children(pid: int) -> list[int]:
    """The children of a process, whichever of its threads made them."""
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found
