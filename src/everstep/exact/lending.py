"""Autograd adds a lane's gradients to its sibling's sum, instead of keeping both and adding them afterwards.

The addition is the same only if autograd adds to a parameter's `.grad` once per lane. That is the rule. A reentrant
backward pass (activation checkpointing of the old kind) can break it, so the first lane is watched, and every loan is
checked when it comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from everstep.base.errors import TaskError
from everstep.base.ports import Node


class GradientWatch:
    """Counts the additions to each parameter's `.grad` in a lane."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._counts = [0] * len(params)
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._count, i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(params)
        ]

    def _count(self, i: int, _: Tensor) -> None:
        self._counts[i] += 1

    def clear(self) -> None:
        self._counts[:] = [0] * len(self._counts)

    def end(self) -> set[int]:
        """Stop watching; returns the parameters that were added to more than once."""
        for hook in self._hooks:
            hook.remove()
        return {i for i, count in enumerate(self._counts) if count > 1}


@dataclass(frozen=True)
class Loan:
    """The sum of `sibling`, put into `.grad` while the lane that completes `parent` with it is computed.

    leaf: the whole sum. lent: its lent tensors, by parameter. versions: autograd's counters of changes, before.
    """

    sibling: Node
    parent: Node
    leaf: list[Tensor | None]
    lent: list[Tensor | None]
    versions: list[int]

    def check_returned(self, gradients: Sequence[Tensor | None], name: Callable[[int], str]) -> None:
        """Check the loan. gradients: present content of `.grad`. name: gives a parameter's name.

        Raises: TaskError if a lent tensor was replaced, or was written to more than once.
        """
        for i, (lent, gradient) in enumerate(zip(self.lent, gradients, strict=True)):
            if lent is not None and (gradient is not lent or gradient._version > self.versions[i] + 1):
                raise TaskError(written_twice(name(i)))


def written_twice(name: str) -> str:
    """Message for a gradient that changed when it should be final."""
    return (
        f"the gradient of {name} was written more than once for one batch; call step.backward(loss) "
        "once, leave .grad alone, and use use_reentrant=False for activation checkpointing"
    )
