"""See whether an optimizer is deterministic: its first update, made on a copy as well, must give the same bits.

Apart from `replica` because all of it is about copying an optimizer without touching the original.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.base.errors import ConfigError, DeterminismError
from everstep.exact.attributes import Watched
from everstep.exact.digest import tensor_digest
from everstep.exact.seeding import seed_all

_log = logging.getLogger(__name__)


class UpdateProbe:
    """Makes an update on a copy of parameters, gradients and optimizer; `compare` then looks at the real one.

    What cannot be copied (no room, or a part that refuses) is not compared, and the log says so. Hooks of the optimizer
    are not run on the copy: they belong to the user. Nothing of the original changes.
    """

    def __init__(self, optimizer: Optimizer, seed: int) -> None:
        self._optimizer = optimizer
        self._watched = Watched(optimizer)
        self._expected: list[str] | None = None
        try:
            twin = _twin(optimizer)
        except Exception as error:
            _log.info("the first update is not compared: %s cannot be copied (%s)", type(optimizer).__name__, error)
            return
        seed_all(seed)
        type(twin).step(twin)
        self._expected = _facts(twin)

    def compare(self, step: int) -> None:
        """Raises: DeterminismError if the real update has given other bits than the copy's. ConfigError if the
        optimizer keeps what changes where it cannot be carried."""
        changed = self._watched.changed()
        if changed:
            kind, name = type(self._optimizer).__name__, changed[0]
            value = getattr(self._optimizer, name, None)
            raise ConfigError(
                f"the optimizer {kind} keeps in self.{name} ({type(value).__name__}) what its updates change: that is "
                "not carried to workers that are healed or resumed; keep it in self.state or self.param_groups, or as "
                "plain values (numbers, strings, tensors, lists and dicts of them)"
            )
        if self._expected is None or self._expected == _facts(self._optimizer):
            return
        raise DeterminismError(
            f"the update of step {step} was made twice and gave different parameters or optimizer state: the optimizer "
            f"{type(self._optimizer).__name__} uses an operation or a random source that is not deterministic (the "
            "clock or os.urandom, say); use another optimizer, or torch's, numpy's or random's global generators in it"
        )


def _twin(optimizer: Optimizer) -> Optimizer:
    """A copy that shares nothing with the original. Its class's own pickling would lose what subclasses add."""
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            if parameter.grad is not None:
                copied.grad = parameter.grad.detach().clone()
            memo[id(parameter)] = copied
    twin: Optimizer = type(optimizer).__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            twin.__dict__[name] = OrderedDict()
        elif name != "step":  # a scheduler has wrapped the original's
            twin.__dict__[name] = copy.deepcopy(value, memo)
    return twin


def _facts(optimizer: Optimizer) -> list[str]:
    """Digests of every parameter and of its state, in the optimizer's order."""
    facts = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            facts.append(tensor_digest(parameter))
            state = optimizer.state.get(parameter, {})
            for key in sorted(state, key=str):
                value = state[key]
                facts.append(f"{key} {tensor_digest(value) if isinstance(value, torch.Tensor) else repr(value)}")
    return facts
