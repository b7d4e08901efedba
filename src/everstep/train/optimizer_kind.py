"""Which parts of a model an optimizer may update apart from each other and give the same bits: found by experiment.

A sample of the parameters is updated whole, and by two owners with disjoint parts and generators in different states,
twice each, on copies. One owner with all parts, one after the other, would not do: random numbers that are drawn over
pieces in order give the bits of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from everstep.exact.attributes import plain
from everstep.exact.digest import tensor_digest
from everstep.exact.divisible import divisible, kept_like
from everstep.exact.layout import ALIGN_ELEMENTS
from everstep.exact.pieces import PieceUpdate, Ranges, alike_in_pieces, may_be_cut
from everstep.exact.seeding import derive, preserve_rng, seed_all
from everstep.train.update_probe import twin_of

_CUTS = (0.35, 0.8)
"""Where a parameter is cut: its middle part belongs to another owner than the rest."""
_UPDATES = 2
_SAMPLE_ELEMENTS = 1 << 18
_LEAST_ELEMENTS = 64
NO_GRADIENT = "no parameter has a gradient"
"""Why nothing can be found out."""


class OptimizerKind(NamedTuple):
    """divides: `elements` if any elements can be updated apart, `matrices` if whole parameters can, else `nothing`.
    why: what differed first, of the next larger kind; "" for `elements`. at_once: an update changes groups or
    attributes, so a worker has to update all that it holds in one call. state_bytes: of the state for all parameters,
    as far as a sample tells. uniform: it keeps tensors like the parameter under the same keys for all of the sample.
    follows: what it keeps once for a parameter follows where a worker has none of the parameter's elements."""

    divides: Literal["elements", "matrices", "nothing"]
    why: str = ""
    at_once: bool = False
    state_bytes: int = 0
    uniform: bool = True
    follows: bool = True

    def like(self, other: OptimizerKind) -> bool:
        """Whether both say that the same parts may be updated apart."""
        mine, theirs = ((one.divides, one.at_once, one.follows) for one in (self, other))
        return mine == theirs


def expected_kind(optimizer: Optimizer, seed: int) -> OptimizerKind:
    """The kind of an optimizer whose state is to be dealt out, before it has made an update: with random gradients.
    Nothing of it changes."""
    with preserve_rng():
        return kind_of(optimizer, seed, dealt=True, made_up=True)


def kind_of(optimizer: Optimizer, seed: int, *, dealt: bool = False, made_up: bool = False) -> OptimizerKind:
    """The kind of this optimizer, whose parameters have gradients. Nothing of it changes; all generators do. dealt: of
    parameters that are not `divisible` all owners update all (bits of narrow types depend on where a piece ends, in
    float32 they do not). Of gradients and of the state only some elements are there then, the rest is undefined: random
    numbers take the place of these, and zeros of those. made_up: random ones of gradients that are not there, too."""
    sample = tried_of(optimizer)
    parameters = [p for group in sample for p in group]
    if all(p.grad is None and not (made_up and p.requires_grad) for p in parameters):
        return OptimizerKind("nothing", NO_GRADIENT)
    updated = partial(_updated, optimizer, sample, drawn=dealt, made_up=made_up)
    try:
        whole = updated(None, seed)
    except Exception as error:
        return OptimizerKind("nothing", f"it cannot be copied and updated: {_line(error)}")
    kept = {p: kept_like(whole, copy) for p, copy in zip(parameters, _all(whole), strict=True) if divisible(p)}
    stepped = {keys for p, keys in kept.items() if p.grad is not None or made_up}
    uniform = len(stepped) < 2 and None not in stepped
    more = beside(whole) != beside(optimizer), _state_bytes(optimizer, whole), uniform

    def differs(owners: Sequence[dict[Tensor, list[tuple[int, int]]]]) -> str:
        return _differs(updated, parameters, whole, owners, seed)

    of_all = {p: [(0, p.numel())] for p in parameters if dealt and not divisible(p)}
    in_pieces = differs([_cut(parameters, k) | of_all for k in (0, 1)])
    alone = [{p: [(0, p.numel())] for p in parameters[k::2]} for k in (0, 1)]
    witnessed = [
        {p: [(0, p.numel())] if n % 2 == k or kept.get(p) is None else [] for n, p in enumerate(parameters)}
        for k in (0, 1)
    ]
    follows = not differs(witnessed)
    if not in_pieces:
        return OptimizerKind("elements", "", *more, follows=follows)
    if together := differs(alone):
        return OptimizerKind("nothing", together, *more)
    return OptimizerKind("matrices", in_pieces, *more, follows=follows)


def tried_of(optimizer: Optimizer) -> list[list[Tensor]]:
    """Trained parameters to try, by group: the smallest of each number of dimensions, for optimizers go by that (if
    possible of `_LEAST_ELEMENTS`, so that it can be cut); and the largest ones for which there is room."""
    groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    alike = [[p for p in group if p.dim() == n] for group in groups for n in sorted({p.dim() for p in group})]
    chosen = {id(min(some, key=lambda p: (p.numel() < _LEAST_ELEMENTS, p.numel()))) for some in alike}
    room = _SAMPLE_ELEMENTS - sum(p.numel() for group in groups for p in group if id(p) in chosen)
    for parameter in sorted((p for group in groups for p in group), key=torch.Tensor.numel, reverse=True):
        if parameter.numel() <= room and id(parameter) not in chosen:
            chosen.add(id(parameter))
            room -= parameter.numel()
    return [[p for p in group if id(p) in chosen] for group in groups]


def _all(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _state_bytes(optimizer: Optimizer, sample: Optimizer) -> int:
    """Bytes of a whole optimizer's state. sample: a copy of it that has stepped, for some of the parameters."""
    kept = [v for state in sample.state.values() if isinstance(state, Mapping) for v in state.values()]
    size = sum(int(v.numel()) * v.element_size() for v in kept if isinstance(v, Tensor))
    counts: list[int] = [
        sum(p.numel() for group in one.param_groups for p in group["params"]) for one in (optimizer, sample)
    ]
    return size * counts[0] // max(1, counts[1])


def _cut(parameters: Sequence[Tensor], owner: int) -> dict[Tensor, list[tuple[int, int]]]:
    """The pieces of one of two owners; witnesses where it has none. Both own a single element: of no elements,
    it would look like what is kept once for each parameter."""
    found: dict[Tensor, list[tuple[int, int]]] = {}
    for number, parameter in enumerate(parameters):
        size = parameter.numel()
        cuts = [int(size * share) // ALIGN_ELEMENTS * ALIGN_ELEMENTS for share in _CUTS]
        if not alike_in_pieces(parameter) or not 0 < cuts[0] < cuts[1] < size:
            found[parameter] = [(0, size)] if size == 1 or number % 2 == owner else []
        else:
            found[parameter] = [(0, cuts[0]), (cuts[1], size)] if owner == 0 else [(cuts[0], cuts[1])]
    return found


def _updated(
    optimizer: Optimizer,
    sample: Sequence[Sequence[Tensor]],
    pieces: Ranges | None,
    seed: int,
    *,
    drawn: bool,
    made_up: bool,
) -> Optimizer:
    """A copy of the optimizer after two updates, of these pieces of the sample or of all of it."""
    twin = twin_of(optimizer, [list(group) for group in sample])
    copies = _all(twin)
    originals = [p for group in sample for p in group]
    for number, parameter in enumerate(copies) if drawn else ():
        for value in twin.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.numel() > 1:
                value.zero_()
        if parameter.grad is not None or (made_up and parameter.requires_grad):
            generator = torch.Generator(parameter.device).manual_seed(number)
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            parameter.grad = torch.empty_like(parameter).copy_(noise)
    if pieces is not None:
        pieces = {mine: pieces[p] for p, mine in zip(originals, copies, strict=True) if p in pieces}
    for number in range(_UPDATES):
        seed_all(derive(seed, number, 0))
        if pieces is None:
            twin.step()
        else:
            PieceUpdate(twin).make([pieces])
        for parameter in copies:
            if parameter.grad is not None:
                parameter.grad.mul_(-0.5)
    return twin


def _differs(
    updated: partial[Optimizer],
    originals: Sequence[Tensor],
    whole: Optimizer,
    owned: Sequence[dict[Tensor, list[tuple[int, int]]]],
    seed: int,
) -> str:
    """Difference between updates by two owners and one update of all; "" if none."""
    for number, pieces in enumerate(owned):
        try:
            twin = updated(pieces, derive(seed, number, 1))
        except Exception as error:
            return f"a part cannot be updated alone: {_line(error)}"
        if beside(twin) != beside(whole):
            return "the groups or attributes of the optimizer would differ"
        for original, mine, theirs in zip(originals, _all(twin), _all(whole), strict=True):
            if original in pieces:
                for what in _unlike((twin, mine), (whole, theirs), pieces[original]):
                    return f"{what} of a parameter of shape {tuple(mine.shape)} would differ"
    return ""


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
            same = repr(value) == repr(kept)
        elif value.shape == there.shape and kept.shape == here.shape:
            same = _digests(kept, here, pieces) == _digests(value, there, pieces)
        else:
            same = tensor_digest(value) == tensor_digest(kept)
        if not same:
            yield f"state[{str(key)!r}]"


def _digests(tensor: Tensor, parameter: Tensor, pieces: Sequence[tuple[int, int]]) -> list[str]:
    """Digest of each range of a tensor's elements; these are counted in the order of the parameter's memory."""
    if not may_be_cut(parameter):
        return [tensor_digest(tensor)]
    tensor = tensor.detach()
    if tensor.stride() != parameter.stride():
        tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return [tensor_digest(flat[first:stop]) for first, stop in pieces]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def beside(optimizer: Optimizer) -> str:
    """All that an optimizer keeps beside parameters and their state."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    other = {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}
    return repr((groups, other, plain(optimizer)))
