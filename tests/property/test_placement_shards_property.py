"""Plans in which seats hold parts of a stage, too: every block has its holders, evenly, and few of them change."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from everstep.base.errors import InvariantViolation
from everstep.base.extents import NONE, WHOLE, BlockRun, Extents, common
from everstep.base.plan import SEGMENTS, Member, Plan, Seat, Shard
from everstep.placement.shards import (
    Division,
    divided,
    finishers,
    lost_stages,
    merged_runs,
    runs_of_numbers,
    spread,
    writers,
)
from sampling import examples

sizes = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(lambda n: tuple((f"p{k}", s) for k, s in enumerate(n)))
ids = st.sets(st.integers(0, 40), min_size=1, max_size=20)


def blocks(runs):
    assert all(lo < hi for lo, hi in runs)
    assert all(a[1] < b[0] for a, b in pairwise(runs)), "ascending, none beginning where another ends"
    return [block for run in runs for block in range(*run)]


@given(st.integers(0, 500), ids)
def test_what_all_hold_is_cut_into_one_even_run_for_each(n_blocks, members):
    """The bits of no checkpoint and the norms of no record move with this: larger runs first, in id order."""
    found = divided((("all", n_blocks),), dict.fromkeys(members, WHOLE))
    assert list(found) == sorted(members)
    assert [block for runs in found.values() for block in blocks(runs)] == list(range(n_blocks))
    counts = [sum(hi - lo for lo, hi in runs) for runs in found.values()]
    assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)
    assert all(len(runs) <= 1 for runs in found.values())


@given(sizes, st.data())
def test_each_block_is_one_holder_s_and_none_has_more_than_its_part(of, data):
    total = sum(n for _, n in of)
    members = data.draw(st.sets(st.integers(0, 9), min_size=1, max_size=5))
    who = [data.draw(st.sets(st.sampled_from(sorted(members)), min_size=1)) for _ in range(total)]
    held = {i: Extents.numbered(of, [block for block in range(total) if i in who[block]]) for i in members}
    found = divided(of, held)
    assert list(found) == sorted(members)
    assert sorted(block for runs in found.values() for block in blocks(runs)) == list(range(total))
    assert all(i in who[block] for i, runs in found.items() for block in blocks(runs))
    same = Counter(tuple(sorted(holders)) for holders in who)
    for holders, count in same.items():
        pieces = sum(1 for k in range(total) if tuple(sorted(who[k])) == holders and (not k or who[k - 1] != who[k]))
        for i in holders:
            mine = sum(tuple(sorted(who[block])) == holders for block in blocks(found[i]))
            assert abs(mine - count / len(holders)) < pieces, "each run is divided evenly"
    if total:
        lonely = {i: extents - Extents.numbered(of, [0]) for i, extents in held.items()}
        with pytest.raises(InvariantViolation, match="no holder"):
            divided(of, lonely)


def pool(held):
    members = tuple(Member(i, 0, "host") for i in held)
    seats = tuple(Seat(i, 1, "active", ()) for i in held)
    shards = tuple(
        Shard(i, 1, state, gradient) for i, (state, gradient) in held.items() if (state, gradient) != (WHOLE,) * 2
    )
    other = (Shard(0, 0, Extents.numbered((("x", 3),), [1])),)
    return Plan(1, "", members, seats, 8, stages=2, shards=(*other, *shards))


def test_a_seat_that_the_plan_does_not_name_holds_all_of_its_stage():
    plan = pool({3: (WHOLE, WHOLE), 5: (WHOLE, WHOLE), 7: (WHOLE, WHOLE)})
    assert finishers(plan.of_pool(1), 10) == {3: ((0, 4),), 5: ((4, 7),), 7: ((7, 10),)}
    assert finishers(plan.of_pool(1), 2) == {3: ((0, 1),), 5: ((1, 2),), 7: ()}
    assert writers(plan, 1, (("model", 3), ("rest", 4))) == {3: ((0, 3),), 5: ((3, 5),), 7: ((5, 7),)}


def test_who_holds_parts_finishes_and_writes_some_of_them():
    """As with optimizer state in segments, each of which two members have, and the model at all."""
    of, grid = (("model", 4), ("optimizer/m", 4)), (("gradient", 4),)
    model = Extents.part(of, [BlockRun("model", 0, 4)])
    held = {}
    for i, (lo, hi) in {2: (0, 2), 4: (2, 4)}.items():
        held[i] = (
            model | Extents.part(of, [BlockRun("optimizer/m", lo, hi)]),
            Extents.part(grid, [BlockRun("gradient", lo, hi)]),
        )
    plan = pool(held)
    assert finishers(plan.of_pool(1), 4) == {2: ((0, 2),), 4: ((2, 4),)}
    assert writers(plan, 1, of) == {2: ((0, 2), (4, 6)), 4: ((2, 4), (6, 8))}
    joined = pool({**held, 9: (WHOLE, WHOLE)})
    assert writers(joined, 1, of) == {2: ((0, 2), (5, 6)), 4: ((2, 3), (6, 7)), 9: ((3, 5), (7, 8))}


def test_a_stage_is_lost_with_the_last_holder_of_a_block():
    of = (("model", 2), ("optimizer/m", 3))
    held = {i: (Extents.numbered(of, [0, 1, 2 + i, 2 + (i + 1) % 3]), WHOLE) for i in range(3)}
    plan = replace(pool(held), stages=1, seats=tuple(replace(s, stage=0) for s in pool(held).seats), shards=())
    plan = replace(plan, shards=tuple(Shard(i, 0, state) for i, (state, _) in held.items()))
    assert [lost_stages(plan, gone) for gone in ({0, 1, 2}, {0, 1}, {1, 2}, {1}, ())] == [[], [], [], [0], [0]]
    assert lost_stages(replace(plan, shards=()), {1}) == [] and lost_stages(pool(held), {0, 1, 2}) == [0]


def test_a_share_is_a_set_of_blocks():
    assert Shard(1, 0, NONE).state == NONE
    with pytest.raises(InvariantViolation):
        Shard(1, 0, Extents(False, (BlockRun("model", 2, 1),), (("model", 4),)))
    with pytest.raises(InvariantViolation):
        Shard(1, 0, WHOLE, Extents(False, (BlockRun("model", 0, 2), BlockRun("model", 2, 3)), (("model", 4),)))


# ---- segments


def hosts(members, count):
    return {i: (("host", f"h{k % count}"),) for k, i in enumerate(sorted(members))}


def check_even(found, members, copies):
    counts = Counter(dict.fromkeys(members, 0))
    for who in found:
        assert len(set(who)) == len(who) == min(copies, len(members)) and set(who) <= set(members)
        counts.update(who)
    assert max(counts.values()) - min(counts.values()) <= 1


def moved(found, before):
    return sum(len(set(who) - set(old)) for who, old in zip(found, before, strict=True))


@given(st.integers(0, 70), st.integers(1, 3), ids, st.integers(1, 4), st.data())
@settings(max_examples=examples(200))
def test_segments_are_spread_evenly_and_few_move(segments, copies, members, n_hosts, data):
    domains = hosts(range(41), n_hosts)
    held = spread(segments, copies, members, domains)
    check_even(held, members, copies)
    assert spread(segments, copies, members, domains, held) == held
    for _ in range(4):
        before, there = held, set(members)
        gone = data.draw(st.sets(st.sampled_from(sorted(members)), max_size=len(members) - 1))
        come = data.draw(st.sets(st.integers(0, 40), max_size=3))
        members = (there - gone) | come
        held = spread(segments, copies, members, domains, before)
        check_even(held, members, copies)


@given(st.integers(1, 3), st.sets(st.integers(0, 40), min_size=4, max_size=16), st.integers(1, 4), st.data())
def test_a_joiner_takes_its_part_and_nobody_else_takes_anything(copies, members, n_hosts, data):
    domains, joiner = hosts(range(41), n_hosts), data.draw(st.integers(0, 40))
    assume(joiner not in members)
    segments = data.draw(st.integers(64, 90))
    before = spread(segments, copies, members, domains)
    after = spread(segments, copies, {*members, joiner}, domains, before)
    share = sum(joiner in who for who in after)
    assert share == segments * copies // (len(members) + 1)
    assert moved(after, before) == share


@given(st.integers(1, 3), st.sets(st.integers(0, 40), min_size=5, max_size=16), st.integers(1, 4), st.data())
def test_of_one_that_leaves_the_segments_move_and_hardly_any_other(copies, members, n_hosts, data):
    domains, gone = hosts(range(41), n_hosts), data.draw(st.sampled_from(sorted(members)))
    segments = data.draw(st.integers(64, 90))
    before = spread(segments, copies, members, domains)
    after = spread(segments, copies, members - {gone}, domains, before)
    lost, growth = sum(gone in who for who in before), segments * copies // (len(members) * (len(members) - 1)) + 2
    partners = {i for who in before if gone in who for i in who} - {gone}  # who cannot take their own segments
    assert lost <= moved(after, before) + copies and moved(after, before) <= lost + growth * len(partners)


@given(st.integers(2, 4), st.integers(1, 4), st.integers(1, 70), st.data())
def test_copies_lie_on_as_many_hosts_as_there_are(n_hosts, per_host, segments, data):
    members = range(n_hosts * per_host)
    copies = data.draw(st.integers(2, n_hosts))
    domains = hosts(members, n_hosts)
    for who in spread(segments, copies, members, domains):
        assert len({domains[i] for i in who}) == copies


def test_nobody_to_hold_anything_is_a_bug():
    for segments, copies, members in ((3, 1, []), (3, 0, [1]), (-1, 1, [0])):
        with pytest.raises(InvariantViolation):
            spread(segments, copies, members, {})


# ---- who takes and who finishes blocks of a gradient

taken = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.sets(st.integers(0, n - 1), min_size=1), max_size=60).map(lambda who: (n, who))
)


@given(taken)
def test_one_taker_of_each_block_finishes_it_and_none_has_much_more_to_do(found):
    n, who = found
    takes = {i: runs_of_numbers(b for b, ids in enumerate(who) if i in ids) for i in range(n)}
    division = Division.among(takes, len(who))
    finishes = {i: set(blocks(runs)) for i, runs in division.finishes.items()}
    assert sorted(b for some in finishes.values() for b in some) == list(range(len(who)))
    assert all(i in who[b] for i, some in finishes.items() for b in some)
    pair = Division.joined(division, [(0, *range(2, n)), *([(1,)] if n > 1 else [])], len(who))
    assert set(blocks(pair.takes[0])) == {b for b, ids in enumerate(who) if ids - {1}}
    assert sorted(b for runs in pair.finishes.values() for b in blocks(runs)) == list(range(len(who)))


@pytest.mark.parametrize(("members", "copies"), [(2, 1), (8, 2), (5, 3)])
def test_members_that_hold_as_much_finish_as_much(members, copies):
    holders = spread(SEGMENTS, copies, range(members), {})
    takes = {i: runs_of_numbers(b for b, who in enumerate(holders) if i in who) for i in range(members)}
    counts = [len(blocks(runs)) for runs in Division.among(takes, SEGMENTS).finishes.values()]
    assert max(counts) - min(counts) <= 0.2 * SEGMENTS / members, counts


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), max_size=8), st.sets(st.integers(0, 30)))
def test_blocks_in_both_and_blocks_in_either(spans, others):
    runs = merged_runs((lo, lo + n) for lo, n in spans)
    some = {b for lo, n in spans for b in range(lo, lo + n)}
    assert blocks(runs) == sorted(some)
    assert blocks(merged_runs(common(runs, runs_of_numbers(sorted(others))))) == sorted(some & others)
