"""Which parts of a model an optimizer may update apart from each other and give the same bits: found by experiment
(`optimizer_trial`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from everstep.exact.attributes import looked_up, of_torch
from everstep.exact.seeding import preserve_rng
from everstep.train.optimizer_trial import (
    OptimizerTrial,
    beside,
    far,
    in_a_line,
    near,
    no_room,
    parameters_of,
    unfit,
)

log = logging.getLogger(__name__)

_SAMPLE_ELEMENTS = 1 << 18
_LARGEST_ELEMENTS, _LARGEST_SHARE = 1 << 20, 8
"""The largest parameter is tried if it has no more elements than that, for an optimizer may treat large ones in another
way; when the kind of one that is not torch's is first found out, also if it has no greater share of all."""
_LEAST_ELEMENTS = 64
NO_GRADIENT = "no parameter has a gradient"
"""Why nothing can be found out."""
_DIVIDES = ("nothing", "matrices", "elements")


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

    def allows(self, before: OptimizerKind) -> bool:
        """Whether parts may still be updated apart as another look has found."""
        less = _DIVIDES.index(self.divides) < _DIVIDES.index(before.divides)
        return not (less or (self.at_once and not before.at_once) or (before.follows and not self.follows))


def expected_kind(optimizer: Optimizer, seed: int, unfit: bool = True) -> OptimizerKind:
    """The kind of an optimizer whose state is to be dealt out, before it has made an update: with random gradients.
    Nothing of it changes. unfit: gradients that are not finite may reach it. Raises: MemoryError."""
    with preserve_rng():
        return kind_of(optimizer, seed, dealt=True, made_up=True, ahead=True, unfit=unfit)


def kind_of(
    optimizer: Optimizer,
    seed: int,
    *,
    dealt: bool = False,
    made_up: bool = False,
    ahead: bool = False,
    unfit: bool = True,
    known: bool = False,
) -> OptimizerKind:
    """The kind of this optimizer, whose parameters have gradients. Nothing of it changes; all generators do. dealt: of
    parameters that are not `divisible` all owners update all (bits of narrow types depend on where a piece ends, in
    float32 they do not). Of gradients and of the state only some elements are there then, the rest is undefined: random
    numbers take the place of these, and zeros of those. made_up: random ones of gradients that are not there, too.
    ahead: of one that is not torch's, the updates that follow are tried, too, for some of the parameters. unfit: with
    gradients that are not finite, too. known: its kind was found before.

    Raises: MemoryError if there is no room for the copies, which says nothing of the optimizer.
    """
    try:
        return _kind_of(optimizer, seed, dealt, made_up, (ahead, unfit), known)
    except Exception as error:
        if not no_room(error):
            raise
        raise MemoryError(
            f"no room for copies of some parameters of {type(optimizer).__name__}, on which it is tried whether its "
            f"state may be updated in parts: {in_a_line(error)}"
        ) from error


def _kind_of(
    optimizer: Optimizer, seed: int, dealt: bool, made_up: bool, ahead: tuple[bool, bool], known: bool
) -> OptimizerKind:
    sample = tried_of(optimizer, known=known)
    parameters = [p for group in sample for p in group]
    if name := looked_up(optimizer):
        return OptimizerKind("nothing", f"it knows some of its parameters by self.{name}")
    if all(p.grad is None and not (made_up and p.requires_grad) for p in parameters):
        return OptimizerKind("nothing", NO_GRADIENT)
    try:
        first = OptimizerTrial(optimizer, sample, seed, near(dealt), dealt=dealt, made_up=made_up)
    except Exception as error:
        if no_room(error):
            raise
        return OptimizerKind("nothing", f"it cannot be copied and updated: {in_a_line(error)}")
    stepped = {keys for p, keys in first.kept.items() if p.grad is not None or made_up}
    uniform = len(stepped) < 2 and None not in stepped
    trials = [first, *(_ahead(optimizer, seed, dealt, ahead[1]) if ahead[0] and not of_torch(optimizer) else ())]
    at_once = any(beside(trial.whole) != beside(optimizer) for trial in trials)
    more = at_once, _state_bytes(optimizer, first.whole), uniform
    in_pieces = next(filter(None, (trial.in_pieces() for trial in trials)), "")
    follows = not any(trial.witnessed() for trial in trials)
    if not in_pieces:
        return OptimizerKind("elements", "", *more, follows=follows)
    if together := next(filter(None, (trial.alone() for trial in trials)), ""):
        return OptimizerKind("nothing", together, *more)
    return OptimizerKind("matrices", in_pieces, *more, follows=follows)


def _ahead(optimizer: Optimizer, seed: int, dealt: bool, strange: bool) -> list[OptimizerTrial]:
    """Longer trials, with the smallest parameters; without those for which the optimizer gives up."""
    sample, found = tried_of(optimizer, elements=0), list[OptimizerTrial]()
    several = [(far(sample, absent=True), far(sample, absent=False)), *([(unfit(sample),)] if strange else [])]
    log.info(
        "copies of the optimizer %s make %d updates several times, of %d elements, to find out what it will be like",
        type(optimizer).__name__,
        sum(courses[0].updates for courses in several),
        sum(p.numel() for group in sample for p in group),
    )
    for courses in several:
        for course in courses:
            try:
                found.append(OptimizerTrial(optimizer, sample, seed, course, dealt=dealt, made_up=True))
                break
            except Exception as error:
                if no_room(error):
                    raise
    return found


def tried_of(optimizer: Optimizer, elements: int = _SAMPLE_ELEMENTS, *, known: bool = False) -> list[list[Tensor]]:
    """Trained parameters to try, by group: the smallest of each number of dimensions, for optimizers go by that (if
    possible of `_LEAST_ELEMENTS`, so that it can be cut); and the largest ones for which there is room. elements: of
    all together, if these are more; 0: the smallest ones alone. known: its kind was found before."""
    groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    alike = [[p for p in group if p.dim() == n] for group in groups for n in sorted({p.dim() for p in group})]
    chosen = {id(min(some, key=lambda p: (p.numel() < _LEAST_ELEMENTS, p.numel()))) for some in alike}
    ordered = sorted((p for group in groups for p in group), key=torch.Tensor.numel, reverse=True)
    share = 0 if known or of_torch(optimizer) else sum(p.numel() for p in ordered) // _LARGEST_SHARE
    most = max(_LARGEST_ELEMENTS, share)
    chosen |= {id(p) for p in ordered[:1] if elements and p.numel() <= most}
    room = elements - sum(p.numel() for p in ordered if id(p) in chosen)
    for parameter in ordered if elements else ():
        if parameter.numel() <= room and id(parameter) not in chosen:
            chosen.add(id(parameter))
            room -= parameter.numel()
    return [[p for p in group if id(p) in chosen] for group in groups]


def make_up(optimizer: Optimizer, seed: int) -> None:
    """Random values for the parameters that are tried, while they have none."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in (p for group in tried_of(optimizer) for p in group):
        parameter.detach().copy_(torch.randn(parameter.shape, generator=generator))


def _state_bytes(optimizer: Optimizer, sample: Optimizer) -> int:
    """Bytes of a whole optimizer's state. sample: a copy of it that has stepped, for some of the parameters."""
    kept = [v for state in sample.state.values() if isinstance(state, Mapping) for v in state.values()]
    size = sum(int(v.numel()) * v.element_size() for v in kept if isinstance(v, Tensor))
    counts: list[int] = [sum(p.numel() for p in parameters_of(one)) for one in (optimizer, sample)]
    return size * counts[0] // max(1, counts[1])
