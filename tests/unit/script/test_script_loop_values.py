"""`everstep.state`: any attributes come back with the same types and bits, in the objects that the loop holds."""

from __future__ import annotations

import collections
import copy
import math
import pickle
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everstep
from everstep.base.errors import ConfigError
from everstep.exact.state import ModelState
from everstep.train.heal import pack_state, unpack_state


def made() -> Any:
    return everstep.state(
        best=math.inf,
        wait=0,
        name="a",
        nothing=None,
        losses=[1.5, [2]],
        last=collections.deque([1], maxlen=2),
        by_class={3: torch.zeros(2)},
        weight=torch.ones(2),
        array=np.zeros(2),
        layer=nn.Linear(2, 1),
        rng=random.Random(1),
        generator=torch.Generator().manual_seed(1),
        numpy=np.random.default_rng(1),
        legacy=np.random.RandomState(1),
    )


def move(state: Any) -> list[Any]:
    """Change everything; returns what comes next."""
    state.best, state.wait, state.nothing = -0.0, state.wait + 1, ("x", 1.0)
    state.losses.append(0.5)
    state.last.append(7)
    state.by_class[3].add_(1)
    state.weight.add_(1)
    state.array += 1
    state.extra = 5
    with torch.no_grad():
        state.layer.weight.add_(1)
    return draws(state)


def draws(state: Any) -> list[Any]:
    return [
        state.rng.random(),
        float(torch.rand(1, generator=state.generator)),
        state.numpy.random(),
        state.legacy.rand(),
    ]


def carried(state: Any) -> ModelState:
    return ModelState(nn.Module(), extras={"state": state})


def test_a_state_comes_back() -> None:
    one, other = made(), made()
    move(one)
    aliases = other.losses, other.weight, other.array
    unpack_state(carried(other), pack_state(carried(one)))
    assert (other.best, other.wait, other.nothing, other.extra) == (0.0, 1, ("x", 1.0), 5)
    assert math.copysign(1, other.best) == -1
    assert other.losses == [1.5, [2], 0.5] and other.last == collections.deque([1, 7], 2)
    assert torch.equal(other.by_class[3], torch.ones(2)) and torch.equal(other.weight, torch.full((2,), 2.0))
    assert torch.equal(one.layer.weight, other.layer.weight)
    assert draws(one) == draws(other)
    assert aliases[0] is other.losses and aliases[1] is other.weight and aliases[2] is other.array


def test_attributes_that_were_not_saved_go() -> None:
    state = made()
    saved = pack_state(carried(state))
    move(state)
    unpack_state(carried(state), saved)
    assert not hasattr(state, "extra") and repr(state).startswith("everstep.state(best=inf, wait=0, name='a'")


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(ConfigError, match="thing is a object, which cannot be saved"):
        pack_state(carried(everstep.state(thing=object())))


def test_an_object_that_the_loop_has_replaced_leaves_the_first_one_as_it_was() -> None:
    def begun() -> tuple[Any, Any, Any, Any]:
        start, history, teacher = torch.zeros(2), [0], nn.Linear(1, 1)
        with torch.no_grad():
            teacher.weight.zero_()
        return start, history, teacher, everstep.state(at=start, seen=history, net=teacher, best=math.inf)

    *_, one = begun()
    one.at, one.seen, one.net, one.best = torch.ones(2), [1, 2], nn.Linear(1, 1), 0.5
    start, history, teacher, other = begun()
    other.load_state_dict(one.state_dict())
    assert other.at.tolist() == [1, 1] and other.seen == [1, 2] and other.best == 0.5
    assert torch.equal(other.net.weight, one.net.weight)
    assert start.tolist() == [0, 0] and history == [0] and teacher.weight.item() == 0
    assert other.state_dict()["held"] == one.state_dict()["held"] == {name: [name] for name in ("at", "net", "seen")}


def test_an_object_that_the_loop_changes_in_place_stays_the_one_that_it_knows() -> None:
    start = torch.zeros(2)
    kept = everstep.state(at=start)
    before = everstep.state(at=torch.ones(2)).state_dict()
    kept.at = torch.full((2,), 7.0)
    kept.load_state_dict(before)  # a live worker goes back to a state from before that
    assert kept.at is start and start.tolist() == [1, 1] and "held" not in kept.state_dict()
    kept.load_state_dict(everstep.state(at=torch.ones(3)).state_dict())
    assert kept.at.tolist() == [1, 1, 1] and "held" not in kept.state_dict()


def exchange(kept: Any, step: int) -> None:
    """What loops do with objects: exchange them, share them, put them away and take them out again."""
    kept.cur, kept.prev = kept.prev, kept.cur
    kept.rng, kept.other_rng = kept.other_rng, kept.rng
    kept.cur.add_(kept.rng.random())
    if step == 2:
        kept.seen, kept.stack, kept.older = kept.cur, [kept.seen], kept.net
    if step == 3:
        kept.seen, kept.newest = torch.ones(3), kept.seen
        kept.best = kept.seen
    if step == 4:
        kept.seen.add_(1)
        del kept.newest
    if step == 5:
        kept.seen, kept.best = kept.stack.pop(), None
    if step == 6:
        kept.seen, kept.prev, kept.net = kept.prev, kept.seen, nn.Linear(1, 1)
        kept.net.load_state_dict(kept.older.state_dict())
    kept.seen.mul_(0.5)


def exchanged() -> Any:
    generators = {"rng": random.Random(1), "other_rng": random.Random(2)}
    return everstep.state(
        cur=torch.zeros(3), prev=torch.ones(3), seen=torch.ones(3), net=nn.Linear(1, 1), best=None, **generators
    )


def steps_of(kept: Any, first: int) -> list[str]:
    digests = []
    for step in range(first, 9):
        exchange(kept, step)
        digests.append(carried(kept).state_digest(step))
    return digests


@pytest.mark.parametrize("at", range(9))
def test_objects_that_the_loop_exchanges_give_the_bits_of_an_undisturbed_run(at: int) -> None:
    torch.manual_seed(0)
    kept, resumed = exchanged(), exchanged()
    for step in range(at):
        exchange(kept, step)
    saved, survivor_back = pack_state(carried(kept)), copy.deepcopy(kept)
    unpack_state(carried(resumed), saved)
    assert carried(resumed).state_digest(at) == carried(kept).state_digest(at)
    wanted = steps_of(survivor_back, at)
    assert steps_of(resumed, at) == wanted
    steps_of(kept, at)
    unpack_state(carried(kept), saved)
    assert steps_of(kept, at) == wanted


def test_exchanged_objects_are_the_first_ones_of_the_worker_that_is_resumed() -> None:
    kept, resumed = exchanged(), exchanged()
    firsts = resumed.cur, resumed.prev
    exchange(kept, 1)
    unpack_state(carried(resumed), pack_state(carried(kept)))
    assert resumed.cur is firsts[1] and resumed.prev is firsts[0]
    assert resumed.state_dict()["held"] == kept.state_dict()["held"]
    exchange(resumed, 1)
    assert "held" not in resumed.state_dict()


def test_a_worker_that_goes_back_loads_into_the_object_of_another_structure() -> None:
    kept = everstep.state(student=nn.Linear(1, 1), average=[0])
    kept.student, kept.average = nn.Linear(5, 5), nn.Linear(2, 2)
    bigger, saved = kept.student, pack_state(carried(kept))
    weight = bigger.weight.detach().clone()
    with torch.no_grad():
        bigger.weight.zero_()
    unpack_state(carried(kept), saved)
    assert kept.student is bigger and torch.equal(bigger.weight, weight)
    with pytest.raises(ConfigError, match="has set average to an object with a state"):
        unpack_state(carried(everstep.state(student=nn.Linear(5, 5), average=[0])), saved)


def test_a_checkpoint_that_does_not_tell_the_objects_loads_into_the_first_ones() -> None:
    kept = everstep.state(cur=torch.zeros(3), net=nn.Linear(1, 1), best=torch.zeros(1))
    first = kept.cur
    kept.load_state_dict({"values": {"cur": torch.ones(3), "best": None}, "objects": {"net": kept.net.state_dict()}})
    assert kept.cur is first and first.tolist() == [1, 1, 1] and kept.best is None


def test_a_numpy_generator_spawns_what_it_would_have_spawned() -> None:
    kept, resumed, older = (everstep.state(rng=np.random.default_rng(1)) for _ in range(3))
    kept.rng.spawn(3)
    saved = kept.state_dict()
    unpack_state(carried(resumed), pack_state(carried(kept)))
    older.load_state_dict({**saved, "objects": {"rng": kept.rng.bit_generator.state}})  # as it was saved before
    assert resumed.rng.spawn(1)[0].random() == kept.rng.spawn(1)[0].random()
    assert resumed.rng.bit_generator.seed_seq.n_children_spawned == 4
    assert older.rng.bit_generator.seed_seq.n_children_spawned == 0
    assert older.rng.random() == kept.rng.random()


def test_types_of_containers_come_back() -> None:
    def begun() -> tuple[Any, Any]:
        seen: Any = collections.defaultdict(int)
        return seen, everstep.state(seen=seen, fixed=frozenset({1}))

    (counts, kept), (there, resumed) = begun(), begun()
    counts["a"] += 1
    unpack_state(carried(resumed), pack_state(carried(kept)))
    there["b"] += 1
    assert resumed.seen is there and there == {"a": 1, "b": 1} and type(resumed.fixed) is frozenset
    kept.seen = collections.defaultdict(list)
    unpack_state(carried(resumed), pack_state(carried(kept)))
    resumed.seen["c"].append(1)
    assert resumed.seen == {"c": [1]}


def test_copies_have_first_objects_of_their_own() -> None:
    kept = everstep.state(cur=torch.zeros(3), seen=[1])
    assert weakref.ref(kept)() is kept
    old = everstep.state()
    old.__setstate__({"cur": torch.zeros(3)})  # the form of older pickles
    for other in (copy.copy(kept), copy.deepcopy(kept), pickle.loads(pickle.dumps(kept)), old):
        other.load_state_dict({"values": {"cur": torch.ones(4)}, "objects": {}})
        assert other.cur.tolist() == [1] * 4 and "held" not in other.state_dict()
    first = kept.cur
    kept.load_state_dict({"values": {"cur": torch.ones(3)}, "objects": {}})
    assert kept.cur is first
