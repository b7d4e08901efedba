"""What each member of a pool says, has and sends while the pool divides an optimizer's state."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from divided_members import DividedMember, plan_of
from everstep.base.extents import Extents, union
from everstep.base.plan import Plan
from everstep.base.ports import Portion
from everstep.exact.pieces import PieceUpdate
from everstep.placement.shards import share
from everstep.protocol.driver import operations as do
from everstep.protocol.step_types import Holds, Key, Takes
from everstep.train.dealing import Dealing
from everstep.train.heal import ReceivedOffer
from everstep.train.optimizer_kind import OptimizerKind
from everstep.train.transfers import Transfers
from everstep.train.updates import Updates

Mail = defaultdict[tuple[int, int, int, int, int], SimpleQueue[Any]]
"""By source, taker, step, stage and number of the portion."""


class Dealer:
    """A member with its part in the exchange. said: what it has told its driver. forgets: the optimizer keeps nothing
    for this parameter."""

    forgets: Any = None

    def __init__(self, me: int, mail: Mail) -> None:
        self.me, self.mail, self.member = me, mail, DividedMember()
        self.said: list[Any] = []
        self.update = SimpleNamespace(dealt=None, kind=OptimizerKind("elements", state_bytes=1))
        self.machine = SimpleNamespace(held={})
        replica = SimpleNamespace(state=self.member.state, update=self.update)
        channel = SimpleNamespace(spread=self._spread)
        view = SimpleNamespace(
            me=me,
            stages={0: replica},
            transport=SimpleNamespace(channel=channel),
            driver=SimpleNamespace(machine=self.machine),
            phase=lambda *_: None,
        )
        self.came: list[list[torch.Tensor]] = []
        self.dealing = Dealing(view, self.said.append, self._came)  # type: ignore[arg-type]

    def _spread(self, step: int, stage: int, portions: list[Portion]) -> None:
        for number, one in enumerate(portions):
            for taker in one.takers if one.source == self.me else ():
                self.mail[self.me, taker, step, stage, number].put(one.data.clone())
        for number, one in enumerate(portions):
            if self.me in one.takers:
                one.data.copy_(self.mail[one.source, self.me, step, stage, number].get(timeout=60.0))

    def _came(self) -> None:
        self.came.append([p.detach().clone() for p in self.member.model.parameters()])

    def step(self, number: int, plan: Plan) -> None:
        """Up to the exchange."""
        self.member.gradients(number)
        self.dealing.reduced(plan, number, {0: self.member.with_gradients})
        self.update_part(number)
        self.dealing.updated(number)

    def update_part(self, number: int) -> None:
        self.member.gradients(number)
        self.update.dealt = dealt = self.dealing.of(number, 0, self.member.with_gradients)
        if dealt is None:
            self.member.optimizer.step()
        else:
            PieceUpdate(self.member.optimizer).make([dealt.updates()])
        self.member.optimizer.state.pop(self.forgets, None)
        self.member.clear()

    def told(self, kind: type) -> Any:
        return next(one for one in reversed(self.said) if isinstance(one, kind))


def spread(dealers: list[Dealer], number: int, plan: Plan) -> list[Holds]:
    """All exchange at once, as each waits for the others."""
    operation = SimpleNamespace(plan=plan, step=number)
    with ThreadPoolExecutor(len(dealers)) as threads:
        return list(threads.map(lambda dealer: dealer.dealing.spread(operation), dealers))


@pytest.mark.parametrize(("members", "copies"), [(2, 1), (3, 2)])
def test_members_say_what_they_take_and_have_and_end_with_the_parameters_of_one(members: int, copies: int) -> None:
    mail: Mail = defaultdict(SimpleQueue)
    alone, plan = DividedMember(), plan_of(members, copies)
    dealers = [Dealer(me, mail) for me in range(members)]
    for number in range(1, 4):
        alone.whole(number)
        for dealer in dealers:
            dealer.step(number, plan)
            dealer.machine.held = dealer.told(Holds).blocks
        of = alone.state.shape.sizes
        takes, made = [d.told(Takes).blocks[0] for d in dealers], [d.told(Holds).blocks[0] for d in dealers]
        assert all(d.told(Takes).step == d.told(Holds).step == number for d in dealers)
        if number == 1:  # nobody can say yet what planes there will be
            assert not any(takes) and not any(one.whole for one in made)
        else:
            assert takes == made and union(takes).whole and not any(one.whole for one in takes)
        for dealer, has in zip(dealers, spread(dealers, number, plan), strict=True):
            assert has == Holds(number, {0: share(plan.shard(dealer.me, 0), of)})
            for ours, right in zip(dealer.member.model.parameters(), alone.model.parameters(), strict=True):
                assert torch.equal(ours, right)
            assert len(dealer.came) == number, "from here on the loop changes parameters"
            assert all(map(torch.equal, dealer.came[-1], alone.model.parameters()))
        assert {step for _, _, step, _, _ in mail} == set(range(1, number + 1))
    part = dealers[0].member.optimizer.state[dealers[0].member.model[0].weight]["exp_avg"]
    assert not torch.equal(part, alone.optimizer.state[alone.model[0].weight]["exp_avg"])  # what others have is gone


def test_the_first_update_is_divided_at_whatever_step_it_is() -> None:
    """Steps before it were left out: there is no state yet, though somebody may have looked for some."""
    mail: Mail = defaultdict(SimpleQueue)
    plan, dealers = plan_of(2, 1), [Dealer(me, mail) for me in range(2)]
    for dealer in dealers:
        for number in (1, 2):
            dealer.dealing.reduced(plan, number)
            dealer.dealing.updated(number)
            assert dealer.told(Takes).blocks == {0: Extents()} and dealer.told(Holds).blocks == {0: Extents(whole=True)}
        assert not dealer.member.optimizer.state[dealer.member.model[0].weight]
        dealer.step(3, plan)
        assert dealer.told(Takes).blocks == {0: Extents()}
        assert dealer.update.dealt is not None and dealer.told(Holds).blocks == {0: dealer.update.dealt.made()}
        dealer.machine.held = dealer.told(Holds).blocks
    of = dealers[0].member.state.shape.sizes
    held = [Holds(3, {0: share(plan.shard(dealer.me, 0), of)}) for dealer in dealers]
    assert spread(dealers, 3, plan) == held


@pytest.mark.parametrize("kind", [OptimizerKind("elements", uniform=False, state_bytes=1), OptimizerKind("elements")])
def test_a_first_update_that_all_make_leaves_all_of_the_state_with_all(kind: OptimizerKind) -> None:
    dealer, plan = Dealer(0, defaultdict(SimpleQueue)), plan_of(2, 1)
    dealer.update.kind = kind
    dealer.step(3, plan)
    assert dealer.update.dealt is None and dealer.told(Holds).blocks == {0: Extents(whole=True)}


def test_parameters_that_get_their_state_later_move_segments() -> None:
    """Until members have settled they hold other blocks than the plan gives them, which all say."""
    plan, dealers = plan_of(2, 1), [Dealer(me, defaultdict(SimpleQueue)) for me in range(2)]
    dealers[1].mail = dealers[0].mail
    for number, moved in ((1, False), (2, True), (3, False)):
        for dealer in dealers:
            dealer.member.late = number == 1
            dealer.step(number, plan)
            dealer.machine.held = dealer.told(Holds).blocks
            takes = dealer.told(Takes).blocks  # who takes it forward may be settling with others who have
            assert takes == ({0: Extents()} if number < 3 else dealer.machine.held)
        of = dealers[0].member.state.shape.sizes
        for dealer, has in zip(dealers, spread(dealers, number, plan), strict=True):
            assert has.moved == moved
            assert (has.blocks[0] == share(plan.shard(dealer.me, 0), of)) != moved


def test_parameters_for_which_nothing_is_ever_kept_leave_it_known_what_a_gradient_takes_forward() -> None:
    dealer, plan = Dealer(0, defaultdict(SimpleQueue)), plan_of(2, 1)
    dealer.forgets = dealer.member.model[0].weight
    for number in (1, 2, 3):
        dealer.step(number, plan)
        assert bool(dealer.told(Takes).blocks[0]) == (number > 1)


def test_a_joiner_has_nothing_from_a_step_on_that_moves_segments() -> None:
    """It would be fed the gradients of blocks whose state it has not copied. As a member it copies its share first."""
    dealer, plan = Dealer(0, defaultdict(SimpleQueue)), plan_of(2, 1)
    for number in (1, 2, 3, 4):
        dealer.member.late = number < 3
        dealer.dealing.follow(plan, number)
        dealer.update_part(number)
        found = dealer.dealing.followed(plan, number)
        assert found == ({0: dealer.update.dealt.made()} if number < 3 else {0: Extents()})
    dealer.step(5, plan)
    dealer.dealing.follow(plan, 6)
    dealer.update_part(6)
    assert dealer.dealing.followed(plan, 6) == {0: dealer.update.dealt.made()}


def test_a_joiner_that_copies_its_part_anew_has_it_whatever_the_copy_before_became() -> None:
    """Its first donors were lost after segments had moved: all would wait while a member with nothing copies all."""
    dealer, plan = Dealer(0, defaultdict(SimpleQueue)), plan_of(2, 1)
    updates: Any = Updates(*(MagicMock() for _ in range(5)), dealer.dealing)  # type: ignore[arg-type]
    transfers = Transfers(MagicMock(stages={}, me=0), updates, *(MagicMock() for _ in range(4)))  # type: ignore[arg-type]
    for number in (1, 2, 3, 4):
        dealer.member.late = number < 3
        dealer.dealing.follow(plan, number)
        dealer.update_part(number)
        has = dealer.dealing.followed(plan, number)[0]
        if number == 3:
            assert has == Extents()
            transfers._offers = [ReceivedOffer(position=Key(3, 0), application=b"", states={})]
            transfers.adopt(do.Adopt(1, 2, Key(3, 0), (0,), ()))
        else:
            assert has == dealer.update.dealt.made() != Extents()


def test_after_the_exchange_memory_of_what_others_hold_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[torch.Tensor] = []
    monkeypatch.setattr("everstep.exact.state_memory.give_back", lambda tensor, _: given_back.append(tensor))
    dealers = [Dealer(me, defaultdict(SimpleQueue)) for me in range(2)]
    dealers[1].mail, plan = dealers[0].mail, plan_of(2, 1)
    for dealer in dealers:
        dealer.step(1, plan)
    assert not given_back
    spread(dealers, 1, plan)
    assert given_back


def test_a_step_that_was_reduced_in_no_plan_is_updated_whole() -> None:
    dealer, plan = Dealer(0, defaultdict(SimpleQueue)), plan_of(2, 1)
    dealer.step(1, plan)
    assert dealer.dealing.of(1, 0) is not None
    assert dealer.dealing.of(2, 0) is None
    dealer.said.clear()
    dealer.dealing.updated(2)
    assert not dealer.said


def test_an_update_that_was_left_out_leaves_what_the_plan_gives() -> None:
    dealer, plan = Dealer(0, defaultdict(SimpleQueue)), plan_of(2, 1)
    dealer.dealing.reduced(plan, 1)
    dealer.dealing.updated(1)
    assert dealer.told(Holds).blocks == {0: Extents(whole=True)}  # there is no state to be divided yet
    dealer.step(1, plan)
    dealer.update.dealt = None
    dealer.dealing.reduced(plan, 2)
    dealer.dealing.updated(2)
    assert dealer.told(Holds).blocks == {0: share(plan.shard(0, 0), dealer.member.state.shape.sizes)}
