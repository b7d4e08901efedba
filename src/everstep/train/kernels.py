"""The numerics fingerprint of this process: the bits of fixed small kernels, and words.

Inputs are an arithmetic pattern and nothing is set, so generators, flags and thread counts stay as they were.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from everstep.exact.digest import digest_bytes
from everstep.protocol.identity import Kernels

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LIBRARIES = {"mkl": r"Math Kernel Library Version ([\w.]+)", "onednn": r"MKL-DNN v([\w.]+)"}
_NARROWED = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")


@functools.cache
def kernels_of(precision: str, device: torch.device, threads: int) -> Kernels:
    """Fingerprint of this process, computed once. threads: torch's setting; precision: the config's."""
    found = [_bits(kernel) for kernel in _kernels(_LOW.get(precision, torch.float32), device)]
    return Kernels(digest_bytes(b"".join(found)), _words(device), threads, _versions(device))


def _bits(kernel: Callable[[], Tensor]) -> bytes:
    """Bytes of a kernel's result; the error's name if this torch lacks the kernel."""
    try:
        with torch.no_grad():
            return kernel().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    except RuntimeError as error:
        return type(error).__name__.encode()


def _kernels(low: torch.dtype, device: torch.device) -> Iterator[Callable[[], Tensor]]:
    """Kernels in which training spends its time, each large enough for vectors of all widths to give different sums.
    low: type of matrix products, convolutions and attention."""
    # 2654435761 / 2^32 is the golden ratio: no two numbers alike, all of them exact in float32.
    pattern = (np.arange(1 << 15, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(8)).astype(np.float32)
    source = torch.from_numpy(pattern / np.float32(1 << 23) - np.float32(1)).to(device)

    def some(at: int, *shape: int, dtype: torch.dtype = low) -> Tensor:
        return source[at : at + int(np.prod(shape))].reshape(shape).to(dtype, copy=True)

    rows, grown = some(5, 16, 387, dtype=torch.float32), some(1009, 9973, dtype=torch.float32)
    for at, m, k, n in ((0, 48, 192, 48), (96, 7, 333, 45), (160, 1, 512, 40)):
        yield lambda at=at, m=m, k=k, n=n: torch.mm(some(at, m, k), some(at + 31, k, n))  # type: ignore[misc]
    image, filters, slope = some(64, 2, 8, 12, 12), some(3, 16, 8, 3, 3), some(7, 2, 16, 12, 12)
    yield lambda: functional.conv2d(image, filters, padding=1)
    for own in (0, 1):
        yield lambda own=own: torch.ops.aten.convolution_backward(  # type: ignore[misc]
            *(slope, image, filters, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [own == 0, own == 1, False])
        )[own]
    yield lambda: functional.layer_norm(rows, (387,))
    yield lambda: torch.softmax(rows * 4, -1)
    query, key, value = some(11, 1, 2, 33, 32), some(13, 1, 2, 33, 32), some(17, 1, 2, 33, 32)
    yield lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    yield lambda: torch.cat([rows.square().sum(0), grown.sum().reshape(1), grown.exp().mean().reshape(1)])
    mean, square = grown.flip(0), grown.square()
    yield lambda: grown.addcdiv(mean.lerp(grown, 0.1), square.mul(0.999).sqrt().add(1e-8), value=-1e-3)


def _words(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)[:200]
    name = platform.machine()
    with suppress(OSError), open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), name)
    narrowed = [f"{key}={os.environ[key]}" for key in _NARROWED if os.environ.get(key)]
    return ", ".join([f"{name} by {torch.backends.cpu.get_cpu_capability()}", *narrowed])[:200]


def _versions(device: torch.device) -> dict[str, str]:
    said, found = torch.__config__.show(), {"torch": str(torch.__version__)}
    for name, pattern in _LIBRARIES.items():
        match = re.search(pattern, said)
        found |= {name: match[1]} if match else {}
    if device.type == "cuda":
        found |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
    return {name: text[:100] for name, text in found.items()}
