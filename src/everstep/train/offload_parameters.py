"""Parameters and gradients in files (`zero.offload_params`), so that a model may be larger than the memory.

The files are memory-mapped, like that of the optimizer's state: the kernel reads and writes pages as they are used. A
parameter moves as soon as a module gets it, before it is initialised, so that the model is built in little memory, too.
Hooks read the next unit's parameters ahead, and let go of what was in use whenever that is `_AT_ONCE_BYTES`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from everstep.base.config import Config
from everstep.exact.accumulate import give_freed_memory_back
from everstep.exact.layout import dense_stride
from everstep.parallel.mapping import let_files_go
from everstep.train.offload import StateFile

_AT_ONCE_BYTES = 1 << 26


class ModelFile(StateFile):
    """For parameters, the optimizer's state and copies of both."""

    def let_go(self) -> None:
        super().let_go()
        let_files_go()
        give_freed_memory_back()


class ParameterFiles:
    """Where a process has its parameters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._owner = self._used = 0
        self._memory: StateFile | None = None

    @property
    def memory(self) -> StateFile:
        """This process's file: a fork of it has one of its own. Raises: ConfigError if none can be written."""
        if self._memory is None or self._owner != os.getpid():
            self._owner, self._memory = os.getpid(), ModelFile(self.folder)
        return self._memory

    def take(self, parameter: Tensor) -> None:
        """Move a parameter there, with its content and strides. Raises: ConfigError if the disk is full."""
        there = not is_lazy(parameter) and parameter.layout is torch.strided and parameter.device.type == "cpu"
        if there and dense_stride(parameter) == tuple(parameter.stride()) and self.memory.lacks(parameter):
            with torch.no_grad():
                parameter.data = self.memory.make(parameter).copy_(parameter)
            self._use(parameter.nbytes)

    def watch(self, units: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> None:
        """From now on let go of what passes through these units, and their gradients, have used."""
        own = [[p.data for p in unit.parameters()] for unit in units]
        for unit, now, then in zip(units, own, [*own[1:], []], strict=True):
            unit.register_forward_pre_hook(partial(self._enter, sum(t.nbytes for t in now), then))
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """A module gets a parameter."""
        if type(parameter) is nn.Parameter:
            self.take(parameter)

    def _enter(self, nbytes: int, then: Sequence[Tensor], *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._use(nbytes)
            for tensor in then:
                self.memory.ahead(tensor)

    def _accumulated(self, parameter: Tensor) -> None:
        self._use(2 * parameter.nbytes)

    def _use(self, nbytes: int) -> None:
        self._used += nbytes
        if self._used >= _AT_ONCE_BYTES:
            self._used = 0
            self.memory.let_go()


def parameter_files(config: Config) -> ParameterFiles | None:
    """Those of this job; None if parameters lie in memory."""
    where = config.zero.offload
    return _files(where) if config.zero.offload_params and where not in (None, "cpu") else None


@cache
def _files(folder: str) -> ParameterFiles:
    return ParameterFiles(Path(folder))


def build_in_files(config: Config) -> None:
    """From now on a parameter moves into the job's file when a module gets it."""
    files = parameter_files(config)
    if files is not None:
        register_module_parameter_registration_hook(files.registered)
