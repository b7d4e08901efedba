"""Simulated jobs whose workers each lie on several hosts: a worker ends with any of them, others take their place."""

from __future__ import annotations

from collections import Counter

import pytest

from everstep.protocol.coordinator import cell_parts
from everstep.sim.faults import SimFault
from everstep.sim.model import SimJob
from everstep.sim.rules import Rules
from everstep.sim.scenario import simulate
from everstep.sim.setups import Setup, set_up
from everstep.sim.spanning import ANEW, SEEN
from sampling import seeds

SPANS = Rules(shared=True, span=2, patience_ms=1500)


def _lost(policy: str, hosts: int, kind: str) -> Counter[tuple[str, str]]:
    """What a job of one worker over two of so many hosts has seen, of which one is lost, or gives its slot up."""
    faults = (SimFault(kind, 400, pick=1, for_ms=60_000),)
    setup = Setup(1, 0, hosts, 1, policy, SimJob(12, 4, 3, write_every=2), faults, rules=SPANS)
    outcome = simulate(3, setup=setup)
    assert outcome.ok, str(outcome)
    return Counter({**outcome.seen, ("reports", "shrunk"): outcome.reports.get("cell_shrunk", 0)})


@pytest.mark.parametrize("kind", ["host", "worn"])
@pytest.mark.parametrize("policy", ["replace", "shrink"])
def test_an_idle_host_comes_before_fewer(policy: str, kind: str) -> None:
    seen = _lost(policy, 3, kind)
    assert seen[ANEW] and not seen["reports", "shrunk"]


@pytest.mark.parametrize("kind", ["host", "worn"])
@pytest.mark.parametrize("policy", ["replace", "shrink"])
def test_a_worker_goes_on_with_the_hosts_that_are_left(policy: str, kind: str) -> None:
    seen = _lost(policy, 2, kind)
    assert seen[ANEW] and seen["reports", "shrunk"] == 1


@pytest.mark.parametrize("policy", ["replace", "shrink"])
def test_a_slot_that_two_hosts_give_up_is_not_tried_on_all_others(policy: str) -> None:
    faults = tuple(SimFault("worn", 400 + 1500 * n, pick=1) for n in range(2))
    setup = Setup(1, 0, 6, 1, policy, SimJob(60, 4, 3, write_every=2), faults, rules=SPANS)
    outcome = simulate(3, setup=setup)
    assert outcome.ok and outcome.reports["cell_shrunk"] == 1, str(outcome)


def test_the_promises_hold_under_any_schedule() -> None:
    seen: Counter[tuple[str, str]] = Counter()
    for seed in seeds(60):
        outcome = simulate(seed, setup=set_up(seed).with_spanning(seed))
        assert outcome.ok, str(outcome)
        seen.update(outcome.seen)
        seen["reports", "shrunk"] += outcome.reports.get("cell_shrunk", 0)
    assert seen[SEEN] and seen[ANEW] and seen["reports", "shrunk"] and seen["faults", "host"]


def test_two_parts_on_one_host_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cell_parts.matched
    monkeypatch.setattr(cell_parts, "matched", lambda hosts, size: found({key: str(key) for key in hosts}, size))
    assert any(
        "two parts on a host" in simulate(seed, setup=set_up(seed).with_spanning(seed)).problem for seed in range(20)
    )
