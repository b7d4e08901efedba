"""What a callback of `transformers.Trainer` keeps: carried with the same bits, or refused by name."""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from everstep.base.errors import ConfigError
from everstep.exact.jsonable import decode, encode
from everstep.integrations.callback_state import CallbackState
from everstep.script.reachable import Carried
from sampling import needs

pytestmark = needs("transformers")


class Kept:
    """An object of the user's without a state_dict."""

    def __init__(self) -> None:
        self.mean, self.calls = torch.zeros(2), 0


class Rows(torch.utils.data.Dataset[int]):
    def __init__(self) -> None:
        self.rows = [object()]

    def __getitem__(self, k: int) -> int:
        return k


MODEL = torch.nn.Linear(2, 2)


class Keeps:
    """A callback: what it derives from does not matter."""

    def __init__(self) -> None:
        self.loss, self.seen, self._hidden = 0.0, [0.5], {"best": None}
        self.recent, self.met = deque([1.0], maxlen=2), {1}
        self.average, self._array = torch.zeros(2), np.zeros(3)
        self.ema, self.draws = AveragedModel(MODEL), random.Random(3)
        self.kept, self.model, self.weights, self.rows = Kept(), MODEL, list(MODEL.parameters()), Rows()

    def goes_on(self) -> None:
        self.loss, self._hidden["best"] = 0.25, 3
        self.seen.append(0.7)
        self.recent.extend((2.0, 3.0))
        self.met |= {2, 5}
        self.average = self.average + 1
        self._array += 2
        self.ema.n_averaged += 1
        self.draws.random()
        self.kept.mean += 1
        self.kept.calls += 1
        self.rows.rows.append(object())


def state(callback: Any) -> CallbackState:
    return CallbackState(callback, Carried.of(MODEL), ())


def moved(one: Any, other: Any) -> None:
    """As a checkpoint or a heal does."""
    tensors: dict[str, torch.Tensor] = {}
    saved = encode(state(one).state_dict(), "x", tensors)
    state(other).load_state_dict(decode(saved, {name: t.clone() for name, t in tensors.items()}))


def test_all_that_a_callback_keeps_is_carried() -> None:
    one, other = Keeps(), Keeps()
    seen, mean, parameters = other.seen, other.kept.mean, other.weights
    one.goes_on()
    moved(one, other)
    assert (other.loss, other.seen, other._hidden) == (0.25, [0.5, 0.7], {"best": 3})
    assert (list(other.recent), other.recent.maxlen, other.met) == ([2.0, 3.0], 2, {1, 2, 5})
    assert torch.equal(other.average, torch.ones(2)) and other._array.tolist() == [2.0] * 3
    assert other.ema.n_averaged == 1 and other.draws.random() == one.draws.random()
    assert torch.equal(other.kept.mean, torch.ones(2)) and other.kept.calls == 1
    assert other.seen is seen and other.kept.mean is mean, "a script may have other names for them"
    assert other.model is MODEL and other.weights is parameters and parameters[0] is MODEL.weight


def test_what_was_not_there_yet_is_gone_after_the_way_back() -> None:
    one, other = Keeps(), Keeps()
    vars(one).update(helper=None)
    vars(other).update(later=1, noted=torch.ones(1), made=Kept(), helper=Kept())
    moved(one, other)
    assert not [name for name in ("later", "noted", "made") if hasattr(other, name)]
    assert other.helper is None  # type: ignore[attr-defined]


def test_times_are_carried_and_not_compared() -> None:
    one, other = Keeps(), Keeps()
    for callback in (one, other):
        vars(callback).update(began=time.perf_counter(), times=[time.time_ns()])
    said = [state(callback).state_dict() for callback in (one, other)]
    assert said[0].pop("plain") != said[1].pop("plain")
    both = [encode(found, "x", None) for found in said]
    assert both[0] == both[1]
    moved(one, other)
    assert (other.began, other.times) == (one.began, one.times)  # type: ignore[attr-defined]


def test_one_that_keeps_nothing_has_no_state() -> None:
    class Shows:
        def __init__(self) -> None:
            self.model, self.show = MODEL, print

    assert state(Shows()).state_dict() == {}


def test_a_state_of_an_older_checkpoint_is_read() -> None:
    other = Keeps()
    state(other).load_state_dict({"loss": 0.125, "seen": [1.0]})
    assert (other.loss, other.seen) == (0.125, [1.0])


def test_what_cannot_be_carried_is_refused_by_name_once_it_has_changed() -> None:
    one, other = Keeps(), Keeps()
    for callback in (one, other):
        vars(callback).update(rows_of=[Kept()], source=iter([1, 2, 3]), lock=object())
    kept = state(one)
    kept.state_dict()
    same = kept.state_dict()
    state(other).load_state_dict(same)
    next(one.source)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"Keeps\.source has changed while it trained, and cannot be carried: make"):
        state(other).load_state_dict(kept.state_dict())
    one.rows_of[0].calls += 1  # type: ignore[attr-defined]
    assert kept.state_dict()["lost"]["names"] == ["rows_of", "source"]


@pytest.mark.parametrize("made", [AveragedModel(MODEL), Kept()], ids=["with a state", "of the user's class"])
def test_an_object_that_is_made_late_is_refused_by_name(made: Any) -> None:
    one = Keeps()
    vars(one).update(late=made)
    with pytest.raises(ConfigError, match=r"Keeps\.late was made while it trained: make it in __init__"):
        moved(one, Keeps())
