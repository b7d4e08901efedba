"""Memory of well-known devices. Pure.

Source: the makers' data sheets as of 2025. GB there are 10^9 or 2^30 bytes; programs get a little less than the latter,
so 10^9 is taken.
"""

from __future__ import annotations

from everstep.base.errors import ConfigError, did_you_mean

MEMORY_GB = {
    "a10-24": 24,
    "a100-40": 40,
    "a100-80": 80,
    "b200-180": 180,
    "h100-80": 80,
    "h200-141": 141,
    "l4-24": 24,
    "l40s-48": 48,
    "mi300x-192": 192,
    "rtx3090-24": 24,
    "rtx4090-24": 24,
    "t4-16": 16,
    "v100-16": 16,
    "v100-32": 32,
}
SOURCE = "data sheets of the makers, 2025"


def memory_bytes(name: str) -> int:
    """Memory of a device by name. A name without its size will do where there is one size only.

    Raises: ConfigError, with the nearest name.
    """
    known = name.lower()
    alike = [full for full in MEMORY_GB if full == known or full.rpartition("-")[0] == known]
    if len(alike) == 1:
        return MEMORY_GB[alike[0]] * 10**9
    if alike:
        raise ConfigError(f"--gpu: {name} has several sizes; name one of {', '.join(alike)}")
    near = did_you_mean(known, MEMORY_GB, "{}")
    raise ConfigError(
        f"--gpu: expected one of {', '.join(MEMORY_GB)}, got {name[:40]!r}{near}; --memory 80GiB gives any other"
    )
