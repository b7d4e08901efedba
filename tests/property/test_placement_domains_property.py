from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from everstep.base.domains import Domains, ordered
from everstep.base.pool_wish import PoolWish, make_wish
from everstep.placement.domain_spread import Crowd, dealt, farthest, hosts_in_order
from everstep.placement.lanes import place
from everstep.placement.tiers import folded
from everstep.placement.tree import cover
from sampling import examples


def hosts_of_racks(racks: list[list[int]]) -> dict[int, Domains]:
    """Workers by id, so many on each host of each rack; ids go from host to host in turn, as slots are given out."""
    places = [(rack, f"h{rack}-{k}") for rack, sizes in enumerate(racks) for k in range(len(sizes))]
    room = {host: racks[rack][int(host.split("-")[1])] for rack, host in places}
    found: dict[int, Domains] = {}
    while any(room.values()):
        for rack, host in places:
            if room[host]:
                room[host] -= 1
                found[len(found)] = ordered({"rack": f"r{rack}"}, host)
    return found


def members(domains: dict[int, Domains]) -> dict[tuple[str, str], set[int]]:
    """By domain, who is in it."""
    found: dict[tuple[str, str], set[int]] = {}
    for i, labels in domains.items():
        for label in labels:
            found.setdefault(label, set()).add(i)
    return found


racks = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4)


@given(racks, st.integers(1, 5))
@settings(max_examples=examples(300))
def test_each_domain_has_as_equal_a_share_in_each_pool_as_can_be(sizes, pools):
    domains = hosts_of_racks(sizes)
    assume(len(domains) >= pools)
    found = dealt(domains, pools, domains)
    assert sorted(i for pool in found for i in pool) == sorted(domains)
    assert max(map(len, found)) - min(map(len, found)) <= 1
    for there in members(domains).values():
        counts = [len(there & set(pool)) for pool in found]
        assert max(counts) - min(counts) <= 1


@given(st.integers(2, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.data())
@settings(max_examples=examples(200))
def test_with_k_domains_and_redundancy_below_k_no_domain_s_death_loses_a_stage(k, stages, hosts, per_host, data):
    """As many workers in each domain, of which each pool has redundancy + 1."""
    redundancy = data.draw(st.integers(1, k - 1))
    workers = stages * (redundancy + 1)
    domains = hosts_of_racks([[per_host] * hosts for _ in range(k)])
    ids = data.draw(st.permutations(sorted(domains)))[:workers]
    assume(len(ids) == workers)
    racks_of = members({i: domains[i] for i in ids})
    assume(max(len(there) for (kind, _), there in racks_of.items() if kind == "rack") <= workers - stages)
    wish = make_wish(workers, stages, redundancy)
    given = dict(zip(sorted(range(workers)), (domains[i] for i in ids), strict=True))
    seats = place(range(workers), 8, stages=stages, wish=wish, domains=given)
    for there in members(given).values():
        assert {s.stage for s in seats if s.worker_id not in there} == set(range(stages)) or len(
            there
        ) > workers - stages
    for (kind, _), there in members(given).items():
        if kind == "rack":
            left = place(
                sorted(set(range(workers)) - there), 8, stages=stages, wish=wish, domains=given, previous=seats
            )
            was = {(s.worker_id, s.stage) for s in seats}
            assert all((s.worker_id, s.stage) in was for s in left), "nobody has to copy another stage"


@given(racks, st.integers(1, 3), st.integers(0, 2), st.data())
@settings(max_examples=examples(200))
def test_hosts_that_go_and_come_move_nobody_who_stays(sizes, stages, redundancy, data):
    workers = stages * (redundancy + 1)
    domains = hosts_of_racks(sizes)
    assume(len(domains) >= workers)
    wish = make_wish(workers, stages, redundancy)
    live = set(range(workers))
    seats = place(live, 12, stages=stages, wish=wish, domains=domains)
    for _ in range(data.draw(st.integers(1, 4))):
        gone = members({i: domains[i] for i in live})[data.draw(st.sampled_from(domains[min(live)]))]
        if live == gone:
            continue
        back = data.draw(st.sets(st.sampled_from(sorted(set(domains) - live | gone)), max_size=workers))
        was, survivors = {(s.worker_id, s.stage) for s in seats}, live - gone
        live = survivors | set(sorted(back)[: max(0, workers - len(survivors))])
        again = place(live, 12, stages=stages, wish=wish, domains=domains, previous=seats)
        shuffled = sorted(live, key=lambda i: random.Random(i).random())
        assert again == place(shuffled, 12, stages=stages, wish=wish, domains=domains, previous=seats)
        held = {stage for i, stage in was if i in survivors}
        lost = set(range(stages)) - held
        now = {(s.worker_id, s.stage) for s in again}
        left = {(i, k) for i, k in was if i in survivors} - now
        assert len(left) <= len(lost), "one mover for each stage that has lost its whole pool"
        seats = again


@given(racks, st.integers(1, 3), st.integers(0, 8))
@settings(max_examples=examples(200))
def test_lanes_of_a_host_are_one_run_in_each_pool(sizes, stages, more):
    domains = hosts_of_racks(sizes)
    assume(len(domains) >= stages)
    lanes = len(domains) + more
    seats = place(domains, lanes, stages=stages, domains=domains)
    by_stage = [[s for s in seats if s.stage == stage] for stage in range(stages)]
    for pool in by_stage:
        own = {s.worker_id: s.lanes for s in pool}
        assert all(b - a == 1 for run in own.values() for a, b in pairwise(run)), "and each worker's too"
        for there in members({i: domains[i] for i in own}).values():
            run = sorted(lane for i in there for lane in own[i])
            assert run == list(range(run[0], run[0] + len(run)))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 9))
@settings(max_examples=examples(150))
def test_no_other_even_sizes_would_send_fewer_sums_between_hosts(sizes, more):
    """The naive oracle: every way to say who has one lane more."""
    domains = hosts_of_racks([sizes])
    workers = len(domains)
    lanes = workers + more
    order = [i for there in hosts_in_order(domains, domains) for i in there]
    small, larger = divmod(lanes, workers)

    def sums(run_of: dict[int, int]) -> int:
        first, total = 0, 0
        for there in hosts_in_order(domains, domains):
            stop = first + sum(run_of[i] for i in there)
            total += len(cover(range(first, stop), lanes))
            first = stop
        return total

    found = {s.worker_id: s.lanes for s in place(domains, lanes, domains=domains)}
    every = (
        {order[k]: small + (mask >> k & 1) for k in range(workers)}
        for mask in range(1 << workers)
        if mask.bit_count() == larger
    )
    nodes = [[n for i in there for n in cover(found[i], lanes)] for there in hosts_in_order(domains, domains)]
    assert sum(len(folded(there, lanes)) for there in nodes) == min(map(sums, every))


@given(racks, st.data())
def test_who_keeps_a_copy_is_as_far_away_as_anybody_is(sizes, data):
    domains = hosts_of_racks(sizes)
    pool = data.draw(st.sets(st.sampled_from(sorted(domains)), min_size=1))
    others = sorted(set(domains) - pool)
    found = farthest(others, pool, domains)
    if found is None:
        assert not others
        return
    crowd = Crowd(pool, domains)
    assert all(crowd.near_worker(found) <= crowd.near_worker(i) for i in others)
    racks_of_pool = {dict(domains[i])["rack"] for i in pool}
    elsewhere = [i for i in others if dict(domains[i])["rack"] not in racks_of_pool]
    assert not elsewhere or found in elsewhere


def test_on_one_host_all_is_as_it_would_be_without_domains():
    domains = {i: ordered({"rack": "r"}, "h") for i in range(6)}
    for stages in (1, 2, 3):
        for wish in (make_wish(6, stages), PoolWish()):
            seats = place(range(6), 12, stages=stages, wish=wish)
            assert seats == place(range(6), 12, stages=stages, wish=wish, domains=domains)
            fewer = place([0, 2, 3, 5], 12, stages=stages, wish=wish, previous=seats)
            assert fewer == place([0, 2, 3, 5], 12, stages=stages, wish=wish, previous=seats, domains=domains)
            again = place(range(6), 12, stages=stages, wish=wish, previous=fewer, anew=True)
            assert again == place(range(6), 12, stages=stages, wish=wish, previous=fewer, anew=True, domains=domains)


def test_homes_that_are_named_one_by_one_are_kept():
    domains = {i: ordered({}, f"h{i // 2}") for i in range(4)}
    wish = PoolWish(homes=((0, 1), (2, 3)), named=True)
    seats = place(range(4), 8, stages=2, wish=wish, domains=domains)
    assert [(s.worker_id, s.stage) for s in seats] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    free = place(range(4), 8, stages=2, wish=PoolWish(homes=((0, 1), (2, 3))), domains=domains)
    assert [(s.worker_id, s.stage) for s in free] == [(0, 0), (2, 0), (1, 1), (3, 1)]


def test_racks_of_two_rows_that_bear_one_name_are_two_racks():
    domains = {
        0: ordered({"row": "a", "rack": "r1"}, "h0"),
        1: ordered({"row": "a", "rack": "r1"}, "h1"),
        2: ordered({"row": "b", "rack": "r1"}, "h2"),
    }
    assert farthest([1, 2], [0], domains) == 2
