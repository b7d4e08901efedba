"""What each member of a pool says, has and sends while the pool divides an optimizer's state."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from divided_members import DividedMember, plan_of
from everstep.base.errors import CollectiveAborted
from everstep.base.extents import Extents, union
from everstep.base.plan import Plan
from everstep.base.ports import Portion
from everstep.exact.pieces import PieceUpdate
from everstep.placement.shards import share
from everstep.protocol.driver import operations as do
from everstep.protocol.step_types import Holds, Takes
from everstep.train.dealing import Dealing
from everstep.train.optimizer_kind import OptimizerKind
from everstep.train.spread_beside import UnitGate

Mail = defaultdict[tuple[int, int, int, int, int], SimpleQueue[Any]]
"""By source, taker, step, stage and number of the portion."""


class Dealer:
    """A member with its part in the exchange. said: what it has told its driver."""

    def __init__(self, me: int, mail: Mail) -> None:
        self.me, self.mail, self.member = me, mail, DividedMember()
        self.said: list[Any] = []
        self.update = SimpleNamespace(dealt=None, kind=OptimizerKind("elements"))
        self.machine = SimpleNamespace(held={})
        self.gate = UnitGate(list(self.member.model), range(4))
        self.watch = SimpleNamespace(looked=True)
        lanes = SimpleNamespace(gate=self.gate, passes={0: SimpleNamespace(watch=self.watch)})
        replica = SimpleNamespace(state=self.member.state, update=self.update, lanes=lanes)
        channel = SimpleNamespace(spread=self._spread)
        view = SimpleNamespace(
            me=me,
            stages={0: replica},
            transport=SimpleNamespace(channel=channel),
            driver=SimpleNamespace(machine=self.machine),
            cutter=SimpleNamespace(cut=self._cut),
            plan=None,
            phase=lambda *_: None,
        )
        self.came: list[list[torch.Tensor]] = []
        self.view, self.later, self.over = view, 0, threading.Event()
        self.dealing = Dealing(view, self.said.append, self._came, self._come_later)  # type: ignore[arg-type]

    def _spread(self, step: int, stage: int, portions: list[Portion], part: int) -> None:
        for number, one in enumerate(portions, part << 20):
            for taker in one.takers if one.source == self.me else ():
                self.mail[self.me, taker, step, stage, number].put(one.data.clone())
        for number, one in enumerate(portions, part << 20):
            if self.me in one.takers:
                one.data.copy_(self._got(self.mail[one.source, self.me, step, stage, number]))

    def _got(self, mail: SimpleQueue[Any]) -> torch.Tensor:
        until = time.monotonic() + 60.0
        while not self.over.is_set():
            with contextlib.suppress(Empty):
                return mail.get(timeout=0.01)
            assert time.monotonic() < until
        raise CollectiveAborted("the generation is over")

    def _cut(self, generation: int) -> None:
        self.over.set()

    def _come_later(self) -> None:
        self.later += 1

    def _came(self) -> None:
        self.came.append([p.detach().clone() for p in self.member.model.parameters()])

    def step(self, number: int, plan: Plan) -> None:
        """Up to the exchange."""
        self.dealing.reduced(plan, number)
        self.member.gradients(number)
        self.update.dealt = dealt = self.dealing.of(number, 0, self.member.with_gradients)
        if dealt is None:
            self.member.optimizer.step()
        else:
            PieceUpdate(self.member.optimizer).make([dealt.updates()])
        self.member.clear()
        self.dealing.updated(number)

    def told(self, kind: type) -> Any:
        return next(one for one in reversed(self.said) if isinstance(one, kind))


def spread(dealers: list[Dealer], number: int, plan: Plan) -> list[dict[int, Extents]]:
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
        takes, has = [d.told(Takes).blocks[0] for d in dealers], [d.told(Holds).blocks[0] for d in dealers]
        assert all(d.told(Takes).step == d.told(Holds).step == number for d in dealers)
        if number == 1:  # nobody can say yet what planes there will be
            assert not any(takes) and not any(one.whole for one in has)
        else:
            assert takes == has and union(takes).whole and not any(one.whole for one in takes)
        for dealer, held in zip(dealers, spread(dealers, number, plan), strict=True):
            assert held == {0: share(plan.shard(dealer.me, 0), of)}
            for ours, right in zip(dealer.member.model.parameters(), alone.model.parameters(), strict=True):
                assert torch.equal(ours, right)
            assert len(dealer.came) == number, "from here on the loop changes parameters"
            assert all(map(torch.equal, dealer.came[-1], alone.model.parameters()))
        assert {step for _, _, step, _, _ in mail} == set(range(1, number + 1))
    part = dealers[0].member.optimizer.state[dealers[0].member.model[0].weight]["exp_avg"]
    assert not torch.equal(part, alone.optimizer.state[alone.model[0].weight]["exp_avg"])  # what others have is gone


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Dealer], Plan]:
    """Two members after an update, of units that come one by one."""
    monkeypatch.setattr("everstep.exact.dealt.TOGETHER", 1)
    dealers, plan = [Dealer(me, defaultdict(SimpleQueue)) for me in range(2)], plan_of(2, 1)
    dealers[1].mail = dealers[0].mail
    for dealer in dealers:
        dealer.step(1, plan)
        dealer.machine.held, dealer.view.plan = dealer.told(Holds).blocks, plan
    return dealers, plan


def test_beside_the_next_lanes_the_parameters_come_unit_by_unit(apart: tuple[list[Dealer], Plan]) -> None:
    (first, second), plan = apart
    alone = DividedMember()
    alone.whole(1)
    versions = [p._version for p in first.member.model.parameters()]
    first.dealing.begin(do.BeginSpread(1, plan, 1))
    assert first.later == 1 and not first.came
    reached = threading.Event()
    entering = threading.Thread(target=lambda: (first.gate.enter(0), reached.set()))
    entering.start()
    assert not reached.is_set(), "the other has given nothing yet"
    second.dealing.begin(do.BeginSpread(1, plan, 1))
    entering.join(60.0)
    assert torch.equal(first.member.model[0].weight, alone.model[0].weight)
    for dealer in (first, second):
        dealer.dealing.whole()
        dealer.dealing.whole()
        assert [one.step for one in dealer.said if isinstance(one, Holds)] == [1, 1]
        assert dealer.told(Holds).blocks == {0: share(plan.shard(dealer.me, 0), alone.state.shape.sizes)}
        assert all(map(torch.equal, dealer.member.model.parameters(), alone.model.parameters()))
    assert versions == [p._version for p in first.member.model.parameters()], "nobody takes them for the loop's changes"


def test_lanes_wait_for_all_parameters_and_raise_what_cuts_them_off(apart: tuple[list[Dealer], Plan]) -> None:
    (first, _), plan = apart
    first.dealing.begin(do.BeginSpread(1, plan, 1))
    threading.Timer(0.05, first.over.set).start()
    with pytest.raises(CollectiveAborted, match="the generation is over"):
        first.dealing.whole()
    assert len([one for one in first.said if isinstance(one, Holds)]) == 1


def test_an_exchange_that_has_begun_is_waited_for(apart: tuple[list[Dealer], Plan]) -> None:
    dealers, plan = apart
    alone = DividedMember()
    alone.whole(1)
    dealers[0].dealing.begin(do.BeginSpread(1, plan, 1))
    spread(dealers, 1, plan)
    assert all(map(torch.equal, dealers[0].member.model.parameters(), alone.model.parameters()))
    assert not dealers[0].came and len(dealers[1].came) == 1


def test_after_a_cut_nothing_is_written_any_more(apart: tuple[list[Dealer], Plan]) -> None:
    (first, second), plan = apart
    first.dealing.begin(do.BeginSpread(1, plan, 1))
    first.dealing.cut(do.Cut(0))
    assert not first.over.is_set(), "it is of another generation"
    first.dealing.cut(do.Cut(1))
    before = [p.detach().clone() for p in first.member.model.parameters()]
    second.dealing.begin(do.BeginSpread(1, plan, 1))
    first.dealing.whole()
    first.gate.enter(0)
    second.dealing.close()
    assert all(map(torch.equal, before, first.member.model.parameters()))
    assert len([one for one in first.said if isinstance(one, Holds)]) == 1


def test_parameters_whose_bits_are_about_to_be_looked_at_have_come(apart: tuple[list[Dealer], Plan]) -> None:
    (first, second), plan = apart
    first.watch.looked = False
    second.dealing.begin(do.BeginSpread(1, plan, 1))
    first.dealing.begin(do.BeginSpread(1, plan, 1))
    second.dealing.whole()
    assert all(map(torch.equal, first.member.model.parameters(), second.member.model.parameters()))


def test_after_the_exchange_memory_of_what_others_hold_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[torch.Tensor] = []
    monkeypatch.setattr("everstep.exact.dealt.give_back", lambda tensor, _: given_back.append(tensor))
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
