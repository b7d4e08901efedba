"""The work queue of one that copies from several donors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.base.extents import NONE, WHOLE, BlockRun, Extents
from everstep.protocol.moving.chunks import Chunk, Chunks, share

OF = (("model", 6), ("exp_avg", 4))


def part(*runs: tuple[str, int, int]) -> Extents:
    return Extents.part(OF, [BlockRun(*run) for run in runs])


def queue(most: int = 4, missing: Extents = WHOLE) -> Chunks[str]:
    made: Chunks[str] = Chunks(most)
    made.want(0, missing, OF)
    return made


def test_chunks_go_to_whoever_is_free():
    q = queue()
    q.join("a", {0: WHOLE})
    q.join("b", {0: WHOLE})
    first, second = q.next("a"), q.next("b")
    assert first == Chunk(0, part(("model", 0, 4))) and second == Chunk(0, part(("model", 4, 6), ("exp_avg", 0, 2)))
    q.done("b", second)
    third = q.next("b")
    assert third == Chunk(0, part(("exp_avg", 2, 4))) and q.next("a") is None and not q.finished
    q.done("a", first)
    q.done("b", third)
    assert q.finished and not q.out_of_reach


def test_what_one_that_died_owed_is_asked_of_the_others():
    q = queue(10)
    q.join("a", {0: WHOLE})
    owed = q.next("a")
    q.join("b", {0: WHOLE})
    assert owed is not None and q.next("b") is None and not q.out_of_reach
    q.lost("a")
    assert q.next("a") is None and q.next("b") == owed
    q.lost("b")
    assert q.out_of_reach == {0: WHOLE} and not q.finished


def test_a_damaged_block_is_asked_of_another_donor_alone():
    q = queue(10)
    q.join("a", {0: WHOLE})
    chunk = q.next("a")
    bad = part(("exp_avg", 1, 2))
    q.done("a", chunk, damaged=bad)
    assert q.next("a") is None and q.out_of_reach == {0: bad}, "not again of the same"
    q.join("b", {0: WHOLE})
    again = q.next("b")
    assert again == Chunk(0, bad) and not q.out_of_reach
    q.done("b", again)
    assert q.finished


def test_an_answer_to_what_is_not_asked_any_more_says_nothing():
    q = queue(5)
    for donor in ("a", "b"):
        q.join(donor, {0: WHOLE})
    chunk = q.next("a")
    q.done("a", chunk)
    q.done("a", chunk, damaged=chunk.extents)
    other = q.next("b")
    q.lost("b")
    q.done("b", other)
    assert q.next("a") == other and not q.finished


def test_it_ends_with_the_last_stage_and_the_last_answer():
    q = queue(10)
    q.want(1, NONE, OF)
    assert not q.finished
    q.join("a", {0: WHOLE})
    q.join("b", {0: WHOLE})
    chunk = q.next("a")
    assert not q.finished
    q.done("a", chunk)
    assert q.finished


def test_each_gives_what_it_has():
    q = queue(10, missing=part(("model", 0, 2), ("exp_avg", 0, 4)))
    q.join("a", {0: part(("model", 0, 6)), 1: WHOLE})
    q.join("b", {0: part(("exp_avg", 0, 3))})
    assert q.next("a") == Chunk(0, part(("model", 0, 2)))
    assert q.next("b") == Chunk(0, part(("exp_avg", 0, 3)))
    assert q.out_of_reach == {0: part(("exp_avg", 3, 4))}


def test_a_state_without_blocks_is_there_at_once():
    q: Chunks[str] = Chunks(1)
    q.want(0, WHOLE, ())
    assert q.finished and q.out_of_reach == {}


def test_small_states_have_one_donor():
    assert share(100, 4, most=3, least_bytes=64) == 1
    assert share(200, 4, most=3, least_bytes=64) == 3
    assert share(200, 2, most=3, least_bytes=64) == 2 and share(0, 0, most=3, least_bytes=64) == 1
    assert share(3, 3, most=3, least_bytes=1) == share(3, 3, most=3, least_bytes=0) == 3


@given(st.lists(st.sampled_from(["ask", "done", "damaged", "lost", "join"]), max_size=60), st.randoms())
def test_every_block_comes_once_whatever_happens(acts, rng):
    """A dumb oracle: blocks asked for and not answered are never asked for twice, and in the end all have come."""
    q = queue(3)
    asked: dict[str, list[Chunk]] = {}
    got, number = NONE, 0
    for act in [*acts, "join", *["ask", "done"] * 30]:
        donor = rng.choice(sorted(asked)) if asked else ""
        if act == "join" and len(asked) < 4:
            number += 1
            asked[f"donor {number:03}"] = []
            q.join(f"donor {number:03}", {0: WHOLE})
        elif act == "lost" and donor:
            del asked[donor]
            q.lost(donor)
        elif act == "ask" and donor and (chunk := q.next(donor)) is not None:
            under_way = [c.extents for chunks in asked.values() for c in chunks]
            assert not any(chunk.extents & other for other in [got, *under_way])
            asked[donor].append(chunk)
        elif act in ("done", "damaged") and donor and asked[donor]:
            chunk = asked[donor].pop(0)
            bad = chunk.extents.first(1, OF) if act == "damaged" else NONE
            got |= chunk.extents - bad
            q.done(donor, chunk, bad)
    q.join("last", {0: WHOLE})
    for donor in [*asked, "last"]:
        for chunk in asked.get(donor, []):
            q.done(donor, chunk)
            got |= chunk.extents
        while (chunk := q.next(donor)) is not None:
            assert not chunk.extents & got
            q.done(donor, chunk)
            got |= chunk.extents
    assert q.finished and got == WHOLE
