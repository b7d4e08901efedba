"""Number of accelerators of this host, without importing any library for them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from everstep.base.errors import ConfigError

_NODES = Path("/dev")
_NODE = re.compile(r"nvidia[0-9]+")


def device_count(environ: Mapping[str, str] = os.environ, nodes: Path = _NODES) -> int:
    """Number of devices that CUDA would show this process, 0 if there are none."""
    try:
        found = sum(_NODE.fullmatch(name) is not None for name in os.listdir(nodes))
    except OSError:
        found = 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else min(found, len([one for one in visible.split(",") if one.strip(" -1")]))


def default_slots() -> int:
    """Default number of workers of a host: one per device, or one."""
    return max(1, device_count())


def check_slots(device: str, slots: int) -> None:
    """device: the job's. slots: workers to run on this host, 0 if the user gave no number.

    Raises: ConfigError if there are too few devices for them.
    """
    if device.partition(":")[0] != "cuda":
        return
    devices = device_count()
    if devices == 0:
        raise ConfigError(f"device: the job computes on {device}, and this host has no such device")
    if slots > devices:
        raise ConfigError(f"--slots: expected at most {devices}, one for each device of this host, got {slots}")
