"""From the reduced sums to the optimizer's input: normalised gradients, and the running statistics of the step.

Apart because the kept reduced gradient is never modified: a step can be redone from it as often as needed.

One rule of normalisation for all topologies: the gradient is multiplied once, element by element in float32, by
float32(factor), where factor = clip / (weight * loss_scale) is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from everstep.base.errors import check
from everstep.base.ports import Reduced
from everstep.exact.layout import GradientLayout
from everstep.exact.pieces import Ranges
from everstep.exact.reduce import Tied, TiePlace, elements_of, parts_of
from everstep.exact.state_memory import Pages, give_back

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
    """Puts normalised gradients into `.grad` of the first leaf of every parameter.

    Their memory lives from `hand_over` to `clear`: it is what the lanes' gradients have left free.
    """

    def __init__(self, layout: GradientLayout, model: nn.Module, ties: Sequence[Tied] = ()) -> None:
        """`layout` was built from this very model, after `untie`. ties: parameters with places in other stages, too."""
        by_name = dict(model.named_parameters(remove_duplicate=False))
        self.layout = layout
        self._params: dict[int, nn.Parameter] = {i: by_name[layout.entries[i].name] for i in layout.params}
        self._ties = tuple(ties)
        self._parts = Pages(layout.numel)
        apart = {place.entry for tied in ties for place in tied.places}
        self._later = [(i, e.tied_to) for i, e in enumerate(layout.entries) if e.tied_to >= 0 and i not in apart]
        statistics = {i: layout.entries[i].name.rpartition(".") for i in layout.buffers}
        joined = {*apart, *chain.from_iterable(self._later)}
        self._alone: dict[Tensor, int] = {p: i for i, p in self._params.items() if i not in joined}
        self._due: tuple[Reduced, float, float | None] | None = None
        self._given: list[Tensor] = []
        self._statistics = [(i, model.get_submodule(owner), name) for i, (owner, _, name) in statistics.items()]

    def present(
        self, reduced: Reduced, received: Mapping[TiePlace, Tensor | None] | None = None
    ) -> frozenset[nn.Parameter]:
        """Parameters that `hand_over` gives a gradient."""
        firsts = dict(self._later)
        there = {firsts.get(i, i) for i in self._params if reduced.presence[i]}
        found = {self._params[i] for i in there}
        for tied in self._ties:
            places = {self._params[place.entry] for place in tied.own}
            if places & found or any((received or {}).get(place) is not None for place in tied.places):
                found = (found - places) | {tied.parameter}
        return frozenset(found)

    def hand_over(
        self,
        reduced: Reduced,
        scale: float,
        received: Mapping[TiePlace, Tensor | None] | None = None,
        wanted: Ranges | None = None,
        limit: float | None = None,
        later: bool = False,
    ) -> None:
        """Set `.grad` of every parameter to reduced * float32(scale), in the parameter's dtype.

        received: the reduced gradients of tied parameters at their places in other stages, flat, None where absent.
        wanted: ranges of elements of these parameters; the other elements of their gradients are undefined then. limit:
        of each element's absolute value. later: elements are undefined until `give`, where a parameter has one place.

        Parameters that no lane had a gradient for get None; places of use of one parameter are added up in unit order,
        after the multiplication. The gradients stay valid until `clear`. Raises: InvariantViolation if elements that
        are wanted are not here.
        """
        check(len(reduced.presence) == len(self.layout.entries), "the presence is not of this layout")
        if wanted is None:
            ends = [0, *(end for piece in reduced.pieces for end in (piece.start, piece.stop)), self.layout.numel]
            whole = ends[::2] == ends[1::2]
            check(whole, f"expected all of a gradient of {self.layout.numel} elements, got {ends[1:-1]}")
        self._due = (reduced, scale, limit) if later else None
        with torch.no_grad():
            gradients = self._normalised(reduced, scale, wanted or {})
            self._join_places(gradients)
            tied = [self._join_stages(one, gradients, scale, received or {}) for one in self._ties]
            for i, parameter in self._params.items():
                bound = None if self._comes_later(parameter) else limit
                parameter.grad = _as_given(gradients.pop(i, None), parameter, bound)
            for one, gradient in zip(self._ties, tied, strict=True):
                one.parameter.grad = _as_given(gradient, one.parameter, limit)

    def give(self, wanted: Ranges) -> None:
        """Put these elements into the gradients that come later, and give back the memory of those of the call before.
        Raises: InvariantViolation if elements are not here."""
        for flat in self._given:
            give_back(flat, ())
        self._given = []
        if self._due is None:
            return
        reduced, scale, limit = self._due
        for parameter, ranges in wanted.items():
            i = self._alone.get(parameter, -1)
            if not self._comes_later(parameter) or not reduced.presence[i]:
                continue
            at = self.layout.entries[i].offset
            for first, stop in ranges:
                self._given.append(self._parts.flat[at + first : at + stop])
                with torch.no_grad():
                    self._fill(reduced, scale, at + first, self._given[-1])
                    if limit is not None:
                        self._given[-1].clamp_(-limit, limit)

    def _comes_later(self, parameter: Tensor) -> bool:
        """Whether `give` puts its elements into its gradient."""
        plain = parameter.dtype == torch.float32 and parameter.device.type == "cpu"
        return self._due is not None and plain and parameter in self._alone

    @staticmethod
    def _fill(reduced: Reduced, scale: float, start: int, flat: Tensor) -> None:
        """The elements from `start` on of the reduced gradient times `scale`."""
        for at, part in parts_of(reduced, start, start + flat.numel()):
            flat[at - start : at - start + part.numel()].copy_(part).mul_(scale)

    def clear(self) -> None:
        """Take the gradients away, so that the next lane's are autograd's own tensors."""
        for parameter in self._params.values():
            parameter.grad = None
        for tied in self._ties:
            tied.parameter.grad = None
        self._due, self._given = None, []
        self._parts.clear()

    def commit_statistics(self, reduced: Reduced) -> None:
        """Set the running statistics to their mean over the lanes that changed them; leave others as they are.

        The model's statistics must be those that the step started from (`BufferGuard.commit` sees to that).
        """
        with torch.no_grad():
            for i, module, attribute in self._statistics:
                if not reduced.presence[i]:
                    continue
                entry = self.layout.entries[i]
                total = elements_of(reduced, entry.offset, entry.stop)
                count = float(total[-1])
                if count:
                    statistic: Tensor = getattr(module, attribute)
                    statistic.copy_(torch.div(total[:-1], count).view(entry.shape))

    def _normalised(self, reduced: Reduced, scale: float, wanted: Ranges) -> dict[int, Tensor]:
        """The gradients that are present times `scale`, in float32, by entry; in the parameters' shapes and strides."""
        found: dict[int, Tensor] = {}
        within: dict[int, Tensor] = {}
        for i, parameter in self._params.items():
            if not reduced.presence[i]:
                continue
            entry = self.layout.entries[i]
            ranges = wanted.get(parameter, ((0, entry.numel),))
            piece = next((p for p in reduced.pieces if entry.offset < p.stop or not entry.numel), None)
            whole = piece is not None and piece.start <= entry.offset and entry.stop <= piece.stop
            later = self._comes_later(parameter)
            if (
                piece is not None
                and whole
                and not later
                and piece.data.device == parameter.device
                and _is_all(ranges, entry.numel)
            ):
                at = piece.data.storage_offset() + entry.offset - piece.start
                within[i] = piece.data.as_strided(entry.shape, entry.stride, at)
            else:  # some of it, in several pieces, or reduced in host memory for a model on a device
                if parameter.device.type == "cpu":
                    flat = self._parts.flat[entry.offset : entry.offset + entry.numel]
                else:
                    flat = torch.empty(entry.numel, dtype=torch.float32, device=parameter.device)
                for first, stop in () if later else ranges:
                    self._fill(reduced, scale, entry.offset + first, flat[first:stop])
                found[i] = flat.as_strided(entry.shape, entry.stride, flat.storage_offset())
        if within:
            found |= zip(within, torch._foreach_mul([*within.values()], scale), strict=True)
        return found

    def _join_stages(
        self, tied: Tied, gradients: dict[int, Tensor], scale: float, received: Mapping[TiePlace, Tensor | None]
    ) -> Tensor | None:
        """`_join_places`, in the same order, with places of other stages, too; takes those of this stage out."""
        entry = self.layout.entries[tied.own[0].entry]
        total: Tensor | None = None
        for place in tied.places:
            if place.entry >= 0:
                value = gradients.pop(place.entry, None)
            else:
                check(place in received, f"the gradient of {tied.name} at unit {place.unit} has not been received")
                theirs = received[place]
                value = None if theirs is None else torch.mul(theirs, scale).as_strided(entry.shape, entry.stride)
            total = value if total is None else total if value is None else total.add_(value)
        return total

    def _join_places(self, gradients: dict[int, Tensor]) -> None:
        """Add up the places of one parameter into the first one, of which alone the optimizer has the leaf."""
        for i, first in self._later:
            value = gradients.pop(i, None)
            if value is not None:
                gradients[first] = gradients[first].add_(value) if first in gradients else value


def _as_given(gradient: Tensor | None, parameter: Tensor, limit: float | None) -> Tensor | None:
    """The gradient within the limit, in the parameter's dtype."""
    if gradient is not None and limit is not None:
        gradient = gradient.clamp_(-limit, limit)
    return gradient if gradient is None else gradient.to(parameter.dtype)


def _is_all(ranges: Sequence[tuple[int, int]], numel: int) -> bool:
    return len(ranges) == 1 and ranges[0] == (0, numel)
