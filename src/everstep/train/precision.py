"""Devices, autocast and loss scaling, such that the bits do not depend on placement.

Autocast's weight cache is off: with it, the gradients of shared weights depend on what ran before in the context.
The loss scaler's state is part of the training state and advances in the update, from the records alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from everstep.base.config import Config, device_of
from everstep.base.errors import ConfigError
from everstep.exact.lazy_dynamo import use_deterministic_algorithms
from everstep.exact.working_copies import WorkingCopies

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def type_of(name: str) -> torch.dtype:
    """torch's type of this name in the config."""
    return _DTYPES[name]


@contextlib.contextmanager
def computing(config: Config, device: torch.device, units: Sequence[nn.Module]) -> Iterator[WorkingCopies | None]:
    """A fresh context for one lane's forward pass through these units; its target is their copies, if they have any."""
    types = config.cell.types
    copies = WorkingCopies(units, _DTYPES[types.parameters], _DTYPES[types.buffers]) if types.narrow else None
    with copies or contextlib.nullcontext(), autocast(config.precision, device):
        yield copies


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """A fresh context in which torch computes with this precision where that is safe."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision], cache_enabled=False)


class LossScaler:
    """Dynamic loss scaling: halve on overflow and skip that update, double after `growth_interval` good ones.

    Source: Micikevicius et al., Mixed Precision Training (2018), section 3.2; constants as in torch.amp.GradScaler.
    """

    growth_interval = 2000

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = 65536.0 if enabled else 1.0
        self.good_steps = 0

    def advance(self, finite: bool) -> bool:
        """Take note of a step; returns whether its update is applied."""
        if not self.enabled:
            return True
        if not finite:
            self.scale = max(self.scale * 0.5, 2.0**-24)
            self.good_steps = 0
            return False
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale = min(self.scale * 2.0, 2.0**32)
            self.good_steps = 0
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])


def resolve_device(name: str) -> torch.device:
    """The device of this name. Raises: ConfigError if torch does not know it or it is not there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be 'cpu' or 'cuda[:N]', got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {name!r} was asked for, but torch {torch.__version__} sees no CUDA device: --set device=cpu"
        )
    if device.index is not None and device.type == "cuda" and device.index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ConfigError(
            f"device {name!r} was asked for, but the last CUDA device here is cuda:{last}; use one of them"
        )
    return device


def prepare_torch(config: Config, worker_id: int = 0, cell_rank: int = 0) -> torch.device:
    """Set up threads and determinism of this process; returns the device of this rank of a worker.

    Raises: ConfigError if it is not there.
    """
    torch.set_num_threads(config.threads)
    torch.backends.cudnn.benchmark = False
    use_deterministic_algorithms()
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    device = resolve_device(device_of(config, worker_id, cell_rank))
    if device.index is not None:
        torch.cuda.set_device(device)
    return device
