"""From the reduced sums to the optimizer's input: normalised gradients, and the running statistics of the step.

Apart because the kept reduced gradient is never modified: a step can be redone from it as often as needed.

One rule of normalisation for all topologies: the gradient is multiplied once, element by element in float32, by
float32(factor), where factor = clip / (weight * loss_scale) is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from everstep.base.errors import check
from everstep.base.ports import Reduced
from everstep.exact.layout import GradientLayout
from everstep.exact.reduce import Tied, TiePlace, gather

_CLIP_EPSILON = 1e-6


def gradient_norm(total_sumsq: float, scale: float) -> float:
    """Norm of the normalised gradient. total_sumsq: of the unnormalised one; scale: 1 / (weight * loss_scale)."""
    return math.sqrt(total_sumsq) * scale if total_sumsq >= 0 else math.nan


def clip_factor(total_sumsq: float, scale: float, clip_norm: float | None) -> float:
    """Factor for `scale` so that the norm is at most `clip_norm`; 1.0 without clipping, NaN for a NaN norm.

    Source: torch.nn.utils.clip_grad_norm_, min(1, clip_norm / (norm + 1e-6)), here in float64.
    """
    if clip_norm is None:
        return 1.0
    norm = gradient_norm(total_sumsq, scale)
    return math.nan if math.isnan(norm) else min(1.0, clip_norm / (norm + _CLIP_EPSILON))


class GradientHandOver:
    """Puts normalised gradients into `.grad` of the first leaf of every parameter, in private memory made once."""

    def __init__(self, layout: GradientLayout, model: nn.Module, ties: Sequence[Tied] = ()) -> None:
        """`layout` was built from this very model, after `untie`. ties: parameters with places in other stages, too."""
        by_name = dict(model.named_parameters(remove_duplicate=False))
        self.layout = layout
        self._params: dict[int, nn.Parameter] = {i: by_name[layout.entries[i].name] for i in layout.params}
        self._ties = tuple(ties)
        apart = {place.entry for tied in ties for place in tied.places}
        self._later = [(i, e.tied_to) for i, e in enumerate(layout.entries) if e.tied_to >= 0 and i not in apart]
        self._sums: dict[str, Tensor] = {}
        self._flat: Tensor | None = None
        self._views: dict[int, Tensor] = {}
        self._converted: dict[int, Tensor] = {}
        statistics = {i: layout.entries[i].name.rpartition(".") for i in layout.buffers}
        self._statistics = [(i, model.get_submodule(owner), name) for i, (owner, _, name) in statistics.items()]

    def hand_over(
        self, reduced: Reduced, scale: float, received: Mapping[TiePlace, Tensor | None] | None = None
    ) -> None:
        """Set `.grad` of every parameter to reduced * float32(scale), in the parameter's dtype.

        received: the reduced gradients of tied parameters at their places in other stages, flat, None where absent.

        Parameters that no lane had a gradient for get None; places of use of one parameter are added up in unit order,
        after the multiplication. The gradients stay valid until the next call.
        """
        check(len(reduced.presence) == len(self.layout.entries), "the presence is not of this layout")
        ends = [0, *(end for piece in reduced.pieces for end in (piece.start, piece.stop)), self.layout.numel]
        check(ends[::2] == ends[1::2], f"expected all of a gradient of {self.layout.numel} elements, got {ends[1:-1]}")
        with torch.no_grad():
            flat = self._memory()
            for piece in reduced.pieces:
                place = flat[piece.start : piece.stop]
                if piece.data.device == place.device:
                    torch.mul(piece.data, scale, out=place)
                else:  # reduced in host memory, for a model on a device
                    place.copy_(piece.data).mul_(scale)
            present = self._join_places(reduced.presence)
            if self._converted:
                narrow = [i for i in self._converted if present[i]]
                torch._foreach_copy_([self._converted[i] for i in narrow], [self._views[i] for i in narrow])
            for i, parameter in self._params.items():
                parameter.grad = self._converted.get(i, self._views[i]) if present[i] else None
            for tied in self._ties:
                self._join_stages(tied, flat, scale, reduced.presence, received or {})

    def clear(self) -> None:
        """Take the gradients away, so that the next lane's are autograd's own tensors."""
        for parameter in self._params.values():
            parameter.grad = None
        for tied in self._ties:
            tied.parameter.grad = None

    def commit_statistics(self, reduced: Reduced) -> None:
        """Set the running statistics to their mean over the lanes that changed them; leave others as they are.

        The model's statistics must be those that the step started from (`BufferGuard.commit` sees to that).
        """
        with torch.no_grad():
            for i, module, attribute in self._statistics:
                if not reduced.presence[i]:
                    continue
                entry = self.layout.entries[i]
                total = gather(reduced, entry.offset, entry.stop)
                count = float(total[-1])
                if count:
                    statistic: Tensor = getattr(module, attribute)
                    statistic.copy_(torch.div(total[:-1], count).view(entry.shape))

    def _memory(self) -> Tensor:
        if self._flat is None:
            device = next((p.device for p in self._params.values()), torch.device("cpu"))
            self._flat = torch.zeros(self.layout.numel, dtype=torch.float32, device=device)
            for i, parameter in self._params.items():
                entry = self.layout.entries[i]
                self._views[i] = entry.view(self._flat)
                if parameter.dtype != torch.float32 and entry.tied_to < 0:
                    self._converted[i] = torch.empty_like(self._views[i], dtype=parameter.dtype)
        return self._flat

    def _join_stages(
        self, tied: Tied, flat: Tensor, scale: float, presence: bytes, received: Mapping[TiePlace, Tensor | None]
    ) -> None:
        """`_join_places`, in the same order, with places of other stages, too."""
        entry = self.layout.entries[tied.own[0].entry]
        total: Tensor | None = None
        for place in tied.places:
            if place.entry >= 0:
                here = self.layout.entries[place.entry]
                value = flat[here.offset : here.stop] if presence[place.entry] else None
                self._params[place.entry].grad = None
            else:
                check(place in received, f"the gradient of {tied.name} at unit {place.unit} has not been received")
                theirs = received[place]
                value = None if theirs is None else torch.mul(theirs, scale)
            if value is None:
                continue
            if total is None:
                total = self._sums.setdefault(tied.name, torch.empty_like(value)).copy_(value)
            else:
                total.add_(value)
        grad = None if total is None else total.as_strided(entry.shape, entry.stride)
        tied.parameter.grad = grad if grad is None else grad.to(tied.parameter.dtype)

    def _join_places(self, presence: bytes) -> bytes | bytearray:
        if not self._later:
            return presence
        present = bytearray(presence)
        for i, first in self._later:
            if present[i]:
                if present[first]:
                    self._views[first].add_(self._views[i])
                else:
                    self._views[first].copy_(self._views[i])
                    present[first] = 1
                present[i] = 0  # the optimizer sees the first leaf only
        return present
