"""Memory and load of this host's GPUs, from NVIDIA's management library; without it, or a GPU, there are none."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Device:
    """One GPU. `index` as in nvidia-smi; used_share: 0 to 1, of the time in which a kernel ran, None where unknown."""

    index: int
    memory_used_bytes: int
    memory_total_bytes: int
    used_share: float | None


def devices() -> list[Device]:
    """All GPUs as they are now; a few ms."""
    nvml = _library()
    if nvml is None:
        return []
    found = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            found.append(_device(nvml, index))
    except nvml.NVMLError:  # a driver that is being replaced, a GPU that fell off the bus
        return found
    return found


def _device(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        used_share = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError:  # not told of a GPU that is cut into instances
        used_share = None
    return Device(index, int(memory.used), int(memory.total), used_share)


@functools.cache
def _library() -> Any:
    """pynvml with an open connection to the driver, None where there is none."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
