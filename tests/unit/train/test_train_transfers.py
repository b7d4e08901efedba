"""What a worker still has after it has gone back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from divided_members import DividedMember
from everstep.base.errors import CheckpointCorrupt, Evicted
from everstep.base.extents import WHOLE, Extents
from everstep.base.plan import SEGMENTS, Member, Plan, Seat, Shard
from everstep.exact.snapshot import Snapshot, StateInPlace
from everstep.placement.shards import fed_blocks, share
from everstep.protocol.driver import operations as do
from everstep.protocol.moving.giver import AskerCame, JointAsk
from everstep.protocol.step_types import Key
from everstep.train.heal import Donor, Offer, ReceivedOffer
from everstep.train.transfers import Transfers
from everstep.train.view import Stages

PLAN = Plan(2, "because", (Member(0, 0, "host"),), (Seat(0, 1, "active", (0,)),), 1, stages=3)


class Built:
    """A stage as it was built."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.application: dict[str, Any] = {}
        self.state: Any = SimpleNamespace(memory=SimpleNamespace(others=None))

    def digest(self, number: int) -> str:
        return f"stage {self.stage}"

    def abandon(self) -> None:
        """Nothing of a step is under way."""


@pytest.mark.parametrize(("at", "left"), [(3, [1]), (0, [0, 1])])
def test_whoever_goes_back_to_another_step_keeps_no_stage_of_the_step_that_it_leaves(at: int, left: list[int]) -> None:
    """A plan that comes at step 0 takes a stage that is still there for an initial state."""
    stages: Any = Stages(3, Built)  # type: ignore[arg-type]
    stages.want((0, 1))
    before = stages[0]
    machine = SimpleNamespace(held={0: WHOLE}, position=Key(at, 0), step=at)
    view: Any = MagicMock(stages=stages, me=0)
    view.driver.machine, view.step = machine, at
    transfers = Transfers(view, MagicMock(), MagicMock(), MagicMock(), MagicMock(), MagicMock())
    assert transfers.restore(do.Restore(1, 2, PLAN, 0, {1: ()}, {}, (), {})).built == {1: "stage 1"}
    assert list(stages) == left
    stages.want((0,))
    assert (stages[0] is before) == (at == 0)


@pytest.mark.parametrize("first", [0, 1])
def test_of_offers_of_several_steps_the_loops_state_is_that_of_the_newest(first: int) -> None:
    older = ReceivedOffer(position=Key(4, 0), application=b"older", states={})
    newer = ReceivedOffer(position=Key(5, 0), application=b"newer", states={})
    loop, view = MagicMock(), MagicMock(stages={}, me=0)
    transfers = Transfers(view, MagicMock(), MagicMock(), MagicMock(), MagicMock(), loop)
    transfers._offers = [older, newer] if first == 0 else [newer, older]
    transfers.adopt(do.Adopt(1, 2, Key(5, 0), (0,), ()))
    assert [call.args for call in loop.take.call_args_list] == [(b"older", 4), (b"newer", 5)]


def holder() -> tuple[Transfers, Donor, Any]:
    """Transfers of a worker that has the first half of a divided state, its donor, and that state."""
    state = DividedMember()
    state.whole(1)
    of = state.state.shape.sizes
    there = share(Shard(0, 0, segments=((0, SEGMENTS // 2),)), of)
    replica = SimpleNamespace(state=state.state, lanes=MagicMock(), everything=list(state.model.parameters()))
    view: Any = MagicMock(stages=MagicMock(split=False), me=0, step=1)
    view.stages.__getitem__.side_effect = {0: replica}.__getitem__
    view.stages.__contains__.side_effect = {0: replica}.__contains__
    view.driver.machine.held = {0: there}
    loop, donor, view.config.zero.stage = MagicMock(), Donor(), 0
    loop.moves.astray, loop.moves.past.return_value, loop.told.return_value, loop.changed.return_value = (
        "",
        False,
        b"",
        (),
    )
    view.publisher.untold.packed.return_value = b""
    keeper = MagicMock()
    keeper.held.return_value = {}
    return Transfers(view, MagicMock(), donor, keeper, MagicMock(), loop), donor, state.state


def test_a_state_that_the_loop_has_changed_since_the_update_is_given_as_it_was_kept_or_not_at_all() -> None:
    transfers, donor, state = holder()
    shelve = do.Shelve(3, Key(1, 0), {}, {}, {0: WHOLE}, stands=True)
    transfers._loop.moves.astray = "parameter 0.weight"
    with pytest.raises(Evicted, match=r"changed parameter 0\.weight since the update, so this worker restarts") as left:
        transfers.shelve(shelve)
    assert left.value.returns and not left.value.drained
    kept = state.clone_snapshot()
    transfers._keeper.held.return_value = {0: (kept, WHOLE)}  # type: ignore[attr-defined]
    transfers.shelve(shelve)
    assert donor._shelves["settle"].held == {0: [(kept, WHOLE)]}


def test_members_that_settle_read_the_state_where_it_lies_until_all_have_what_they_lack() -> None:
    transfers, donor, state = holder()
    transfers.shelve(do.Shelve(3, Key(1, 0), {}, {}, transfers._view.driver.machine.held, stands=True))
    ((in_place, there),) = donor._shelves["settle"].held[0]
    assert isinstance(in_place, StateInPlace) and there == transfers._view.driver.machine.held[0]
    donor.busy_snapshot(stays=True)  # this worker fills what it lacks itself
    before = in_place.manifest()["blocks"]
    assert before == state.manifest()["blocks"] and bytes(in_place.read_block(0)) == bytes(state.read_block(0))
    donor.unshelve("settle")
    with pytest.raises(CheckpointCorrupt):
        in_place.read_block(0)


def test_a_state_that_the_loop_may_change_is_copied_for_members_that_settle() -> None:
    """Its loop goes on while others still copy: with a step, or a gather, that they had decided before."""
    transfers, donor, state = holder()
    transfers.shelve(do.Shelve(3, Key(1, 0), {}, {}, {0: WHOLE}, stands=False))
    before = bytes(state.read_block(0))
    with torch.no_grad():
        next(state.model.parameters()).mul_(0.5)
    state.manifest()
    ((copied, _),) = donor._shelves["settle"].held[0]
    assert isinstance(copied, Snapshot) and bytes(copied.read_block(0)) == before != bytes(state.read_block(0))
    donor.busy_snapshot()
    assert bytes(copied.read_block(0)) == before, "its loop has come to where it changes the state"


def test_its_own_blocks_are_not_copied_to_be_put_where_they_are() -> None:
    transfers, _, state = holder()
    ((own, there),) = transfers._own(0, 1)
    assert there == transfers._view.driver.machine.held[0]
    with torch.no_grad():
        next(state.model.parameters())[0, 0] = 7.0
    state.manifest()
    assert bytes(own.read_block(0)) == bytes(state.read_block(0)), "the memory of the state itself"


@pytest.mark.parametrize("rest", [False, True])
def test_of_several_donors_each_copies_only_what_it_feeds(rest: bool) -> None:
    """For the others: one of them copies the parameters."""
    transfers, donor, state = holder()
    asked = AskerCame("joiner", (0,), None, True, JointAsk(9, 7, (0, 1), 1, ((0, 4),), rest))
    found: list[Offer] = []
    donor.offer = lambda make, tickets: found.append(make([asked]))  # type: ignore[method-assign, assignment]
    held = transfers._view.driver.machine.held
    transfers.offer_feeds(do.OfferFeeds(Key(1, 0), {}, {}, (0,), held, frozenset({7})))
    ((snapshot, there),) = found[0].held[0]
    assert isinstance(snapshot, Snapshot)
    of = state.shape.sizes
    assert there == fed_blocks(((0, 4),), rest, of) and 0 < there.size(of) < held[0].size(of)
    digests, right = snapshot.manifest()["blocks"], state.manifest()["blocks"]
    alike = Extents.numbered(of, (n for n, digest in enumerate(digests) if digest == right[n]))
    assert alike.covers(there) and all(run.plane == "rest" for run in (alike - there).runs), "others are not copied"
