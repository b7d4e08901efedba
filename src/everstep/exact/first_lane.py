"""A node's first lane while its backward pass runs: its gradients move into the node's memory one by one.

Each moves as soon as autograd has finished it, while it is in the processor's cache. So the lane's gradients never lie
side by side in memory of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn


class FirstLane:
    """A node's first lane, from `enter` to `add`.

    Gradients of another dtype, layout or device than the node's stay where they are; `add` takes them.
    """

    def __init__(self, params: Sequence[nn.Parameter], views: Sequence[Tensor], late: set[int]) -> None:
        """views: places of the gradients in the node's memory, by parameter. late: parameters that do not move."""
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(_move, views[i]))  # type: ignore[no-untyped-call]
            for i, p in enumerate(params)
            if i not in late and p.requires_grad
        ]

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _move(view: Tensor, parameter: Tensor) -> None:
    gradient = parameter.grad
    if gradient is None or gradient is view or gradient.layout is not torch.strided:
        return
    if gradient.dtype == view.dtype and gradient.stride() == view.stride() and gradient.device == view.device:
        with torch.no_grad():
            view.copy_(gradient)
        parameter.grad = view
