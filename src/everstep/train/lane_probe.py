"""See whether a part of a split model is deterministic: its first lane, computed twice, must give the same bits.

Apart from `part_pass` because it is about what to compare, and about inputs that must still be there for a second time.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from everstep.base.errors import DeterminismError
from everstep.exact.digest import named_digest
from everstep.exact.trees import Bundle, faithful_clone

_WHY = (
    "the model or the loss uses an operation or a random source that is not deterministic (one seeded by time or by "
    "os.urandom, say); use torch's, numpy's or random's global generators"
)


class LaneProbe:
    """What the first of the two computations gave. where: the stage, for the error. inputs: of the lane; copied, for
    the first computation may change them."""

    def __init__(self, where: str, step: int, lane: int, inputs: Bundle | None) -> None:
        self._what = f"lane {lane} of step {step} was computed twice in {where}"
        self.step = step
        self.inputs = None if inputs is None else copied(inputs)
        self._forward = self._backward = ""

    def forward(self, units: Sequence[nn.Module], outputs: Sequence[Tensor], loss: str) -> None:
        """The first forward pass is over. loss: its value as text, at the last part."""
        self._forward = self._left(units, outputs, loss)

    def backward(self, units: Sequence[nn.Module], found: Sequence[Tensor | None]) -> None:
        """The first backward pass is over. found: gradients of what came in."""
        self._backward = self._gradients(units, found)

    def compare_forward(self, units: Sequence[nn.Module], outputs: Sequence[Tensor], loss: str) -> None:
        """Raises: DeterminismError unless the second forward pass gave the same."""
        if self._left(units, outputs, loss) != self._forward:
            raise DeterminismError(f"{self._what} and gave different outputs or buffers: {_WHY}")

    def compare_backward(self, units: Sequence[nn.Module], found: Sequence[Tensor | None]) -> None:
        """Raises: DeterminismError unless the second backward pass gave the same."""
        if self._gradients(units, found) != self._backward:
            raise DeterminismError(f"{self._what} and gave different gradients: {_WHY}")

    @staticmethod
    def _left(units: Sequence[nn.Module], outputs: Sequence[Tensor], loss: str) -> str:
        named = [(f"buffer {k} {n}", b) for k, unit in enumerate(units) for n, b in unit.named_buffers()]
        named += [(f"output {k}", t) for k, t in enumerate(outputs)]
        return f"{named_digest(named)} {loss}"

    @staticmethod
    def _gradients(units: Sequence[nn.Module], found: Sequence[Tensor | None]) -> str:
        named = [
            (f"grad {k} {n}", p.grad)
            for k, unit in enumerate(units)
            for n, p in unit.named_parameters()
            if p.grad is not None
        ]
        named += [(f"input {k}", t) for k, t in enumerate(found) if t is not None]
        return named_digest(named)


def copied(parcel: Bundle) -> Bundle:
    """The same in memory of its own."""
    wants = [t.requires_grad for t in parcel.tensors]
    tensors = [faithful_clone(t).requires_grad_(w) for t, w in zip(parcel.tensors, wants, strict=True)]
    return Bundle(tensors, parcel.meta)
