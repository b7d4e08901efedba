"""The state of the user's loop, as it was right after an update, whatever the loop has made of it since."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from everstep.exact.settings import Settings
from everstep.exact.state import ModelState
from everstep.train.heal import unpack_state
from everstep.train.saving import LoopState


class Average:
    """A tensor that is changed in place, and a count."""

    def __init__(self) -> None:
        self.mean, self.count = torch.zeros(3), 0

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean.copy_(state["mean"])
        self.count = state["count"]

    def go_on(self) -> None:
        self.mean += 1.0
        self.count += 1


SETTINGS = Settings(nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]))


def loop_state(extras: dict[str, Any], model: nn.Module | None = None) -> LoopState:
    application = ModelState(nn.Module(), extras=extras)
    settings = Settings(model, torch.optim.SGD(model.parameters())) if model is not None else SETTINGS
    application.settings = settings
    whole: Any = SimpleNamespace(split=False, only=SimpleNamespace(application=application, state=application))
    whole.any = whole.only
    return LoopState(whole)


def test_what_is_given_is_of_the_update_though_the_loop_has_gone_on() -> None:
    average = Average()
    loop = loop_state({"average": average})
    average.go_on()
    loop.remember(4)
    average.go_on()
    loop.remember(4)  # other stages of the same step have come, say
    other = Average()
    unpack_state(ModelState(nn.Module(), extras={"average": other}), loop.after(4))
    assert other.count == 1 and torch.equal(other.mean, torch.ones(3))
    assert loop.after(3) == loop.after(5) == b""


def test_whoever_goes_back_to_its_own_step_forgets_what_it_learnt() -> None:
    average = Average()
    loop = loop_state({"average": average})
    average.go_on()
    loop.remember(4)
    average.go_on()
    loop.went_back(4)
    assert average.count == 1 and torch.equal(average.mean, torch.ones(3))
    assert loop.after(4) == b"", "until the state is said to be that of a step"
    average.go_on()
    loop.went_back(0)
    assert average.count == 0 and torch.equal(average.mean, torch.zeros(3))


def test_a_loop_without_state_gives_none() -> None:
    loop = loop_state({})
    loop.remember(2)
    assert loop.after(2) == b""


def test_what_the_loop_has_set_since_the_update_is_not_given_and_who_takes_it_sets_it() -> None:
    """Its body is run again from there: a dropout that becomes less in each step does so once."""
    here, there = (nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1)) for _ in range(2))
    loop, taker = loop_state({}, here), loop_state({}, there)
    for each in (loop, taker):
        each._stages.any.state.settings.begin()
    here[0].p = 0.4
    loop.remember(1)
    assert loop.after(1)
    here[0].p = 0.3
    here[0].eval()
    given = loop.after(1)
    unpack_state(taker._stages.any.application, given)
    assert (there[0].p, there[0].training, here[0].p) == (0.4, True, 0.3)
    assert loop_state({}).after(-1) == b""
