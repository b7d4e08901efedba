"""Taking state from others: whom the taker asks, who is next, what counts, and how it ends."""

from __future__ import annotations

from everstep.base.extents import NONE, WHOLE, BlockRun, Extents
from everstep.base.plan import Member, Plan, Seat, WorkerKey
from everstep.protocol.moving.chunks import Chunk
from everstep.protocol.moving.taker import (
    AskSource,
    BlocksCame,
    BlocksKnown,
    FindBlocks,
    LeaveSource,
    ReachSource,
    SourceLost,
    SourceOffers,
    SourceReached,
    TakeOrder,
    Taker,
    TakerEffect,
    TookAll,
    TookNothing,
    orders,
)
from everstep.protocol.step_types import Key, Pieces

A, B, C = (WorkerKey(i, 0) for i in range(3))
OF = (("model", 2),)
AT = Key(4, 0)
HALF = Extents.part(OF, [BlockRun("model", 0, 1)])
REST = WHOLE - HALF
ALL = Chunk(0, WHOLE)


def offered(source: WorkerKey, there: Extents = WHOLE, at: Key = AT) -> SourceOffers:
    return SourceOffers(source, at, {0: there})


def take(order: TakeOrder, *events: object, most: int = 1) -> list[TakerEffect]:
    """The effects of the last event."""
    taker = Taker(order, most)
    effects = taker.begin()
    for event in events:
        effects = taker.handle(event)  # type: ignore[arg-type]
    return effects


WANTED = BlocksKnown({0: (WHOLE, OF)})
SETTLE = TakeOrder((0,), (A, B, C), 1, AT)
SEVERAL = TakeOrder((0,), (A, B, C), 2, AT)
FOLLOW = TakeOrder((0,), (A, B, C), 2, follows=True)


def test_the_first_one_leads_and_gives_all_that_is_wanted():
    assert take(SETTLE) == [ReachSource(A, True)]
    assert take(SETTLE, SourceReached(A), offered(A)) == [FindBlocks((A,))]
    told = [offered(A), WANTED]
    assert take(SETTLE, *told, most=2) == [AskSource(A, ALL)]
    assert take(SETTLE, *told, BlocksCame(A, ALL), most=2) == [LeaveSource(A), TookAll()]


def test_nothing_is_asked_where_all_is_there_already():
    assert take(SETTLE, offered(A), BlocksKnown({0: (NONE, OF)})) == [LeaveSource(A), TookAll()]


def test_the_next_one_leads_where_the_first_one_is_lost():
    assert take(SETTLE, SourceLost(A, "dead")) == [ReachSource(B, True)]
    assert take(SETTLE, SourceLost(A, "dead"), SourceLost(B, "dead"), offered(C)) == [FindBlocks((C,))]
    assert take(SETTLE, SourceLost(A, "dead"), SourceLost(B, "deaf"), SourceLost(C, "gone")) == [
        TookNothing("0.0: dead; 1.0: deaf; 2.0: gone", False, (A, B, C))
    ]


def test_several_are_asked_at_once_where_it_is_worth_it():
    assert take(SEVERAL, offered(A), WANTED) == [ReachSource(B, False), AskSource(A, Chunk(0, HALF))]
    told = [offered(A), WANTED, SourceReached(B), offered(B)]
    assert take(SEVERAL, *told) == [AskSource(B, Chunk(0, REST))]
    assert take(SEVERAL, *told, BlocksCame(B, Chunk(0, REST)), BlocksCame(A, Chunk(0, HALF))) == [
        LeaveSource(A),
        LeaveSource(B),
        TookAll(),
    ]


def test_what_a_lost_one_owed_is_asked_of_one_that_is_there_or_of_the_next():
    told = [offered(A), WANTED, offered(B), BlocksCame(B, Chunk(0, REST))]
    assert take(SEVERAL, *told, SourceLost(A, "dead")) == [AskSource(B, Chunk(0, HALF))]
    assert take(SETTLE, offered(A), WANTED, SourceLost(A, "dead")) == [ReachSource(B, False)]


def test_what_is_refused_is_asked_of_the_next_one_and_then_given_up():
    told = [offered(A), WANTED, BlocksCame(A, ALL, HALF)]
    assert take(SETTLE, *told, most=2) == [ReachSource(B, False)]
    assert take(SETTLE, *told, offered(B), most=2) == [AskSource(B, Chunk(0, HALF))]
    told += [offered(B), BlocksCame(B, Chunk(0, HALF), HALF), SourceLost(C, "dead")]
    *let_go, failed = take(SETTLE, *told, most=2)
    assert let_go == [LeaveSource(A), LeaveSource(B)]
    assert isinstance(failed, TookNothing) and failed.refused and "(model 0-0) did not come from 0.0" in failed.why


def test_an_offer_of_another_position_does_not_count():
    assert take(SETTLE, offered(A, at=Key(5, 0))) == [LeaveSource(A), ReachSource(B, True)]
    told = [SourceReached(A), SourceReached(B)]
    assert take(FOLLOW, *told, offered(B, at=Key(5, 0)), offered(A)) == [LeaveSource(B), FindBlocks((A,))]
    assert take(FOLLOW, *told, offered(A), offered(B, at=Key(3, 0))) == [LeaveSource(B)]


def test_all_are_asked_where_nobody_has_all():
    order = TakeOrder((0,), (A, B), 1, AT, Pieces(WHOLE, {0: HALF, 1: REST}))
    assert take(order) == [ReachSource(A, True), ReachSource(B, True)]
    assert take(order, offered(A, HALF)) == []
    told = [offered(A, HALF), offered(B, REST)]
    assert take(order, *told) == [FindBlocks((A, B))]
    assert take(order, *told, WANTED) == [AskSource(A, Chunk(0, HALF)), AskSource(B, Chunk(0, REST))]
    assert take(order, offered(A, HALF), SourceLost(B, "dead")) == [FindBlocks((A,))]
    gone = [LeaveSource(A), TookNothing("1.0: dead", False, (B,))]
    assert take(order, offered(A, HALF), SourceLost(B, "dead"), WANTED)[-2:] == gone, (
        "before anything has come for nothing"
    )


def test_who_follows_asks_a_few_at_the_moment_at_which_one_was_reached():
    assert take(FOLLOW, SourceLost(A, "dead")) == [ReachSource(B, True)]
    assert take(FOLLOW, SourceLost(A, "dead"), SourceReached(B)) == [ReachSource(C, False)]
    told = [SourceReached(A), SourceReached(B), offered(A), WANTED, offered(B)]
    assert take(FOLLOW, *told, BlocksCame(B, Chunk(0, REST)), BlocksCame(A, Chunk(0, HALF))) == [
        LeaveSource(A, feeds=True),
        LeaveSource(B),
        TookAll(),
    ]
    assert take(FOLLOW, *told, SourceLost(B, "dead")) == [], "the one that is followed gives the rest"


def test_nobody_takes_the_place_of_one_that_is_followed():
    gone = TookNothing("0.0: dead", False, (A,))
    assert take(FOLLOW, SourceReached(A), SourceLost(A, "dead")) == [LeaveSource(B), gone]
    assert take(FOLLOW, SourceReached(A), offered(A), WANTED, offered(B), SourceLost(A, "dead")) == [
        LeaveSource(B),
        gone,
    ]


def test_what_comes_after_the_end_is_no_matter():
    told = [offered(A), WANTED, BlocksCame(A, ALL), BlocksCame(A, ALL), SourceLost(A, "closed"), offered(B)]
    assert take(SETTLE, *told, most=2) == []
    assert take(SETTLE, SourceLost(A, "dead"), SourceLost(A, "dead")) == []


def test_stages_that_the_same_have_go_together():
    members = tuple(Member(i, 0, "host") for i in range(3))
    plan = Plan(3, "because", members, (Seat(0, 0, "active", (0,)),), 1)
    sources = {0: (1, 2), 1: (1, 2), 2: (2,), 3: (), 4: (0, 1), 5: (1, 2)}
    some = Pieces(HALF)
    assert orders(plan, AT, sources, {5: some}, lambda stages, n: n, 0) == [
        TakeOrder((0, 1), (B, C), 2, AT),
        TakeOrder((2,), (C,), 1, AT),
        TakeOrder((5,), (B, C), 2, AT, some),
    ]
