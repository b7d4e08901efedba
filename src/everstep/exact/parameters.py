"""Parameters change in updates alone: code that writes to one while a lane is computed is found and refused by name.

Apart because of such a lane's effect: if it changes a parameter (`max_norm` of an embedding, a clamp in `forward`, an
optimizer in a hook), only the lanes that the same worker computes after it see the change, so the result would depend
on placement.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from everstep.base.errors import Misused
from everstep.exact.digest import tensor_digest


class ParameterWatch:
    """Watches the parameters of some modules: `begin_step`, then `look` after a lane's passes.

    Writes behind the version counter (through `.data`) are seen in the first lane alone.
    """

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module]) -> None:
        names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        self._own = list(modules)
        found = {id(p): p for module in self._own for p in module.parameters()}
        self._named = [(names.get(key, "?"), p) for key, p in found.items()]
        self._frozen = {key for key, p in found.items() if not p.requires_grad}
        self._versions: list[int] = []
        self._digests: list[str] | None = None
        self._looked = False

    def begin_step(self) -> None:
        self._versions = [_version(p) for _, p in self._named]
        if not self._looked:
            self._digests = [tensor_digest(p) for _, p in self._named]

    def look(self) -> None:
        """Check the parameters. Raises: Misused naming one that was changed or made, or has another gradient."""
        for (name, parameter), version in zip(self._named, self._versions, strict=False):
            if _version(parameter) != version:
                raise changed_in_lane(name)
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise Misused(f"parameter {name} has a sparse gradient, which is not summed exactly: use sparse=False")
            if parameter.requires_grad and id(parameter) in self._frozen:
                raise Misused(
                    f"parameter {name} did not require a gradient when training began, but does now: let it require "
                    "one from the start, and set the learning rate of its group to 0 while it should not change"
                )
        if self._digests is not None:
            self._looked, digests, self._digests = True, self._digests, None
            self._check_digests(digests)

    def _check_digests(self, digests: list[str]) -> None:
        for (name, parameter), digest in zip(self._named, digests, strict=True):
            if tensor_digest(parameter) != digest:
                raise changed_in_lane(name)
        known = {id(p) for _, p in self._named}
        for module in self._own:
            for name, parameter in module.named_parameters():
                if id(parameter) not in known:
                    raise Misused(
                        f"parameter {name} ({type(module).__name__}) was made in the forward pass: make it in "
                        "__init__, so that the optimizer and every other worker have it"
                    )


def changed_in_lane(name: str) -> Misused:
    """Why a write to a parameter is refused while a lane is computed."""
    return Misused(
        f"parameter {name} was changed while a batch was computed (for example by max_norm, a write in forward, or an "
        "optimizer in a hook), so later batches would see the change: change it between steps, or in the optimizer"
    )


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
