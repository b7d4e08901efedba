"""One worker's updates of an optimizer: all at once, part by part where its state lies in a file, or of the parts alone
that this worker has of a state which the members have divided."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from everstep.base.errors import ConfigError
from everstep.exact.accumulate import give_freed_memory_back
from everstep.exact.dealt import Dealt
from everstep.exact.divisible import divisible
from everstep.exact.pieces import PieceUpdate, Ranges, calls_of, in_calls
from everstep.exact.seeding import derive, seed_all
from everstep.exact.several import OptimizerSet
from everstep.exact.state_memory import StateMemory
from everstep.train.divided_state import DividedState
from everstep.train.offload import FarMemory, StateFile
from everstep.train.offload_parameters import ModelFile
from everstep.train.optimizer_kind import NO_GRADIENT, OptimizerKind, expected_kind, kind_of, tried_of
from everstep.train.optimizer_trial import AHEAD, beside
from everstep.train.update_probe import UpdateProbe, bring_near, is_hooked, sample_of

log = logging.getLogger(__name__)

PART_ELEMENTS = 1 << 22
"""Elements of the parameters that are updated at once, where the state lies elsewhere: 16 MiB, and as much for each
tensor of the state."""
DIVIDED_ELEMENTS = 1 << 18
"""Elements that are updated at once where each worker updates a part: 1 MiB of gradients, and as much for each
temporary tensor of the optimizer."""
_MEMBER = 1 << 35
_FIRST_LOOKS = 2
"""Updates at the beginning of which it is looked at what the optimizer is like."""
_TOLD_SHARE = 0.05
"""Share of the optimizer's state that is worth a word if members do not divide it."""
_SLOW_S, _SLOW_SHARE, _SLOW_TIMES = 1.0, 0.5, 3


class OptimizerUpdate:
    """Updates of an optimizer: the same bits as of its own `step`.

    kind: which parts of it can be updated apart; None while that did not matter. dealt: the parts that were updated
    last, None if all were. proven: an update is known to be deterministic. under_way: it, or a copy of it, is stepped.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        memory: StateMemory,
        every: int = 0,
        kind: OptimizerKind | None = None,
        *,
        unfit: bool = True,
    ) -> None:
        """every: steps between looks at what the optimizer is like, where that matters; 0: in the first updates alone.
        kind: what it was like before them, if that is known. unfit: gradients that are not finite may reach it."""
        self._every, self._looks, self._unfit = every, _FIRST_LOOKS, unfit
        self.kind = kind
        self.dealt: Dealt | None = None
        self.proven = self.under_way = self._guarded = False
        self._slow = ""
        self._seen = kind is None  # how much is divided
        self._optimizer, self._memory = optimizer, memory
        self._took_long, self._before = 0, time.monotonic()
        self._ahead = AHEAD if kind else 0  # the step up to which updates were tried

    def prove(self) -> None:
        """Note that an update was found to be deterministic elsewhere."""
        self.proven = True

    def keep_kind(self) -> None:
        """Look no more at what the optimizer is like: while this process looks, others update what it would copy."""
        self._every = self._looks = 0

    def forget(self) -> None:
        """The state is about to be another one."""
        self.dealt = None

    def make(
        self,
        step: int,
        seed: int,
        dealt: Dealt | None = None,
        pieces: Ranges | None = None,
        give: Callable[[Ranges], None] = lambda ranges: None,
    ) -> None:
        """Update the parameters of which there are gradients. dealt: which of them, if not all. pieces: what this
        process updates, if others of its worker update the rest. give: called before each part of such an update; puts
        its gradients in place.

        Raises: ConfigError if there is no room for the state, or it cannot be divided. DeterminismError.
        """
        self.under_way = True
        try:
            self._make(step, seed, dealt, pieces, give)
        finally:
            self.under_way = False

    def _make(
        self, step: int, seed: int, dealt: Dealt | None, pieces: Ranges | None, give: Callable[[Ranges], None]
    ) -> None:
        began, optimizer, memory = time.monotonic(), self._optimizer, self._memory
        self.dealt, looks = dealt, self._looks_now(step)
        if isinstance(memory, ModelFile):
            self._refuse_hooks("zero.offload_params", "gradients are put into place for one part after the other")
            if not self.proven or looks:  # at these parameters, below
                tried = tried_of(optimizer, known=self._known)
                give(_whole(chain.from_iterable((*sample_of(optimizer), *tried))))
        probe = (
            None
            if self.proven or isinstance(optimizer, OptimizerSet)
            else UpdateProbe(optimizer, seed, compares=pieces is None)
        )
        if self.dealt is not None or isinstance(memory, FarMemory):
            self._find_kind(step, seed)
        own = None if self.dealt is None else self._divided(self.dealt)
        ranges = own if pieces is None else pieces
        seed_all(seed)
        if ranges is not None:
            self._bounded(ranges, give, step)
            if self.dealt is not None and (strange := self.dealt.strange()) is not None:
                raise self._changed(step, f"what it keeps for a parameter of shape {strange} cannot be divided")
        elif isinstance(memory, FarMemory):
            self._part_by_part(memory, step, give)
        elif isinstance(optimizer, OptimizerSet):
            self._each(optimizer, step, seed)
        else:
            optimizer.step()
        if probe is not None:
            probe.refuse_uncarried()
            if ranges is None:
                probe.compare(step)
        self.proven = True
        memory.let_go()
        if isinstance(memory, FarMemory):
            if looks:
                give_freed_memory_back()  # in which the first update has made the state, before it moved
            self._judge(began, time.monotonic())

    def _each(self, optimizers: OptimizerSet, step: int, seed: int) -> None:
        """Step all of several optimizers, each with random numbers of its own."""
        for number, optimizer in enumerate(optimizers.members.values()):
            own = derive(seed, number, _MEMBER)
            probe = None if self.proven else UpdateProbe(optimizer, own)
            seed_all(own)
            optimizer.step()
            if probe is not None:
                probe.compare(step)

    @property
    def _known(self) -> bool:
        return self.kind is not None and self.kind.why != NO_GRADIENT

    def _looks_now(self, step: int) -> bool:
        return bool(self._looks or (self._every and step % self._every == 0))

    def _refuse_hooks(self, key: str, why: str) -> None:
        """Raises: ConfigError for hooks of the user's that would see gradients before an update, or after it."""
        if is_hooked(self._optimizer):
            raise ConfigError(
                f"{key}: expected no step hooks of {type(self._optimizer).__name__}, since {why}: use clip_norm to clip"
                f" them, or set {key}=false"
            )

    def _find_kind(self, step: int, seed: int) -> None:
        """Find out what the optimizer is like; one without gradients in this step says nothing of that."""
        before, memory = self.kind, self._memory
        if not self._looks_now(step):
            return
        far = step + min(self._every, AHEAD - _FIRST_LOOKS) > self._ahead
        how = {"dealt": self.dealt is not None, "ahead": far, "unfit": self._unfit, "known": self._known}
        try:
            give_freed_memory_back()  # the lanes' and the copies' take no memory at the same time, nor later
            found = kind_of(self._optimizer, seed, **how)
        except MemoryError as error:
            if not self._known:
                raise
            log.warning("step %d: the optimizer is taken to be as it was before: %s", step, error)
            self._looks = max(self._looks - 1, 0)
            return
        finally:
            give_freed_memory_back()
        if found.why == NO_GRADIENT:
            self.kind = before or found
            return
        self._looks = max(self._looks - 1, 0)
        self._ahead = step + AHEAD if far else self._ahead
        if before is None or (before.why == NO_GRADIENT and self.dealt is None):
            log.info("the state of the optimizer lies in %s (%s)", memory.where, found)
            if isinstance(memory, StateFile):
                memory.room_for(found.state_bytes)
            self.kind = found
        elif not found.allows(before):
            raise self._changed(step, found.why or "it can be divided")

    def _changed(self, step: int, why: str) -> ConfigError:
        return ConfigError(
            f"the optimizer {type(self._optimizer).__name__} treats its parameters otherwise at step {step} than before"
            f" ({why}), so it cannot be said which parts of its state may be updated apart: set zero.offload=none and "
            "zero.stage=0"
        )

    def _divided(self, dealt: Dealt) -> Ranges:
        name = type(self._optimizer).__name__
        if is_hooked(self._optimizer, before=False):
            raise ConfigError(
                f"zero.stage: expected no step post-hooks of {name}, since they would see parameters that other "
                "workers have not sent yet: set zero.stage=0"
            )
        if is_hooked(self._optimizer):
            raise ConfigError(
                f"zero.stage: expected no step pre-hooks of {name}, since each worker has its parts of the gradients "
                "alone: use clip_norm to clip them, or set zero.stage=0"
            )
        if not self._guarded:
            self._guarded = True
            self._optimizer.register_state_dict_pre_hook(_refuse_state_dict)
        if not isinstance(self._optimizer.state, DividedState):  # the loop may have loaded another one
            vars(self._optimizer)["state"] = DividedState(self._optimizer, lambda: self.under_way)
        return dealt.updates()

    def _bounded(self, ranges: Ranges, give: Callable[[Ranges], None], step: int) -> None:
        """Update these ranges, little at a time where the optimizer allows it."""
        kind, calls = self.kind, [ranges]
        if self.dealt is None:  # the processes of a worker: of optimizers that treat each element by itself
            calls = in_calls(ranges, DIVIDED_ELEMENTS, divisible)
        elif kind is not None and kind.divides != "nothing" and not kind.at_once:
            elements = kind.divides == "elements"
            calls = in_calls(ranges, DIVIDED_ELEMENTS, lambda parameter: elements and divisible(parameter))
        before = beside(self._optimizer) if len(calls) > 1 else ""
        in_turn: Iterable[Ranges] = calls
        if isinstance(self._memory, FarMemory):
            self._move(self._memory)
            in_turn = self._one_after_another(self._memory, calls)
        PieceUpdate(self._optimizer, self._memory.make).make(_given(in_turn, give))
        if before and beside(self._optimizer) != before:
            raise self._changed(step, "an update changes its groups or attributes")

    # ---- where the state lies elsewhere

    def _part_by_part(self, memory: FarMemory, step: int, give: Callable[[Ranges], None]) -> None:
        optimizer, kind = self._optimizer, self.kind
        self._move(memory)
        places = {p: dict(state) for p, state in optimizer.state.items() if isinstance(p, Tensor)}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if kind is None or kind.divides == "nothing" or kind.at_once:
            give(_whole(parameters))
            for parameter, state in optimizer.state.items():
                bring_near(parameter, state)
            optimizer.step()
        else:
            before, calls = beside(optimizer), calls_of(parameters, PART_ELEMENTS, kind.divides == "elements")
            PieceUpdate(optimizer, memory.make).make(_given(self._one_after_another(memory, calls), give))
            if len(calls) > 1 and beside(optimizer) != before:
                raise self._changed(step, "an update changes its groups or attributes")
        self._move(memory, places)

    def _move(self, memory: FarMemory, places: Mapping[Tensor, Mapping[Any, Any]] = {}) -> None:
        """Put where it belongs what an update, or the optimizer when it was made, has put elsewhere. places: the state
        before the update: a new tensor of the optimizer may get the address of the one before."""
        for parameter, state in self._optimizer.state.items():
            for key, value in state.items() if isinstance(parameter, Tensor) else ():
                if isinstance(value, Tensor) and value.shape == parameter.shape and memory.lacks(value):
                    place = places.get(parameter, {}).get(key)
                    if not isinstance(place, Tensor) or (place.shape, place.dtype) != (value.shape, value.dtype):
                        place = memory.make(value)
                    with torch.no_grad():
                        state[key] = place.copy_(value)

    def _one_after_another(self, memory: FarMemory, calls: Sequence[Ranges]) -> Iterator[Ranges]:
        for number, call in enumerate(calls):
            if number:
                memory.let_go()
            for parameter, ranges in calls[number + 1].items() if number + 1 < len(calls) else ():
                for value in self._optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_contiguous():
                        for first, stop in ranges:
                            memory.ahead(value.view(-1)[first:stop])
            yield call

    def complaint(self) -> str:
        """What a person is to know of a slow disk, once; "" otherwise."""
        said, self._slow = self._slow, ""
        return said

    def undivided(self) -> str:
        """What a person is to know of an optimizer whose state members divide in part only, once; "" otherwise."""
        stateless = self._known and self.kind is not None and not self.kind.state_bytes
        if self._seen or (self.dealt is None and not stateless):
            return ""
        self._seen = True
        if self.dealt is None:
            name = type(self._optimizer).__name__
            return f"zero.stage saves no memory: {name} keeps nothing for its parameters, so each worker updates all"
        divided, rest = self.dealt.sizes()
        if rest <= _TOLD_SHARE * (divided + rest):
            return ""
        why = "what is divided is that of contiguous float32 parameters for which it keeps float32 tensors like them, "
        why += "the same for each"
        if self.kind is not None and not self.kind.follows:
            why = "it cannot update a parameter of no elements, which stands for one that another worker has"
        return (
            f"zero.stage: the workers divide {divided:,} bytes of the state of {type(self._optimizer).__name__}, and "
            f"each keeps all of the other {rest:,}: {why}"
        )

    def _judge(self, began: float, ended: float) -> None:
        """A disk that is too slow: the updates take most of the time, several times in a row."""
        took, whole = ended - began, ended - self._before
        self._before = ended
        long = took > _SLOW_S and took > _SLOW_SHARE * whole
        self._took_long = self._took_long + 1 if long else 0
        if self._took_long == _SLOW_TIMES:
            self._slow = (
                f"updates wait for zero.offload={self._memory.where}: the last took {took:.1f} of {whole:.1f} s; use a "
                "faster disk, or give the job more memory"
            )


def _whole(parameters: Iterable[Tensor]) -> Ranges:
    return {parameter: ((0, parameter.numel()),) for parameter in parameters}


def _given(calls: Iterable[Ranges], give: Callable[[Ranges], None]) -> Iterator[Ranges]:
    for ranges in calls:
        give(ranges)
        yield ranges


def refuse_undivided(optimizer: Optimizer, seed: int, stage: int, *, unfit: bool = True) -> OptimizerKind:
    """The kind of an optimizer whose state members divide at this stage of ZeRO. unfit: gradients that are not finite
    may reach it. Raises: ConfigError if they cannot. MemoryError."""
    kind = expected_kind(optimizer, seed, unfit)
    if kind.divides == "nothing" and kind.why != NO_GRADIENT:
        raise ConfigError(
            f"zero.stage={stage} divides the state of the optimizer, which {type(optimizer).__name__} does not allow: "
            f"an update of a part differs from that of the whole ({kind.why}); set zero.stage=0, or use an optimizer "
            "that treats each parameter by itself"
        )
    if not kind.follows:
        log.warning(
            "zero.stage=%d saves no memory with %s: all workers update all of it, since it cannot update a parameter "
            "of no elements, which stands for one that another worker has",
            stage,
            type(optimizer).__name__,
        )
    return kind


def refuse_in_cell(optimizer: Optimizer, seed: int, *, unfit: bool = True, kind: OptimizerKind | None = None) -> None:
    """unfit: gradients that are not finite may reach it. kind: of the optimizer, if that is known. Raises: ConfigError
    for an optimizer that the processes of a worker cannot update together. MemoryError."""
    name = type(optimizer).__name__
    kind = expected_kind(optimizer, seed, unfit) if kind is None else kind
    if kind.divides != "elements" and kind.why != NO_GRADIENT:
        raise ConfigError(
            f"cell.fsdp divides the elements that {name} updates, which it does not allow: an update of a part differs "
            f"from that of the whole ({kind.why}); set cell.fsdp=1, or use an optimizer that treats each element by "
            "itself"
        )
    if not kind.follows:
        raise ConfigError(
            "cell.fsdp: expected an optimizer that keeps state for a parameter of no elements, too, as a process may "
            f"have no part of one, got {name}: set cell.fsdp=1"
        )
    values = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    if kind.at_once or any(isinstance(value, Tensor) for value in values):
        raise ConfigError(
            f"cell.fsdp: expected an optimizer whose groups hold plain values that its updates leave alone, got {name} "
            "with tensors in its groups, or with values that its updates change: use numbers, or set cell.fsdp=1"
        )
    if is_hooked(optimizer):
        raise ConfigError(
            f"cell.fsdp: expected no hooks around the updates of {name}, since each process of a worker updates a part "
            "alone: use clip_norm to clip gradients, or set cell.fsdp=1"
        )


def _refuse_state_dict(optimizer: Optimizer) -> None:
    """Raises: ConfigError, for a loop that would save what is not there."""
    raise ConfigError(
        f"zero.stage: no worker has all of the state of {type(optimizer).__name__}, so its state_dict is not "
        "available: leave saving to the job's checkpoints (everstep checkpoints export), or set zero.stage=0"
    )
