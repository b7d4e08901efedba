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
    following,
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


def test_one_that_leads_may_be_lost_after_it_was_reached():
    assert take(SETTLE, SourceReached(A), SourceLost(A, "dead")) == [ReachSource(B, True)]


def test_one_alone_is_asked_where_nothing_else_is_said():
    assert take(TakeOrder((0,), (A, B, C)), offered(A), WANTED) == [AskSource(A, Chunk(0, HALF))]
    some = Pieces(HALF)
    assert take(TakeOrder((0,), (A, B), 1, AT, some)) == [ReachSource(A, True)], "each of them has all that is lacking"


def test_nobody_else_is_asked_before_one_that_was_has_said_what_it_has():
    assert take(SEVERAL, offered(A), WANTED, SourceLost(A, "dead")) == []
    assert take(SEVERAL, offered(A), WANTED, SourceLost(A, "dead"), offered(B)) == [AskSource(B, Chunk(0, HALF))]


def test_who_has_less_than_is_wanted_refuses_the_rest():
    asked, left, failed = take(TakeOrder((0,), (A,), 1, AT), offered(A, HALF), WANTED)
    assert (asked, left) == (AskSource(A, Chunk(0, HALF)), LeaveSource(A)) and isinstance(failed, TookNothing)
    assert failed.refused and failed.why and not failed.lost


def test_what_is_stopped_asks_nobody():
    taker = Taker(SETTLE, 1)
    taker.begin()
    taker.stop()
    assert taker.over and taker.handle(SourceLost(A, "dead")) == []


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
    failed = take(TakeOrder((0,), (A,), 1, AT), offered(A, at=Key(5, 0)))[-1]
    assert isinstance(failed, TookNothing) and str(Key(5, 0)) in failed.why and str(AT) in failed.why
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


def test_who_have_parts_are_all_followed_and_who_has_all_alone():
    assert following((0,), (A, B, C), 2, in_parts=False) == FOLLOW
    parts = following((0,), (A, B), 1, in_parts=True)
    assert take(parts) == [ReachSource(A, True), ReachSource(B, True)]
    told = [SourceReached(A), SourceReached(B), offered(A, HALF), offered(B, REST)]
    assert take(parts, *told) == [FindBlocks((A, B))]
    came = [BlocksCame(A, Chunk(0, HALF)), BlocksCame(B, Chunk(0, REST))]
    assert take(parts, *told, WANTED, *came) == [LeaveSource(A, True), LeaveSource(B, True), TookAll()]


def test_nobody_takes_the_place_of_one_that_is_followed():
    gone = TookNothing("0.0: dead", False, (A,))
    assert take(FOLLOW, SourceReached(A), SourceLost(A, "dead")) == [LeaveSource(B), gone]
    assert take(FOLLOW, SourceReached(A), offered(A), WANTED, offered(B), SourceLost(A, "dead")) == [
        LeaveSource(B),
        gone,
    ]


def test_where_one_that_is_followed_refuses_nobody_feeds_and_nobody_is_asked_later():
    told = [SourceReached(A), SourceReached(B), offered(A), WANTED, SourceLost(B, "dead")]
    left, failed = take(FOLLOW, *told, BlocksCame(A, ALL, WHOLE), most=2)
    assert left == LeaveSource(A, feeds=False) and isinstance(failed, TookNothing) and failed.refused


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


def test_pieces_of_ones_own_come_in_no_order():
    plan = Plan(3, "because", (Member(0, 0, "host"),), (Seat(0, 0, "active", (0,)),), 1)
    assert orders(plan, AT, {0: (0, 1), 1: ()}, {0: Pieces(HALF), 1: Pieces(HALF)}, lambda stages, n: n, 0) == []
