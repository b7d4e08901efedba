"""Which hosts copies of a checkpoint's parts go to, against the rule counted out by hand."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from everstep.base.domains import WIDTHS, Domains, ordered
from everstep.checkpoint.hosts_store import next_host

LABELS = st.fixed_dictionaries({}, optional={kind: st.sampled_from("xyz") for kind in ("zone", "row", "rack")})


@st.composite
def hosts(draw, labels=LABELS) -> dict[str, Domains]:
    said = draw(st.lists(labels, min_size=1, max_size=8))
    return {f"h{n}": ordered(one, f"h{n}") for n, one in enumerate(said)}


def chosen(domains: dict[str, Domains], copies: int) -> list[str]:
    """As a store does it, whose part lies on the first host; any may be lost later on."""
    holders, left = ["h0"], [name for name in domains if name != "h0"]
    while left and len(holders) < copies:
        holders.append(next_host(left, holders, domains))
        left.remove(holders[-1])
    return holders


@given(hosts(st.fixed_dictionaries({"rack": st.sampled_from("rstuv")})), st.integers(1, 6))
def test_no_rack_has_two_copies_while_another_one_could_take_one(domains: dict[str, Domains], copies: int) -> None:
    holders = chosen(domains, copies)
    assert len(holders) == len(set(holders)) == min(copies, len(domains))
    racks = Counter(dict(domains[name])["rack"] for name in holders)
    assert len(racks) == min(len(holders), len({dict(one)["rack"] for one in domains.values()}))


@given(hosts(), st.integers(2, 6))
def test_each_copy_dies_with_as_few_as_can_be_the_widest_domains_first(
    domains: dict[str, Domains], copies: int
) -> None:
    def within(name: str, width: int) -> list[str]:
        return [dict(domains[name]).get(kind, "") for kind in WIDTHS[:width]]

    def dying(name: str, holders: list[str]) -> list[int]:
        return [sum(within(h, n) == within(name, n) for h in holders) for n in range(1, len(WIDTHS) + 1)]

    holders = chosen(domains, copies)
    for n, name in enumerate(holders[1:], 1):
        before = holders[:n]
        assert dying(name, before) == min(dying(other, before) for other in domains if other not in before)
