"""What a worker offers to others, and how it follows the steps of others until a plan has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from everstep.base.errors import CollectiveAborted, ProtocolError
from everstep.base.extents import WHOLE, Extents
from everstep.base.plan import Member
from everstep.exact.image import sizes_of
from everstep.protocol.driver import operations as do
from everstep.protocol.step_types import Key, Record
from everstep.train import heal
from everstep.train.heal import FollowedStep, Offer, ReceivedOffer, StageGradient
from everstep.train.taking import Copier
from everstep.train.view import Stages
from transferring import ME, OTHERS, PLAN, RECORDS, Mover, Stage

HERE = Key(4, 0)


def part(mover: Mover, *numbers: int) -> Extents:
    return Extents.numbered(sizes_of(mover.stages[0].state.manifest()), numbers)


def same(snapshot: Any, stage: Stage) -> bool:
    return bool(snapshot.manifest() == stage.state.manifest())


# ---- giving


def shelved(mover: Mover, **live: Extents) -> Offer:
    there = {int(name[1:]): blocks for name, blocks in live.items()}
    effect = do.Shelve(3, HERE, RECORDS, {HERE: OTHERS}, there, stands=True)
    mover.transfers.handlers()[do.Shelve](effect)
    ((shelf, offer),) = mover.said("donor.shelve")
    assert shelf == ("settle", 3) and isinstance(offer, Offer) and offer.position == HERE
    assert offer.records == RECORDS
    return offer


def test_what_is_live_is_offered_as_it_is_now_with_the_loop_as_it_was_after_the_update() -> None:
    mover = Mover()
    some = part(mover, 0)
    offer = shelved(mover, k0=some, k1=WHOLE)
    assert {k: [there for _, there in layers] for k, layers in offer.held.items()} == {0: [some], 1: [WHOLE]}
    assert all(same(offer.held[k][0][0], mover.stages[k]) for k in (0, 1))
    assert (offer.application, offer.untold, offer.changed) == (b"loop 4", b"untold", ("changed",))
    assert offer.gathers == {HERE: OTHERS}
    assert sorted(offer.names) == [0, 1] and "0.weight" in offer.names[0]


def test_what_is_kept_alone_has_nothing_of_the_present_state_beside_it() -> None:
    mover, other = Mover(), Stage(0, 11, [])
    mover.kept[4] = {2: (other.copied(), WHOLE)}
    offer = shelved(mover)
    assert list(offer.held) == [2] and offer.held[2][0][1] is WHOLE and same(offer.held[2][0][0], other)
    assert (offer.application, offer.untold, offer.changed) == (b"", b"", ())
    assert not mover.said("loop.told")


def test_a_state_after_changes_of_the_loop_is_offered_as_of_the_next_round_and_taken_so() -> None:
    """Whoever gets it must not make the changes of that round again."""
    mover = Mover(HERE)
    mover.past = 4
    offer = shelved(mover, _0=WHOLE)
    assert offer.past and offer.application == b"on 5"
    taker = Mover(Key(3, 0))
    taker.transfers._load(heal.offered(offer, {}))
    assert taker.said("loop.take_entered") == [(b"on 5",)] and not taker.said("loop.take")
    assert taker.transfers.past == 4


def test_parts_of_a_stage_lie_above_one_another_unless_one_is_whole() -> None:
    """Layers that lack nothing spare whoever asks the work of putting them together."""
    mover, other = Mover(), Stage(0, 11, [])
    first, second = part(mover, 0), part(mover, 1)
    mover.kept[4] = {0: (other.copied(), second), 1: (other.copied(), WHOLE)}
    offer = shelved(mover, k0=first, k1=first)
    assert [there for _, there in offer.held[0]] == [first, second]
    assert [there for _, there in offer.held[1]] == [WHOLE] and same(offer.held[1][0][0], other)


def test_a_live_stage_that_is_whole_comes_before_its_snapshot() -> None:
    mover, other = Mover(), Stage(0, 11, [])
    mover.kept[4] = {0: (other.copied(), WHOLE)}
    offer = shelved(mover, k0=WHOLE)
    assert len(offer.held[0]) == 1 and same(offer.held[0][0][0], mover.stages[0])


def test_buffers_of_the_step_under_way_are_no_part_of_what_is_offered(monkeypatch) -> None:
    mover, right = Mover(), Stage(0, 0, [])
    mean = mover.stages[0].parts.model[1].running_mean
    mean.fill_(3.0)
    monkeypatch.setattr(mover.stages[0].lanes, "settle_buffers", lambda: mean.zero_())
    assert same(shelved(mover, k0=WHOLE).held[0][0][0], right)


def test_of_a_model_that_is_not_split_names_say_nothing() -> None:
    mover = Mover()
    mover.view.stages = Stages.unsplit(mover.stages[0])
    assert not shelved(mover, k0=WHOLE).names


def test_who_follows_gets_all_of_the_stages_as_they_are() -> None:
    mover = Mover()
    mover.transfers.handlers()[do.OfferFeeds](do.OfferFeeds(HERE, RECORDS, {HERE: OTHERS}, (1,)))
    ((make, tickets),) = mover.said("donor.offer")
    offer = make([SimpleNamespace(stages=(1,), joint=None)])
    assert [(k, there) for k, [(_, there)] in offer.held.items()] == [(1, WHOLE)] and not tickets
    assert same(offer.held[1][0][0], mover.stages[1]) and list(offer.names) == [1]
    assert (offer.position, offer.records, offer.gathers) == (HERE, RECORDS, {HERE: OTHERS})


def test_shelves_and_feeds_end_when_they_are_said_to() -> None:
    mover = Mover()
    for kind in (do.Unshelve, do.CutFeeds):
        mover.transfers.handlers()[kind](kind())
    assert mover.calls == [("donor.unshelve", "settle"), ("donor.cut",)]


def test_own_blocks_are_those_of_that_step_alone() -> None:
    """First what is live, as far as it is right; then what is kept."""
    mover, other = Mover(), Stage(0, 11, [])
    some = part(mover, 1)
    mover.machine.held[0] = some
    mover.kept = {4: {0: (other.copied(), WHOLE)}, 3: {1: (other.copied(), WHOLE)}}
    own = mover.transfers.copier._own
    (live, there), (_, whole) = own(0, 4)
    assert there == some and whole == WHOLE and same(live, mover.stages[0])
    assert [there for _, there in own(1, 4)] == [WHOLE] and len(own(1, 3)) == 1
    assert own(0, 3) == [] and own(2, 4) == []


# ---- following


class Followed:
    """A donor that is followed: what it offers, and what it feeds."""

    def __init__(self, position: Key, stages: tuple[int, ...], *items: Any, **more: Any) -> None:
        states = {k: Stage(k, 20 + k, []).copied() for k in stages}
        told = {"records": RECORDS, "application": b"loop %d" % position.step, **more}
        self.offered = ReceivedOffer(position=position, states=states, **told)
        self.order = SimpleNamespace(stages=stages)
        self.items, self.closed = list(items), False
        self.fed = [SimpleNamespace(readable=lambda limit: bool(self.items), source=self)]

    def offer(self) -> ReceivedOffer:
        return self.offered

    def close(self) -> None:
        self.closed = True


def step(number: int, *stages: int) -> FollowedStep:
    gradients = {k: StageGradient(f"reduced {number} {k}", {}) for k in stages}  # type: ignore[arg-type]
    return FollowedStep(number, {7: Record(0, b"%d" % number)}, gradients, b"loop before %d" % number)


class Joining(Mover):
    """A worker that follows these, of which each holds other stages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *feeds: Followed) -> None:
        super().__init__(Key(0, 0), (0,))
        self.feeds, self.numels, asked = feeds, [], iter(feeds)
        self.phases: list[Any] = []

        def follow(copier: Any, generation: int, donors: Any, stages: Any, *parts: Any) -> Followed:
            self.calls.append(("follow", generation, donors, stages))
            assert parts == (None, {})
            return next(asked)

        def next_item(fed: Any, numel: dict[int, int]) -> Any:
            self.numels.append(numel)
            item = fed.source.items.pop(0)
            if isinstance(item, Exception):
                raise item
            return item

        monkeypatch.setattr(Copier, "follow", follow)
        monkeypatch.setattr(Copier, "reach", lambda copier, whom: self.calls.append(("reach", *whom)))
        monkeypatch.setattr(heal, "next_item", next_item)
        self.donors = tuple(Member(10 + n, 0, "host") for n in range(len(feeds)))
        self.groups = tuple(((donor,), feed.order.stages) for donor, feed in zip(self.donors, feeds, strict=True))

    def open(self) -> Any:
        return self.transfers.open_feeds(do.OpenFeeds(1, 6, 1, self.groups))

    def watch(self) -> Any:
        return self.transfers.watch(do.Watch(1, 6))


def test_who_joins_has_the_stages_that_it_asks_for_and_no_others(monkeypatch) -> None:
    joining = Joining(monkeypatch, Followed(Key(4, 0), (1,)), Followed(Key(5, 1), (2,), changed=("mean",)))
    assert joining.open() == (Key(4, 0), Key(5, 1))
    assert list(joining.stages) == [1, 2]
    assert joining.said("reach") == [joining.donors]
    assert joining.said("follow") == [(6, (joining.donors[0],), (1,)), (6, (joining.donors[1],), (2,))]
    assert joining.said("phase") == [("heal", 0, None)]
    assert joining.said("loop.refuse") == [
        ((), f"worker {ME} cannot be healed at step 4"),
        (("mean",), f"worker {ME} cannot be healed at step 5"),
    ]


@pytest.mark.parametrize("error", [OSError("reset"), ProtocolError("other form"), CollectiveAborted("gone")])
def test_a_donor_that_is_gone_ends_the_attempt(monkeypatch, error: Exception) -> None:
    joining = Joining(monkeypatch, Followed(Key(4, 0), (1,), error))
    joining.open()
    with pytest.raises(CollectiveAborted, match=str(error)):
        joining.watch()

    def offer() -> ReceivedOffer:
        raise error

    other = Joining(monkeypatch, Followed(Key(4, 0), (1,)))
    monkeypatch.setattr(other.feeds[0], "offer", offer)
    with pytest.raises(CollectiveAborted, match=str(error)):
        other.open()


def test_what_comes_of_a_feed_is_told_with_the_feed_that_it_came_of(monkeypatch) -> None:
    first, second, third = step(5, 1), step(6, 2), step(7, 2)
    joining = Joining(monkeypatch, Followed(Key(4, 0), (1,), first, 5), Followed(Key(5, 0), (2,), second, third))
    joining.open()
    assert joining.watch() == [do.Seen(0, 5, first.records), do.Seen(1, 6, second.records)]
    assert joining.watch() == [do.Seen(0), do.Seen(1, 7, third.records)]
    assert joining.watch() == [] and len(joining.said("tick")) == 3
    numel = {k: joining.stages[k].layout.numel for k in (1, 2)}
    assert joining.numels == [{1: numel[1]}, {2: numel[2]}] * 2


def test_an_older_state_is_brought_to_the_newest_and_nothing_is_loaded_twice(monkeypatch) -> None:
    older = Followed(Key(4, 0), (1,), step(5, 1), step(6, 1))
    newest = Followed(Key(5, 0), (2,), step(6, 2), untold=b"untold", gathers={Key(5, 1): OTHERS})
    joining = Joining(monkeypatch, older, newest)
    joining.open()
    joining.watch()
    joining.watch()
    applied: list[Any] = []
    for k in (1, 2):
        monkeypatch.setattr(joining.stages[k], "apply", lambda *args, k=k: applied.append((k, *args)))
    passed: Any = (("outcome of 5",), ())
    copied = joining.transfers.adopt(do.Adopt(1, 6, Key(5, 0), (1, 2), passed))
    assert copied == do.Copied(RECORDS, {Key(5, 1): OTHERS})
    assert applied == [(1, "outcome of 5", "reduced 5 1", 0, {})]
    assert joining.said("loop.take") == [(b"loop 4", 4), (b"loop 5", 5)]
    assert joining.said("updates.arrive") == [(("outcome", 5, RECORDS), 5)]
    assert joining.said("publisher.learn") == [(b"untold", 5)]
    joining.calls.clear()
    replay = do.Replay(1, 6, 6, OTHERS, "outcome of 6", PLAN)  # type: ignore[arg-type]
    joining.transfers.replay(replay)
    assert joining.names() == ["loop.take", "updates.apply"]
    assert joining.said("loop.take") == [(b"loop before 6", 6)] and joining.said("phase") == [("heal", 6, PLAN)]
    ((outcome, records, gradients, *where),) = joining.said("updates.apply")
    assert (outcome, records, where) == ("outcome of 6", OTHERS, [PLAN.generation, PLAN])
    assert {k: one.reduced for k, one in gradients.items()} == {1: "reduced 6 1", 2: "reduced 6 2"}


def test_one_donor_of_all_stages_feeds_steps_one_after_another(monkeypatch) -> None:
    joining = Joining(monkeypatch, Followed(Key(4, 0), (1, 2), step(5, 1, 2), step(6, 1, 2)))
    joining.open()
    for number in (5, 6):
        joining.watch()
        joining.transfers.replay(do.Replay(1, 6, number, OTHERS, "outcome", PLAN))  # type: ignore[arg-type]
    assert [sorted(call[2]) for call in joining.said("updates.apply")] == [[1, 2], [1, 2]]
    assert joining.said("loop.take") == [(b"loop before 5", 5), (b"loop before 6", 6)]


def test_nobody_is_followed_any_more_once_feeds_are_closed(monkeypatch) -> None:
    feeds = [Followed(Key(4, 0), (1,), step(5, 1)), Followed(Key(4, 0), (2,))]
    joining = Joining(monkeypatch, *feeds)
    joining.open()
    joining.transfers.handlers()[do.CloseFeeds](do.CloseFeeds())
    assert all(feed.closed for feed in feeds) and joining.watch() == []
    assert not joining.transfers._offers
