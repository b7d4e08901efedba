"""Giving state to others: who may have what when, who is fed, and who is let go."""

from __future__ import annotations

from everstep.protocol.moving.giver import (
    MAX_BACKLOG,
    AskerCame,
    AskerGone,
    AskerHasAll,
    EndAsker,
    FeedStep,
    GenerationBegan,
    Giver,
    GiverEffect,
    GiverEvent,
    GiveState,
    JointAsk,
    ShelfEmptied,
    ShelfFilled,
    StandsStill,
    StepSent,
    StepToFeed,
    WentElsewhere,
)

ONE, BOTH = frozenset({0}), frozenset({0, 1})
JOINER, HELPED = AskerCame("j", (0,), None, True), AskerCame("h", (0,), None, False)
FED = (JOINER, StandsStill(BOTH), AskerHasAll("j"))


def give(*events: GiverEvent) -> list[GiverEffect]:
    """The effects of the last event."""
    giver = Giver()
    effects: list[GiverEffect] = []
    for event in events:
        effects = giver.handle(event)
    return effects


def test_members_get_what_is_on_the_shelf_of_their_generation():
    asked, filled = AskerCame("m", (0,), ("settle", 3)), ShelfFilled(("settle", 3), BOTH)
    assert give(asked) == []
    assert give(asked, ShelfFilled(("settle", 2), BOTH)) == []
    assert give(asked, ShelfFilled(("kept", 3), BOTH)) == []
    assert give(asked, filled) == [GiveState("m", "settle")]
    assert give(filled, asked) == [GiveState("m", "settle")]
    assert give(ShelfFilled(("settle", 3), ONE), AskerCame("m", (1,), ("settle", 3))) == [EndAsker("m")]
    assert give(filled, ShelfEmptied("settle"), asked) == []
    assert give(asked, AskerGone("m"), filled) == []
    assert give(asked, filled, filled) == [], "it is given once"
    assert give(AskerCame("m", (0, 1), ("settle", 3)), filled) == [GiveState("m", "settle")]


def test_who_keeps_a_snapshot_for_another_pool_gets_that_of_its_step_or_none():
    asked, filled = AskerCame("k", (0,), ("kept", 4)), ShelfFilled(("kept", 4), BOTH)
    assert give(asked, filled) == give(filled, ShelfEmptied("settle"), asked) == [GiveState("k", "kept")]
    assert give(ShelfFilled(("kept", 6), BOTH), asked) == [EndAsker("k")], "a newer one has taken its place"
    giver = Giver()
    for event, busy in ((filled, False), (asked, True), (ShelfFilled(("settle", 9), BOTH), True)):
        giver.handle(event)
        assert giver.busy == busy
    for end in (AskerHasAll("k"), AskerGone("k")):
        giver.handle(asked)
        assert giver.busy
        giver.handle(end)
        assert not giver.busy, "the next one may be taken"


def test_joiners_get_the_state_of_the_next_boundary_and_then_every_step():
    assert give(JOINER, StepToFeed(BOTH)) == []
    assert give(JOINER, StandsStill(BOTH)) == [GiveState("j", None)]
    assert give(JOINER, StandsStill(BOTH), StepToFeed(BOTH)) == [FeedStep("j", (0,))], "be it still copying"
    assert give(*FED, StepToFeed(BOTH)) == [FeedStep("j", (0,))]
    assert give(*FED, StandsStill(BOTH)) == []
    other, both = AskerCame("j", (1,), None, True), AskerCame("j", (0, 1), None, True)
    assert give(other, StandsStill(ONE)) == [EndAsker("j")] and give(other, StandsStill(ONE), StandsStill(BOTH)) == []
    assert give(both, StandsStill(BOTH)) == [GiveState("j", None)]
    assert give(both, StandsStill(BOTH), StepToFeed(BOTH)) == [FeedStep("j", (0, 1))]


def test_who_takes_only_blocks_is_not_fed():
    assert give(HELPED, StandsStill(BOTH), StepToFeed(BOTH)) == []
    assert give(HELPED, StandsStill(BOTH), AskerHasAll("h")) == [EndAsker("h")]


def test_no_step_is_left_out():
    assert give(*FED, WentElsewhere()) == [EndAsker("j")]
    assert give(*FED, WentElsewhere(), StepToFeed(BOTH)) == []
    assert give(JOINER, WentElsewhere(), StandsStill(BOTH)) == [GiveState("j", None)], "it begins after the jump"
    assert give(JOINER, WentElsewhere(), StandsStill(BOTH), StepToFeed(BOTH)) == [FeedStep("j", (0,))]
    assert give(*FED, StepToFeed(frozenset({1}))) == [EndAsker("j")]


def test_who_is_let_go_while_it_copies_has_that_first():
    let_go = JOINER, StandsStill(BOTH), WentElsewhere()
    assert give(*let_go) == []
    assert give(*let_go, AskerHasAll("j")) == [EndAsker("j")]


def test_who_goes_while_a_step_is_sent_is_owed_nothing():
    assert give(*FED, AskerGone("j"), StepSent("j"), StepToFeed(BOTH)) == []


def test_steps_that_wait_are_bounded():
    waiting = [*FED, *[StepToFeed(BOTH)] * MAX_BACKLOG]
    assert give(*waiting) == [FeedStep("j", (0,))]
    assert give(*waiting, StepSent("j"), StepToFeed(BOTH)) == [FeedStep("j", (0,))]
    for sent in ((), (StepSent("j"), StepToFeed(BOTH))):
        assert give(*waiting, *sent, StepToFeed(BOTH)) == [EndAsker("j")]


JOINT = AskerCame("j", (0,), None, True, JointAsk(5, 7, (0, 1), 1, ((4, 9),), rest=True))


OFFERED = (JOINT, StandsStill(BOTH, frozenset({7})), AskerHasAll("j"))


def test_who_waits_for_several_donors_is_offered_what_all_of_them_offer():
    assert give(JOINT, StandsStill(BOTH)) == [] and give(JOINT, StandsStill(BOTH, frozenset({6}))) == []
    assert give(JOINT, StandsStill(BOTH, frozenset({7}))) == [GiveState("j", None)]
    assert give(JOINT, GenerationBegan()) == [EndAsker("j")], "some may have offered, and others not"
    assert give(JOINER, GenerationBegan()) == [] and give(*OFFERED, GenerationBegan()) == []


def test_it_is_fed_for_as_long_as_the_gradients_of_its_segments_are_here():
    fed = FeedStep("j", (0,))
    assert give(*OFFERED, StepToFeed(BOTH)) == give(*OFFERED, StepToFeed(BOTH, {0: ((2, 9),), 1: ()})) == [fed]
    assert give(*OFFERED, StepToFeed(BOTH, {0: ((5, 200),)})) == [EndAsker("j")]
    assert give(*FED, StepToFeed(BOTH, {0: ((5, 200),)})) == [EndAsker("j")], "who is to get all of them"


def test_what_may_still_be_read_is_known():
    giver = Giver()
    assert not giver.waits() and not giver.feeds
    giver.handle(JOINER)
    assert giver.waits() and not giver.giving and not giver.feeds
    giver.handle(StandsStill(BOTH))
    giver.handle(HELPED)
    assert giver.waits() and giver.feeds, "one of them"
    giver.handle(AskerGone("h"))
    assert giver.giving == ("j",) and giver.feeds and not giver.waits()
    giver.handle(WentElsewhere())
    assert giver.giving == ("j",) and not giver.feeds
    giver.handle(AskerHasAll("j"))
    assert giver.giving == ()
