"""Updates of a sample of an optimizer's parameters, whole and by two owners with disjoint parts and generators in
different states, on copies: what differs.

One owner with all parts, one after the other, would not do: random numbers that are drawn over pieces in order give the
bits of the whole. Besides two updates with gradients like the present ones there are longer courses, for an optimizer
may do something now and then only, or for some gradients only: skip a parameter whose gradient is zero, scale large
ones by the norm of all.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from everstep.exact.attributes import plain
from everstep.exact.digest import tensor_digest
from everstep.exact.divisible import divisible, kept_like
from everstep.exact.layout import ALIGN_ELEMENTS
from everstep.exact.pieces import PieceUpdate, Ranges, alike_in_pieces, may_be_cut
from everstep.exact.seeding import derive, seed_all
from everstep.train.update_probe import twin_of

_CUTS = (0.35, 0.8)
"""Where a parameter is cut, beside a first piece as small as there can be: its pieces have two owners in turn."""
AHEAD = 104
"""Updates of a long course: a little more than there are between two looks at an optimizer."""
_LEAST_AHEAD = 8
_ELEMENTS_AHEAD, _PARAMETERS_AHEAD = 1 << 24, 16 * AHEAD
"""Elements, and parameters, that a long course updates at the most, one after the other."""
_LEAST_LARGE, _COST_AHEAD = 2, 1 << 34
"""Updates of all matrices, however large, and the cost of them that a long course may have beyond that, one after the
other: elements to the power of 1.5 each, as of a product or a decomposition (two updates of 2048 x 2048)."""
_MOST_UNFIT = 16
Owned = dict[Tensor, list[tuple[int, int]]]


@dataclass(frozen=True)
class UpdateCourse:
    """Updates one after the other. gradient: of an update, a parameter's number and its first gradient; None: there is
    none. drawn: the first gradient is random; otherwise it is the present one, if there is one. of: which gradients
    they are, as a sentence goes on; "" for ordinary ones."""

    updates: int
    gradient: Callable[[int, int, Tensor], Tensor | None]
    drawn: bool = True
    of: str = ""


def near(drawn: bool) -> UpdateCourse:
    """Two updates with gradients like the present ones."""
    return UpdateCourse(2, lambda update, number, first: first * (-0.5) ** update, drawn)


def far(sample: Sequence[Sequence[Tensor]], absent: bool) -> UpdateCourse:
    """As many updates as come before the next look, with gradients of all sizes, zeros among them. absent: or none; so
    large matrices have them in the first updates alone, else all go no further than these."""
    sizes = [p.numel() for group in sample for p in group]
    updates = min(AHEAD, _ELEMENTS_AHEAD // max(1, sum(sizes)), _PARAMETERS_AHEAD // max(1, len(sizes)))
    updates, large = max(_LEAST_AHEAD, updates), _of_matrices(sample)
    course = partial(_varied, large if absent else 0)
    return UpdateCourse(updates if absent else min(updates, large), course, of=", in later updates or with other sizes")


def unfit(sample: Sequence[Sequence[Tensor]]) -> UpdateCourse:
    """Gradients that are not finite in a single element, of one parameter after the other."""
    updates = min(1 + min(_MOST_UNFIT, sum(map(len, sample))), _of_matrices(sample))
    return UpdateCourse(
        updates, _not_finite, of=", with gradients that are not finite: on_nonfinite=skip keeps those away"
    )


def _of_matrices(sample: Sequence[Sequence[Tensor]]) -> int:
    """How many updates the matrices of a sample may have."""
    cost = sum(int(p.numel() ** 1.5) for group in sample for p in group if p.dim() > 1)
    return max(_LEAST_LARGE, _COST_AHEAD // max(1, cost))


def _varied(large: int, update: int, number: int, first: Tensor) -> Tensor | None:
    """large: updates in which matrices have gradients, where some parameters may have none; 0: all have some."""
    if large and ((update and (update + number) % 7 == 0) or (update >= large and first.dim() > 1)):
        return None
    found = torch.empty_like(first).copy_(first * (-1) ** update * 10.0 ** (update * 5 % 9 - 4))
    flat, size = _memory(found), found.numel()
    if update % 6 == 1:
        flat[: size // 2] = 0
    elif update % 6 == 4:
        flat[size * 3 // 10 :] = 0
    elif update % 8 == 5 and number % 2 == 0:
        flat[:] = 0
    return found


def _not_finite(update: int, number: int, first: Tensor) -> Tensor:
    found = torch.empty_like(first).copy_(first)
    if update == 1 + number and found.numel():
        _memory(found)[found.numel() // 2] = (torch.inf, torch.nan)[number % 2]
    return found


def _memory(tensor: Tensor) -> Tensor:
    """Elements in the order of memory, of a tensor without holes; otherwise a copy."""
    return tensor.as_strided((tensor.numel(),), (1,)) if may_be_cut(tensor) else tensor.flatten()


class OptimizerTrial:
    """A course of a sample, updated whole. Nothing of the optimizer changes; all generators do.

    Raises: what the update of a copy raises.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sample: Sequence[Sequence[Tensor]],
        seed: int,
        course: UpdateCourse,
        *,
        dealt: bool,
        made_up: bool,
    ) -> None:
        """dealt: an owner has the gradients of its own pieces alone, and all update what cannot be divided. made_up:
        parameters without a gradient get one, too."""
        self._optimizer, self._sample, self._seed = optimizer, [list(group) for group in sample], seed
        self._course, self._dealt, self._made_up = course, dealt, made_up
        self._parameters = [p for group in sample for p in group]
        self.whole, self._copies = self._updated(None, seed)
        pairs = zip(self._parameters, self._copies, strict=True)
        self.kept = {p: kept_like(self.whole, copy) for p, copy in pairs if divisible(p)}
        """Keys of the state of each parameter that can be divided."""

    def in_pieces(self) -> str:
        """What differs where each parameter has two owners; "" if nothing."""
        of_all = {p: [(0, p.numel())] for p in self._parameters if self._dealt and not divisible(p)}
        return self._differs([_cut(self._parameters, k) | of_all for k in (0, 1)])

    def alone(self) -> str:
        """What differs where each owner has every other parameter, and knows of no others."""
        return self._differs([{p: [(0, p.numel())] for p in self._parameters[k::2]} for k in (0, 1)])

    def witnessed(self) -> str:
        """What differs where each owner has every other parameter, and no elements of the others."""
        return self._differs(
            [
                {
                    p: [(0, p.numel())] if n % 2 == k or self.kept.get(p) is None else []
                    for n, p in enumerate(self._parameters)
                }
                for k in (0, 1)
            ]
        )

    def _updated(self, pieces: Ranges | None, seed: int) -> tuple[Optimizer, list[Tensor]]:
        """A copy of the optimizer after the course, with updates of these pieces or of all of the sample; and of its
        parameters."""
        twin, drawn = twin_of(self._optimizer, self._sample), self._course.drawn
        copies = parameters_of(twin)
        for number, parameter in enumerate(copies) if drawn else ():
            for value in twin.state.get(parameter, {}).values():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.numel() > 1:
                    value.zero_()
            if parameter.grad is not None or (self._made_up and parameter.requires_grad):
                generator = torch.Generator(parameter.device).manual_seed(number)
                noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
                parameter.grad = torch.empty_like(parameter).copy_(noise)
        if pieces is not None:
            pieces = {mine: pieces[p] for p, mine in zip(self._parameters, copies, strict=True) if p in pieces}
        first = [p.grad for p in copies]
        for update in range(self._course.updates):
            for number, (parameter, gradient) in enumerate(zip(copies, first, strict=True)):
                if gradient is not None:
                    parameter.grad = self._course.gradient(update, number, gradient)
                    if self._dealt and pieces is not None and parameter.grad is not None:
                        _spoil(parameter.grad, pieces.get(parameter, ()), seed)
            seed_all(derive(seed, update, 0))
            with redirect_stdout(io.TextIOWrapper(io.BytesIO())):  # what the user's step prints is for nobody
                if pieces is None:
                    twin.step()
                else:
                    PieceUpdate(twin).make([pieces])
        return twin, copies

    def _differs(self, owned: Sequence[Owned]) -> str:
        """Difference between updates by two owners and one update of all; "" if none."""
        for number, pieces in enumerate(owned):
            try:
                twin, copies = self._updated(pieces, derive(self._seed, number, 1))
            except Exception as error:
                if no_room(error):
                    raise
                return f"a part cannot be updated alone{self._course.of}: {in_a_line(error)}"
            if beside(twin) != beside(self.whole):
                return f"the groups or attributes of the optimizer would differ{self._course.of}"
            for original, mine, theirs in zip(self._parameters, copies, self._copies, strict=True):
                if original in pieces:
                    for what in _unlike((twin, mine), (self.whole, theirs), pieces[original]):
                        return f"{what} of a parameter of shape {tuple(mine.shape)} would differ{self._course.of}"
        return ""


def _spoil(gradient: Tensor, pieces: Sequence[tuple[int, int]], seed: int) -> None:
    """Other numbers for what is in no piece."""
    if sum(stop - first for first, stop in pieces) == gradient.numel():
        return
    flat = _memory(gradient)
    kept = [flat[first:stop].clone() for first, stop in pieces]
    generator = torch.Generator(gradient.device).manual_seed(seed)
    gradient.copy_(torch.randn(gradient.shape, generator=generator, device=gradient.device))
    for (first, stop), own in zip(pieces, kept, strict=True):
        _memory(gradient)[first:stop] = own


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _cut(parameters: Sequence[Tensor], owner: int) -> Owned:
    """The pieces of one of two owners; witnesses where it has none. Both own a single element: of no elements,
    it would look like what is kept once for each parameter."""
    found: Owned = {}
    for number, parameter in enumerate(parameters):
        size = parameter.numel()
        cuts = {ALIGN_ELEMENTS, *(int(size * share) // ALIGN_ELEMENTS * ALIGN_ELEMENTS for share in _CUTS)}
        edges = [0, *sorted(cut for cut in cuts if 0 < cut < size), size]
        if not alike_in_pieces(parameter) or len(edges) < 4:
            found[parameter] = [(0, size)] if size == 1 or number % 2 == owner else []
        else:
            found[parameter] = list(pairwise(edges))[owner::2]
    return found


def _unlike(
    mine: tuple[Optimizer, Tensor], theirs: tuple[Optimizer, Tensor], pieces: Sequence[tuple[int, int]]
) -> Iterator[str]:
    """Names of what differs in these pieces of a parameter, or in what is kept once for it."""
    (twin, here), (whole, there) = mine, theirs
    if _digests(here, here, pieces) != _digests(there, there, pieces):
        yield "the elements"
    states = twin.state.get(here, {}), whole.state.get(there, {})
    if list(map(str, states[0])) != list(map(str, states[1])):
        yield "the keys of the state"
        return
    for key, value in states[1].items():
        kept = states[0][key]
        if not isinstance(value, Tensor) or not isinstance(kept, Tensor):
            same = _exactly(value) == _exactly(kept)
        elif value.shape == there.shape and kept.shape == here.shape:
            same = _digests(kept, here, pieces) == _digests(value, there, pieces)
        else:
            same = _digest(value) == _digest(kept)
        if not same:
            yield f"state[{str(key)!r}]"


def _digests(tensor: Tensor, parameter: Tensor, pieces: Sequence[tuple[int, int]]) -> list[str]:
    """Digest of each range of a tensor's elements; these are counted in the order of the parameter's memory."""
    if not may_be_cut(parameter):
        return [_digest(tensor)]
    tensor = tensor.detach()
    if tensor.stride() != parameter.stride():
        tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return [_digest(flat[first:stop]) for first, stop in pieces]


def _digest(tensor: Tensor) -> str:
    """All that is no number counts as one: which of them comes of two is up to the machine's vectors."""
    odd = tensor.isnan() if tensor.is_floating_point() and tensor.layout is torch.strided else None
    return tensor_digest(tensor if odd is None or not odd.any() else tensor.detach().masked_fill(odd, torch.nan))


def no_room(error: BaseException) -> bool:
    """Whether it says that there is not enough memory."""
    of_allocator = isinstance(error, RuntimeError | OSError) and "t allocate memory" in str(error)  # can't or cannot
    return of_allocator or isinstance(error, MemoryError | torch.OutOfMemoryError)


def in_a_line(error: Exception) -> str:
    """An exception's kind and the beginning of what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def beside(optimizer: Optimizer) -> str:
    """All that an optimizer keeps beside parameters and their state."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    other = {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}
    return _exactly((groups, other, plain(optimizer)))


def _exactly(value: Any) -> str:
    """As repr says it, but for tensors, of which repr shows a few digits of a few elements."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {_digest(value)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_exactly(one)}' for key, one in value.items())}}}"
    if isinstance(value, list | tuple | set | frozenset):
        return f"{type(value).__name__}[{', '.join(map(_exactly, value))}]"
    return repr(value)
