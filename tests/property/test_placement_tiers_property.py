from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.base.ports import Node
from everstep.placement.lanes import place
from everstep.placement.tiers import Tiers, folded
from everstep.placement.tree import cover, fold

layouts = st.dictionaries(st.integers(0, 20), st.sampled_from("abcd"), min_size=1, max_size=9)


@given(layouts, st.integers(0, 40))
def test_each_host_has_one_courier_and_the_couriers_alike_much_to_finish(host_of, n_blocks):
    tiers = Tiers.of(host_of)
    assert sorted(w for there in tiers.hosts for w in there) == sorted(host_of)
    couriers = {there[0] for there in tiers.hosts}
    for w in host_of:
        inside, outside = tiers.inside(w), tiers.outside(w)
        assert w in inside and inside[0] in couriers
        assert sorted([inside, *outside]) == sorted(tiers.hosts) and inside not in outside
        assert {host_of[other] for other in inside} == {host_of[w]}
    shares = tiers.shares(n_blocks)
    assert set(shares) == set(host_of)
    assert sorted(k for runs in shares.values() for run in runs for k in range(*run)) == list(range(n_blocks))
    sizes = [sum(last - first for first, last in shares[w]) for w in couriers]
    assert max(sizes) - min(sizes) <= 1 and sum(sizes) == n_blocks


@given(st.integers(1, 24), st.data())
def test_a_host_sends_the_fewest_sums_and_their_bits_are_the_tree_s(n_lanes, data):
    owner_of = data.draw(st.lists(st.integers(0, 5), min_size=n_lanes, max_size=n_lanes))
    hosts = data.draw(st.lists(st.integers(0, 2), min_size=6, max_size=6))
    leaf = {lane: str(lane) for lane in range(n_lanes)}

    def add(left: str, right: str) -> str:
        return f"({left}+{right})"

    def lanes_of(node: Node) -> dict[int, str]:
        return {lane - node.lo: leaf[lane] for lane in range(*node)}

    tops = {}
    for host in set(hosts):
        nodes = [
            node
            for w in range(6)
            if hosts[w] == host
            for node in cover([lane for lane in range(n_lanes) if owner_of[lane] == w], n_lanes)
        ]
        found = folded(nodes, n_lanes)
        assert sorted(n for parts in found.values() for n in parts) == sorted(nodes)
        assert tuple(found) == cover([lane for node in nodes for lane in range(*node)], n_lanes)
        for top, parts in found.items():
            assert [lane for part in parts for lane in range(*part)] == list(range(*top))
            tops[top] = fold(top.hi - top.lo, lanes_of(top), add)  # a subtree has the shape of a tree of its own
    whole = fold(n_lanes, leaf, add)
    assert all(text in whole for text in tops.values())


@given(st.integers(1, 4), st.integers(1, 4))
def test_even_runs_of_a_power_of_two_leave_one_sum_to_each_host(hosts, workers):
    """The traffic of an all-reduce, whatever the number of workers of a host."""
    hosts, workers = 1 << hosts, 1 << workers
    seats = place(range(hosts * workers), hosts * workers * 2)
    for host in range(hosts):
        lanes = [lane for seat in seats[host * workers : (host + 1) * workers] for lane in seat.lanes]
        assert len(folded(cover(lanes, hosts * workers * 2), hosts * workers * 2)) == 1
