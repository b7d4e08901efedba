"""What moving state does to a worker: in which order, to which stages, and what is left as it was."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from everstep.base.cause import Cause
from everstep.base.errors import CollectiveAborted, InvariantViolation
from everstep.base.extents import NONE, WHOLE, Extents
from everstep.base.plan import Shard
from everstep.checkpoint.vault import StageState
from everstep.exact.image import sizes_of
from everstep.protocol.driver import operations as do
from everstep.protocol.step_types import Key
from everstep.train import heal
from everstep.train.executor import Unusable
from everstep.train.heal import ReceivedOffer
from everstep.train.saving import LOOP, PAST
from everstep.train.taking import Copier
from transferring import ME, OTHERS, PLAN, RECORDS, Mover, Stage

BEYOND = Key(5, 0)


def offer(position: Key, *stages: Stage, **more: Any) -> ReceivedOffer:
    """stages: whose states come, from stage 0 on."""
    told = {"records": RECORDS, "untold": b"untold", **more}
    return ReceivedOffer(position=position, states={k: one.copied() for k, one in enumerate(stages)}, **told)


def other(seed: int) -> Stage:
    return Stage(0, seed, [])


def gives(monkeypatch: pytest.MonkeyPatch, mover: Mover, *offers: ReceivedOffer) -> None:
    """These come from others, whoever is asked."""

    def settle(copier: Any, *asked: Any) -> list[ReceivedOffer]:
        mover.calls.append(("settle", *asked))
        return list(offers)

    monkeypatch.setattr(Copier, "settle", settle)


# ---- a generation settles


def test_state_comes_whole_before_anything_changes_and_all_who_read_the_old_one_are_waited_for(monkeypatch) -> None:
    mover, given = Mover(), [other(11), other(12)]
    gives(monkeypatch, mover, offer(BEYOND, *given, application=b"loop"))
    pieces: Any = {0: "pieces"}
    copied = mover.transfers.fetch(do.Fetch(1, 3, PLAN, BEYOND, {0: (0,), 1: (0,)}, pieces))
    assert mover.names() == [
        *("settle", "updates.stand_still", "updates.forget"),
        *("abandon", "prove", "abandon", "prove", "loop.take"),
        *("publisher.learn", "updates.strange", "publisher.hold", "updates.arrive"),
    ]
    assert mover.said("settle") == [(PLAN, BEYOND, {0: (0,), 1: (0,)}, pieces)]
    assert mover.said("loop.take") == [(b"loop", 5)] and mover.said("publisher.learn") == [(b"untold", 5)]
    outcome = ("outcome", 5, RECORDS)
    assert mover.said("publisher.hold") == [(outcome, 2, {"strange": 5})]
    assert mover.said("updates.arrive") == [(outcome, 5)]
    assert mover.said("phase") == [("heal", 5, PLAN)]
    assert copied == do.Copied(RECORDS, {})
    for k, one in enumerate(given):
        assert torch.equal(mover.stages[k].weights(), one.weights()) and mover.stages[k].update.proven


def test_who_cannot_get_all_changes_nothing(monkeypatch) -> None:
    mover = Mover()

    def settle(*asked: Any) -> list[ReceivedOffer]:
        raise CollectiveAborted("a newer plan has come")

    monkeypatch.setattr(Copier, "settle", settle)
    with pytest.raises(CollectiveAborted):
        mover.transfers.fetch(do.Fetch(1, 3, PLAN, BEYOND, {0: (0,)}))
    with pytest.raises(CollectiveAborted):
        mover.transfers.restore(do.Restore(1, 3, PLAN, 2, {0: (0,)}, {}, ()))
    assert mover.names() == []


def test_who_lacks_a_stage_of_its_own_step_keeps_what_it_knows_of_the_step(monkeypatch) -> None:
    """Its loop has gone on since the update, its gradients are right, and the step was told of."""
    mover, there = Mover(), other(11)
    mover.stages[0].count.value = 17
    gives(monkeypatch, mover, offer(Key(4, 0), there))
    assert mover.transfers.fetch(do.Fetch(1, 3, PLAN, Key(4, 0), {0: (0,)})) == do.Copied(RECORDS, {})
    assert mover.names() == ["settle", "updates.stand_still", "abandon", "prove"]
    assert torch.equal(mover.stages[0].weights(), there.weights()) and mover.stages[0].count.value == 17


@pytest.mark.parametrize(
    ("at", "here", "value"), [(Key(1, 0), Key(1, 0), 17), (Key(4, 1), Key(4, 0), 3), (Key(0, 0), Key(0, 0), 3)]
)
def test_only_who_is_at_its_donors_position_keeps_its_loop(monkeypatch, at: Key, here: Key, value: int) -> None:
    """Initial states are the donor's in all."""
    mover, there = Mover(here), other(11)
    mover.stages[0].count.value, there.count.value = 17, 3
    gives(monkeypatch, mover, offer(at, there, application=heal.pack_state(there.application)))
    loop: Any = SimpleNamespace(take=lambda data, number: heal.unpack_state(mover.stages[0].application, data))
    loop.moves = mover.loop.moves
    monkeypatch.setattr(mover.transfers, "_loop", loop)
    mover.transfers.fetch(do.Fetch(1, 3, PLAN, at, {0: (0,)}))
    assert mover.stages[0].count.value == value


def test_if_nobody_had_to_give_anything_nothing_has_come(monkeypatch) -> None:
    mover = Mover()
    gives(monkeypatch, mover)
    assert mover.transfers.fetch(do.Fetch(1, 3, PLAN, Key(4, 0), {})) == do.Copied()
    assert mover.names() == ["settle", "updates.stand_still"]


@pytest.mark.parametrize(
    ("position", "gathers", "agreed"),
    [
        (Key(5, 0), {}, RECORDS),
        (Key(5, 0), {Key(5, 0): OTHERS}, OTHERS),
        (Key(5, 1), {Key(5, 0): OTHERS}, OTHERS),
        (Key(5, 1), {}, None),  # the records are of a gather
        (Key(5, 1), {Key(5, 1): OTHERS}, None),
    ],
)
def test_the_outcome_of_a_copied_step_is_what_the_records_of_its_update_say(
    monkeypatch, position: Key, gathers: Any, agreed: Any
) -> None:
    mover = Mover()
    gives(monkeypatch, mover, offer(position, other(11), gathers=gathers))
    mover.transfers.fetch(do.Fetch(1, 3, PLAN, position, {0: (0,)}))
    outcome = agreed and ("outcome", 5, agreed)
    assert mover.said("updates.arrive") == [(outcome, 5)]
    assert [call[0] for call in mover.said("publisher.hold")] == [outcome] * bool(agreed)


# ---- all go back


def kept(stage: Stage) -> Any:
    return stage.copied(), WHOLE


def test_of_each_stage_comes_the_state_that_its_first_source_has(monkeypatch) -> None:
    """One from others, one from own memory, one that stands there already."""
    mover = Mover(stages=(0, 1, 2))
    here, there, mine = mover.stages[2].weights(), other(11), other(12)
    mover.kept[2] = {0: kept(other(13)), 1: kept(mine)}
    gives(monkeypatch, mover, offer(Key(2, 0), there))
    sources = {0: (0, ME), 1: (ME, 0), 2: (ME,)}
    own = {1: OTHERS[8]}
    pieces: Any = {0: "pieces"}
    mover.transfers.past = 9
    copied = mover.transfers.restore(do.Restore(1, 3, PLAN, 2, sources, own, (2,), pieces))
    assert copied == do.Copied(own) and mover.transfers.past == 0
    assert mover.said("settle") == [(PLAN, Key(2, 0), sources, pieces)] and mover.said("phase") == [("heal", 2, PLAN)]
    for stage, right in {0: there.weights(), 1: mine.weights(), 2: here}.items():
        assert torch.equal(mover.stages[stage].weights(), right)
    changed = [call for call in mover.calls if call[0] in ("abandon", "prove")]
    assert changed.count(("prove", 2)) == 0 and ("abandon", 2) in changed
    order = mover.names()
    assert order.index("settle") < order.index("updates.stand_still") < order.index("updates.forget")
    assert order.index("updates.forget") < order.index("abandon") < order.index("loop.went_back")
    assert mover.said("loop.went_back") == [(2,)] and not mover.said("restorer.restore")
    assert mover.said("updates.arrive") == [(("outcome", 2, own), 2)] and not mover.said("publisher.hold")


def test_records_are_those_of_who_gave_the_state_where_one_has_none(monkeypatch) -> None:
    mover = Mover()
    empty = offer(Key(2, 0), records={})
    gives(monkeypatch, mover, empty, offer(Key(2, 0)), offer(Key(2, 0), records=OTHERS))
    assert mover.transfers.restore(do.Restore(1, 3, PLAN, 2, {0: (0,)}, {}, ())).records == RECORDS
    gives(monkeypatch, mover, empty)
    assert mover.transfers.restore(do.Restore(1, 3, PLAN, 2, {0: (0,)}, {}, ())).records == {}
    assert mover.said("updates.arrive")[-1] == (None, 2)


def test_who_stays_at_its_step_goes_on_with_what_its_loop_knows(monkeypatch) -> None:
    mover = Mover()
    mover.stages[0].count.value = 17
    gives(monkeypatch, mover, offer(Key(4, 0), other(11)))
    mover.transfers.restore(do.Restore(1, 3, PLAN, 4, {0: (0,)}, RECORDS, ()))
    assert not mover.said("loop.went_back") and mover.stages[0].count.value == 17


def test_a_snapshot_that_is_not_what_it_was_is_told_before_anything_changes(monkeypatch) -> None:
    mover, mine = Mover(), other(12)
    blocks = mine.copied()
    spoilt = bytearray(blocks.blocks[0])  # type: ignore[arg-type]
    spoilt[0] ^= 1
    blocks.blocks[0] = memoryview(bytes(spoilt))
    mover.kept[2] = {1: (blocks, WHOLE)}
    gives(monkeypatch, mover)
    with pytest.raises(Unusable, match="stage 1 at step 2") as raised:
        mover.transfers.restore(do.Restore(1, 3, PLAN, 2, {1: (ME,)}, {}, ()))
    assert raised.value.why.cause is Cause.CORRUPT and not raised.value.torn
    assert mover.said("keeper.check") == [(1, 2)] and "updates.stand_still" not in mover.names()


class Rotting(StageState):
    """Once it has been checked, a block of it changes; at most one is read at a time."""

    def read_block(self, index: int) -> memoryview:
        block = super().read_block(index)
        self.blocks[index] = memoryview(bytes(len(block)))
        return block


def test_a_snapshot_that_changes_after_it_was_checked_ends_the_worker(monkeypatch) -> None:
    mover, state = Mover(), other(12).copied()
    mover.kept[2] = {1: (Rotting(state.made_of, state.blocks), WHOLE)}
    gives(monkeypatch, mover)
    with pytest.raises(Unusable, match="the snapshot of step 2: block 0 is not what it was") as raised:
        mover.transfers.restore(do.Restore(1, 3, PLAN, 2, {1: (ME,)}, {}, ()))
    assert raised.value.why.cause is Cause.CORRUPT and raised.value.torn


def test_blocks_of_a_snapshot_are_read_as_they_are_loaded(monkeypatch) -> None:
    """It may lie with other hosts, and be larger than the memory of this one."""
    mover, mine, read = Mover(), other(12), list[weakref.ref[Any]]()

    class Elsewhere(StageState):
        def read_block(self, index: int) -> memoryview:
            assert sum(one() is not None for one in read) <= 1, "blocks that were read before are still here"
            block = np.frombuffer(super().read_block(index), np.uint8).copy()
            read.append(weakref.ref(block))
            return memoryview(block)

    state = mine.copied()
    mover.kept[2] = {1: (Elsewhere(state.made_of, state.blocks), WHOLE)}
    gives(monkeypatch, mover)
    mover.transfers.restore(do.Restore(1, 3, PLAN, 2, {1: (ME,)}, {}, ()))
    assert len(read) == 2 * state.n_blocks and torch.equal(mover.stages[1].weights(), mine.weights())


def test_a_snapshot_of_the_own_share_is_enough(monkeypatch) -> None:
    mover, mine = Mover(stages=(0, 2)), other(12)
    state = mine.copied()
    share = Extents.numbered(sizes_of(state.manifest()), range(1, state.n_blocks))
    mover.kept[2] = {2: (StageState(state.made_of, [None, *state.blocks[1:]]), share)}
    gives(monkeypatch, mover)
    plan = replace(PLAN, shards=(Shard(ME, 2, state=share),))
    mover.transfers.restore(do.Restore(1, 3, plan, 2, {2: (ME,)}, {}, ()))
    assert ("prove", 2) in mover.calls
    with pytest.raises(Unusable):
        mover.transfers.restore(do.Restore(1, 3, PLAN, 2, {2: (ME,)}, {}, ()))


def test_a_part_that_is_kept_and_the_rest_that_is_live_are_whole_together(monkeypatch) -> None:
    mover = Mover(stages=(0,))
    state, before = mover.stages[0].copied(), mover.stages[0].weights()
    of = sizes_of(state.manifest())
    mover.machine.held[0] = Extents.numbered(of, range(1, state.n_blocks))
    mover.kept[4] = {0: (StageState(state.made_of, [state.blocks[0], *[None] * (state.n_blocks - 1)]), NONE)}
    gives(monkeypatch, mover)
    with pytest.raises(Unusable):
        mover.transfers.restore(do.Restore(1, 3, PLAN, 4, {0: (ME,)}, {}, ()))
    mover.kept[4] = {0: (mover.kept[4][0][0], Extents.numbered(of, [0]))}
    mover.transfers.restore(do.Restore(1, 3, PLAN, 4, {0: (ME,)}, {}, ()))
    assert ("prove", 0) in mover.calls and torch.equal(mover.stages[0].weights(), before)


def test_what_is_live_alone_is_enough_where_it_is_of_that_step(monkeypatch) -> None:
    mover = Mover(stages=(0,))
    gives(monkeypatch, mover)
    mover.transfers.restore(do.Restore(1, 3, PLAN, 4, {0: (ME,)}, {}, ()))
    assert ("prove", 0) in mover.calls
    with pytest.raises(InvariantViolation, match="stated as kept"):
        mover.transfers.restore(do.Restore(1, 3, PLAN, 3, {0: (ME,)}, {}, ()))


class Read:
    """A checkpoint that was read."""

    def __init__(self, step: int, **application: bytes) -> None:
        self.step, self.application = step, application


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_stage_that_nobody_holds_comes_from_disk_with_the_loop(monkeypatch, in_memory: bool) -> None:
    """Where others have the step in memory, they enter its round again, and so do all."""
    mover = Mover(stages=(0, 1, 2))
    mover.in_memory, mover.restored = in_memory, Read(2, **{LOOP: b"loop", PAST: b"past"})
    mover.kept[2] = {0: kept(other(12))}
    gives(monkeypatch, mover)
    copied = mover.transfers.restore(do.Restore(1, 3, PLAN, 2, {0: (ME,), 1: (), 2: ()}, {}, ()))
    assert mover.said("restorer.restore") == [(2, [1, 2])] and copied == do.Copied(OTHERS)
    outcome = ("outcome", 2, OTHERS)
    assert mover.said("publisher.hold") == [(outcome, 3, {"strange": 2})]
    assert mover.said("updates.arrive") == [(outcome, 2)]
    assert mover.said("loop.refuse") == [((), "the job cannot go on from the checkpoint of step 2")]
    order = mover.names()
    assert order.index("loop.went_back") < order.index("loop.refuse") < order.index("loop.take")
    assert mover.said("loop.take") == [(b"loop", 2)]
    assert mover.said("loop.take_entered") == [(b"past",)] * (not in_memory)
    assert mover.transfers.past == (0 if in_memory else 2)


def test_own_records_of_the_step_count_before_those_of_its_checkpoint(monkeypatch) -> None:
    mover = Mover()
    mover.restored = Read(2)
    gives(monkeypatch, mover)
    assert mover.transfers.restore(do.Restore(1, 3, PLAN, 2, {0: ()}, RECORDS, ())) == do.Copied(RECORDS)
    assert not mover.said("loop.take") and not mover.said("loop.take_entered") and mover.transfers.past == 0


def test_of_a_checkpoint_without_records_nothing_is_told(monkeypatch) -> None:
    mover = Mover()
    mover.restored = Read(2)
    mover.recorded = {}
    gives(monkeypatch, mover)
    assert mover.transfers.restore(do.Restore(1, 3, PLAN, 2, {0: ()}, {}, ())) == do.Copied()
    assert not mover.said("publisher.hold") and mover.said("updates.arrive") == [(None, 2)]


def test_at_step_0_what_nobody_holds_is_built_and_no_checkpoint_is_read(monkeypatch) -> None:
    mover = Mover(Key(4, 0), (0, 1))
    with torch.no_grad():
        for parameter in mover.stages[1].parts.model.parameters():
            parameter.fill_(2.0)
    gives(monkeypatch, mover)
    copied = mover.transfers.restore(do.Restore(1, 3, PLAN, 0, {1: ()}, {}, ()))
    assert torch.equal(mover.stages[1].weights(), Stage(1, 1, []).weights())
    assert copied.built == {1: Stage(1, 1, []).digest(0)} and list(mover.stages) == [1]
    assert not mover.said("restorer.restore") and mover.said("updates.arrive") == [(None, 0)]
