"""The state of the user's loop, as it was right after an update, whatever the loop has made of it since."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from everstep.base.errors import Uncarried
from everstep.exact.settings import Settings
from everstep.exact.state import ModelState
from everstep.script.flow_sources import prepares
from everstep.train.heal import unpack_state
from everstep.train.loop_state import LoopState


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
    optimizer = torch.optim.SGD(model.parameters()) if model is not None else None
    settings = Settings(model, optimizer) if model is not None else SETTINGS
    application.settings = settings
    parts = SimpleNamespace(model=model, optimizer=optimizer)
    whole: Any = SimpleNamespace(
        split=False,
        only=SimpleNamespace(
            application=application,
            state=application,
            parts=parts,
            lanes=SimpleNamespace(settle_buffers=lambda: None),
        ),
    )
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
    here: Any
    there: Any
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


def test_a_round_that_is_done_begins_as_it_began_and_ends_as_after_its_update() -> None:
    """Before its batches a loop counts, and sets what its model drops; in the worker that takes the state both are
    done once more, from where they were done first, and put back."""
    here: Any
    there: Any
    here, there = (nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1)) for _ in range(2))
    averages = Average(), Average()
    loop, taker = loop_state({"a": averages[0]}, here), loop_state({"a": averages[1]}, there)
    for each in (loop, taker):
        each.begin(prepares=True)
    for number, p in ((1, 0.4), (2, 0.3)):
        loop.enter(number)
        averages[0].go_on()
        here[0].p = p
        loop.reach()
        loop.remember(number)
    loop.enter(3)
    here[0].p = 0.1
    averages[0].go_on()
    taker.take(loop.told(2), 2)
    taker.remember(2)
    taker.enter_again(2)
    assert (averages[1].count, there[0].p) == (1, 0.4)
    assert taker.after(2) == loop.after(2) and taker.entered(2) == loop.entered(2)
    averages[1].go_on()
    there[0].p = 0.3
    averages[1].go_on()
    taker.reach()
    assert (averages[1].count, there[0].p) == (2, 0.3)
    taker.take_entered(loop.entered(3))
    assert (averages[1].count, there[0].p) == (2, 0.3)
    assert loop.entered(1) == b"", "two rounds are known"


def test_tensors_stand_still_before_the_batches_of_a_step() -> None:
    model: Any = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    loop = loop_state({}, model)
    optimizer = loop._stages.only.parts.optimizer
    optimizer.state[model[0].bias]["momentum_buffer"] = torch.zeros(1)
    loop.begin(prepares=True)

    def scale(tensor: torch.Tensor) -> None:
        with torch.no_grad():
            tensor.mul_(2)

    def renew() -> None:
        optimizer.state[model[0].bias]["momentum_buffer"] = torch.zeros(1)

    acts: dict[str, Any] = {
        "parameter 0.weight": lambda: scale(model[0].weight),
        "buffer 1.running_mean": lambda: scale(model[1].running_mean),
        "the optimizer's momentum_buffer of 0.bias": renew,
    }
    for number, (name, act) in enumerate(acts.items()):
        loop.enter(number)
        with loop.paused():
            act()  # an evaluation, say
        loop.reach()
        act()  # past the batches
        loop.enter(number)
        act()
        with pytest.raises(Uncarried, match=f"{name} was changed by the loop before the batches"):
            loop.reach()


@pytest.mark.parametrize(
    ("head", "body", "found"),
    [
        ("for step in run", "for x in step: pass", False),
        ("for k, step in enumerate(run)", "for x in step: pass", False),
        ("for step in run", "for k, x in enumerate(step): pass", False),
        ("for step in run", "n = 1\n    for x in step: pass", True),
        ("for step in run", "for x in more(step): pass", True),
        ("for step in run", "for x in others: pass\n    for x in step: pass", True),
    ],
)
def test_whether_a_loop_does_something_before_the_batches_its_code_says(
    tmp_path: Path, head: str, body: str, found: bool
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{head}:\n    {body}\n")

    class Seen(Exception):
        """The frame is known."""

    class Asks:
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            raise Seen(prepares(sys._getframe(1)))

    with pytest.raises(Seen) as seen:
        exec(compile(script.read_text(), str(script), "exec"), {"run": Asks()})
    assert seen.value.args == (found,)


@pytest.mark.parametrize("prepares", [True, False])
def test_a_follower_gets_what_the_loop_has_moved_since_the_update(prepares: bool) -> None:
    """And one that gets the state of a step whose round is over does not make the change again."""
    models = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    averages = Average(), Average()
    loop, follower = (loop_state({"a": average}, model) for average, model in zip(averages, models, strict=True))
    for each in (loop, follower):
        each.begin(prepares)
        each.remember(1)
        assert not each.moves.past(1) and not each.moves.known
    with torch.no_grad():
        models[0][0].weight.mul_(2)
        models[0][1].running_mean.add_(1)
    assert loop.moves.midway() == "parameter 0.weight" and not loop.moves.past(1)
    with loop.moves.waiting():
        with loop.moves.waiting():  # a barrier within what is evaluated
            pass
        assert loop.moves.astray == "parameter 0.weight"
    assert not loop.moves.astray
    averages[0].go_on()
    loop.enter(2)
    assert loop.reach() and loop.moves.known and loop.moves.past(1)
    assert loop.moves.told.keys() == {"parameter 0.weight", "buffer 1.running_mean"}
    averages[0].go_on()
    expected = models[0][1].running_mean.clone()
    models[0][1].running_mean.add_(1)  # by a lane
    follower.take(loop.fed(2), 2)
    assert averages[1].count == 2 and torch.equal(models[1][0].weight, models[0][0].weight)
    assert torch.equal(models[1][1].running_mean, expected)
    taker = loop_state({"a": Average()}, nn.Linear(2, 2))
    taker.take_entered(loop.going_on(2))
    assert taker._stages.any.application.extras["a"].count == (1 if prepares else 2)
    loop.remember(2)
    assert not loop.moves.past(2) and not loop.reach(), "that it moves tensors is known"
    loop.enter(3)
    loop.reach()
    assert not loop.moves.past(2), "nothing was moved after this one"
