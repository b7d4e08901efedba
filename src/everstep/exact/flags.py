"""Process-wide flags of torch that the bits of a step depend on: read, and set again.

Apart because it is a table. Getters of `torch._C` are used where they exist: they take a tenth of the time, and they
are called in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from everstep.base.errors import CheckpointCorrupt

_C = torch._C
_BY_NAME = ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "mkldnn_enabled", "mkldnn_deterministic")
_PRECISIONS = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"), ("mkldnn", "conv"))
_LEGACY = ("cublas_allow_tf32", "cudnn_allow_tf32")
_KERNELS = ("flash", "mem_efficient", "math", "cudnn")

_LEAST = [5e-324, 1.0]
"""The least number above 0, which is none where such numbers are flushed."""

_Access = tuple[Callable[[], Any], Callable[[Any], Any]]


def _table() -> dict[str, _Access]:
    table: dict[str, _Access] = {
        "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "deterministic_debug_mode": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        "flush_denormal": (lambda: _LEAST[0] * _LEAST[1] == 0.0, torch.set_flush_denormal),
        "grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
        "num_threads": (torch.get_num_threads, torch.set_num_threads),
    }
    pairs = [(name, f"_get_{name}", f"_set_{name}") for name in _BY_NAME]
    pairs += [(f"sdp_{name}", f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in _KERNELS]
    if hasattr(_C, "_get_fp32_precision_getter"):
        for backend, kind in _PRECISIONS:
            get = partial(_C._get_fp32_precision_getter, backend, kind)
            table[f"{backend}_{kind}_fp32_precision"] = get, partial(_C._set_fp32_precision_setter, backend, kind)
    else:
        pairs += [(name, f"_get_{name}", f"_set_{name}") for name in _LEGACY]
        table["float32_matmul_precision"] = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    for name, of, to in pairs:
        if hasattr(_C, of) and hasattr(_C, to):
            table[name] = getattr(_C, of), getattr(_C, to)
    return table


_TABLE = _table()
NAMES = tuple(_TABLE)
_GETTERS = tuple(get for get, _ in _TABLE.values())


def read() -> tuple[Any, ...]:
    """Present values of the flags, in the order of `NAMES`."""
    return tuple([get() for get in _GETTERS])


def write(values: Mapping[str, Any]) -> None:
    """Set flags by name. Raises: CheckpointCorrupt for an unknown name or a wrong value."""
    for name, value in values.items():
        try:
            get, put = _TABLE[name]
            if type(value) is not type(get()):
                raise TypeError(f"expected a {type(get()).__name__}")
            put(value)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointCorrupt(f"flag {name[:80]!a} of torch cannot be {value!r:.80}: {error}") from None


def autocast() -> tuple[bool, ...]:
    """Whether autocast is on, by device. Not restored: autocast that is left on keeps hidden casts of weights."""
    return tuple(map(torch.is_autocast_enabled, ("cpu", "cuda")))
