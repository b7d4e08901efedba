"""The first update, made on copies as well, must give the same bits: else the optimizer is not deterministic.

A model that fills the memory leaves no room for a second one: of a large model a sample of the parameters is copied.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from everstep.base.errors import ConfigError, DeterminismError
from everstep.exact.attributes import Watched
from everstep.exact.digest import tensor_digest
from everstep.exact.seeding import seed_all
from everstep.script.loop_guard import LoopGuard

log = logging.getLogger(__name__)

SAMPLE_ELEMENTS = 1 << 20
"""Models of up to so many elements are copied whole."""
_SAMPLE_SHARE = 16


class UpdateProbe:
    """Makes an update on copies of parameters, gradients and optimizer; `compare` then looks at the real one.

    A sample is copied, and updated twice; all of a small model, and once, if no hook may change the real update. If the
    real update treats the sample in another way than the copies, that accuses nobody: some optimizers look at all of
    their parameters together.
    What cannot be copied (no room, or a part that refuses), or updated as a copy, is not compared, and the log says so.
    Hooks of the optimizer are not run on the copy: they belong to the user. Nothing of the original changes.
    """

    def __init__(self, optimizer: Optimizer, seed: int, *, compares: bool = True) -> None:
        """compares: else nothing is copied, and `refuse_uncarried` is all that it does."""
        self._optimizer = optimizer
        self._watched = Watched(optimizer)
        self._sample = sample_of(optimizer)
        whole = sum(map(len, self._sample)) == sum(len(group["params"]) for group in optimizer.param_groups)
        self._whole = whole and not is_hooked(optimizer)
        self._expected: list[list[str]] = []
        try:
            for _ in range((1 if self._whole else 2) if compares else 0):
                self._expected.append(self._updated(seed))
        except Exception as error:
            kind = type(optimizer).__name__
            log.info("the first update is not compared: %s cannot be copied and updated (%s)", kind, error)
            self._expected = []

    def _updated(self, seed: int) -> list[str]:
        twin = twin_of(self._optimizer, self._sample)
        seed_all(seed)
        type(twin).step(twin)
        return _facts(twin, [group["params"] for group in twin.param_groups])

    def refuse_uncarried(self) -> None:
        """Raises: ConfigError if the optimizer keeps what changes where it cannot be carried."""
        changed = self._watched.changed()
        if changed:
            kind, name = type(self._optimizer).__name__, changed[0]
            value = getattr(self._optimizer, name, None)
            raise ConfigError(
                f"the optimizer {kind} keeps in self.{name} ({type(value).__name__}) what its updates change: that is "
                "not carried to workers that are healed or resumed; keep it in self.state or self.param_groups, or as "
                "plain values (numbers, strings, tensors, lists and dicts of them)"
            )

    def compare(self, step: int) -> None:
        """Raises: DeterminismError if the update has given other bits than before. ConfigError as `refuse_uncarried`
        does."""
        self.refuse_uncarried()
        if not self._expected:
            return
        first, *others = self._expected
        if self._whole:
            others = [_facts(self._optimizer, self._sample)]
        if others == [first]:
            return
        raise DeterminismError(
            f"the update of step {step} was made twice and gave different parameters or optimizer state: the optimizer "
            f"{type(self._optimizer).__name__} uses an operation or a random source that is not deterministic (the "
            "clock or os.urandom, say); use another optimizer, or torch's, numpy's or random's global generators in it"
        )


def is_hooked(optimizer: Optimizer, *, before: bool = True) -> bool:
    """Whether the user has hooks after the optimizer's steps, or before."""
    found: list[Any] = [getattr(optimizer, "_optimizer_step_pre_hooks", {}), _global_optimizer_pre_hooks][: 2 * before]
    found += [getattr(optimizer, "_optimizer_step_post_hooks", {}), _global_optimizer_post_hooks]
    return any(not isinstance(getattr(hook, "__self__", None), LoopGuard) for hooks in found for hook in hooks.values())


def sample_of(optimizer: Optimizer) -> list[list[torch.Tensor]]:
    """Parameters to copy, by group: the smallest of each group, and then the largest ones for which there is room."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    total = sum(parameter.numel() for group in groups for parameter in group)
    room = max(SAMPLE_ELEMENTS, total // _SAMPLE_SHARE)
    chosen: set[int] = set()
    smallest = [min(group, key=torch.Tensor.numel) for group in groups if group]
    largest = sorted((p for group in groups for p in group), key=torch.Tensor.numel, reverse=True)
    for parameter in (*smallest, *largest):
        if parameter.numel() <= room and id(parameter) not in chosen:
            chosen.add(id(parameter))
            room -= parameter.numel()
    chosen = chosen or {id(parameter) for parameter in largest[-1:]}
    return [[p for p in group if id(p) in chosen] for group in groups]


def twin_of(optimizer: Optimizer, sample: list[list[torch.Tensor]]) -> Optimizer:
    """A copy for these parameters that shares nothing with the original. Its class's own pickling would lose what
    subclasses add."""
    memo: dict[int, Any] = {}
    for parameter in (p for group in sample for p in group):
        copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            copied.grad = parameter.grad.detach().clone()
        memo[id(parameter)] = copied
    groups, state = [], defaultdict[Any, Any](dict)
    for group, chosen in zip(optimizer.param_groups, sample, strict=True):
        rest = {name: copy.deepcopy(value, memo) for name, value in group.items() if name != "params"}
        groups.append({"params": [memo[id(parameter)] for parameter in chosen], **rest})
        memo[id(group)] = groups[-1]
    for key, kept in optimizer.state.items():
        if not isinstance(key, torch.Tensor) or id(key) in memo:
            state[memo.get(id(key), key)] = copy.deepcopy(kept, memo)
            bring_near(memo.get(id(key)), state[memo.get(id(key), key)])
    memo |= {id(optimizer.param_groups): groups, id(optimizer.state): state}
    twin: Optimizer = type(optimizer).__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            twin.__dict__[name] = OrderedDict()
        elif name != "step":  # a scheduler has wrapped the original's
            twin.__dict__[name] = copy.deepcopy(value, memo)
    return twin


def bring_near(parameter: Any, kept: Any) -> None:
    """Have what an optimizer keeps for each element of a parameter lie on its device, for an update of all of it:
    between updates it may lie elsewhere."""
    if isinstance(parameter, torch.Tensor) and isinstance(kept, MutableMapping):
        for key, value in kept.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                kept[key] = value.to(parameter.device)


def _facts(optimizer: Optimizer, sample: list[list[torch.Tensor]]) -> list[str]:
    """Digests of these parameters and of their state, in the optimizer's order."""
    facts = []
    for parameter in (p for group in sample for p in group):
        facts.append(tensor_digest(parameter))
        state = optimizer.state.get(parameter, {})
        for key in sorted(state, key=str):
            value = state[key]
            facts.append(f"{key} {tensor_digest(value) if isinstance(value, torch.Tensor) else repr(value)}")
    return facts
