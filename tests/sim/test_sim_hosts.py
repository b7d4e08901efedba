"""Hosts that are drained, leave and come back, beside other faults; partitions that are not alike both ways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import pytest
from ordinary_seeds import under

from everstep.base.cause import Cause
from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator import coordinator, user_commands
from everstep.protocol.coordinator.job_state import JobState
from everstep.protocol.coordinator.likeness import Likeness
from everstep.protocol.coordinator.membership import Agent
from everstep.protocol.driver.probing import Probing
from everstep.protocol.messages import HostDismissed
from everstep.sim.faults import SimFault
from everstep.sim.model import SimJob
from everstep.sim.rules import Rules
from everstep.sim.scenario import simulate
from everstep.sim.setups import Setup, UnlikeSetup, set_up, set_up_leased, set_up_split
from sampling import seeds

JOB = SimJob(14, 6, 3)
SPLIT = SimJob(12, 4, 3, stages=2, keep_every=2)
ASKED = SimFault("scale", 20, pick=3)
"""From then on it is the coordinator that shares slots out."""


def setup(*faults: SimFault, job: SimJob = JOB, workers: int = 4, hosts: int = 3) -> Setup:
    return Setup(workers, 0, hosts, 1, "replace", job, (ASKED, *faults))


DRAIN = SimFault("drain_host", 80, for_ms=200, pick=1)
SCENARIOS = {
    "one host leaves and is back": setup(DRAIN),
    "and the coordinator dies right after": setup(DRAIN, SimFault("coordinator", 81), SimFault("coordinator", 95)),
    "and dies in the middle of saying so": setup(DRAIN, SimFault("coordinator_mid_effects", 81, pick=1)),
    "while another host loses power": setup(DRAIN, SimFault("host", 84, for_ms=300, pick=2)),
    "while its own agent is frozen": setup(SimFault("agent_freeze", 78, for_ms=700, pick=1), DRAIN),
    "one after the other": setup(DRAIN, SimFault("drain_host", 160, for_ms=300, pick=2)),
    "the same one twice": setup(DRAIN, SimFault("scale", 400, pick=3), SimFault("drain_host", 520, for_ms=300, pick=1)),
    "while the job grows": setup(DRAIN, SimFault("scale", 86, pick=5)),
    "while links carry one way only": setup(SimFault("one_way", 70, for_ms=400, pick=1), DRAIN),
    "of a model in stages": setup(DRAIN, job=SPLIT),
    "where nobody has room for the job that has grown": Setup(
        *(3, 0, 1, 3, "replace", SimJob(14, 7)),
        faults=(SimFault("scale", 90, pick=6), replace(DRAIN, at_ms=160), SimFault("kill", 190)),
        rules=Rules(shared=True, room=3),
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_promises_hold(name: str) -> None:
    failed = [str(o) for o in (under(SCENARIOS[name], seed) for seed in seeds(6)) if not o.ok]
    assert not failed, failed[0]


def test_hosts_do_leave() -> None:
    found: Counter[tuple[str, str]] = Counter()
    for one in SCENARIOS.values():
        for seed in range(3):
            found.update(under(one, seed).seen)
    assert found["hosts", "drained"] >= len(SCENARIOS)


def problems(one: Setup) -> Iterator[str]:
    return (outcome.problem for outcome in (simulate(seed, setup=one) for seed in range(6)) if not outcome.ok)


def test_a_slot_that_a_drained_host_is_to_keep_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_commands.hosts, "slots_of_drained", lambda job: set())
    assert any("which was drained" in problem for problem in problems(SCENARIOS["while the job grows"]))


def test_a_host_that_is_let_go_while_its_workers_run_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(job: JobState) -> None:
        for agent in [a for a in job.agents.known.values() if a.drained == "asked" and a.connection]:
            agent.drain("told")
            job.env.send(agent.connection, HostDismissed(cause=Cause.DRAINED, reason="now"))

    monkeypatch.setattr(coordinator.hosts, "let_go", at_once)
    assert any("is to leave while" in problem for problem in problems(SCENARIOS["one host leaves and is back"]))


def test_a_slot_of_two_hosts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Agent.new_slots
    monkeypatch.setattr(Agent, "new_slots", lambda agent, ids, first, ranks: real(agent, ids or [0], first or [0]))
    found = problems(setup(SimFault("drain", 60, pick=1), SimFault("drain", 90, pick=2)))
    assert any("are wanted of two hosts" in problem or "was drained" in problem for problem in found)


def test_fewer_workers_than_stages_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_commands, "_least", lambda job: 1)
    found = problems(setup(SimFault("scale", 60, pick=0), job=SPLIT))
    assert any("workers were granted" in problem for problem in found)


def foreign(seed: int) -> Setup:
    """Any faults, and the last host computes with other kernels than the others."""
    drawn = set_up(seed)
    more = {"hosts": max(2, drawn.hosts), "min_workers": 1}
    return UnlikeSetup(**{**{f.name: getattr(drawn, f.name) for f in fields(drawn)}, **more})


def test_hosts_that_compute_otherwise_never_train_together(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [simulate(seed, setup=foreign(seed)) for seed in seeds(12)]
    failed = [str(outcome) for outcome in outcomes if not outcome.ok]
    assert not failed, failed[0]
    assert sum(outcome.seen["hosts", "refused"] for outcome in outcomes) > len(outcomes) // 2
    monkeypatch.setattr(Likeness, "kernels", lambda self, said, host: None)
    assert any("have other kernels" in simulate(seed, setup=foreign(seed)).problem for seed in range(3))


def odd(seed: int, draw: Callable[[int], Setup] = set_up) -> Setup:
    """Any faults, and one slot whose lives compute lanes otherwise, from the first or the second one on."""
    drawn = draw(seed)
    return replace(drawn, differs=WorkerKey(seed % drawn.workers, seed // 2 % 2), min_workers=1, on_failure="replace")


def test_no_bit_of_lives_that_compute_otherwise_gets_into_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [simulate(seed, setup=odd(seed)) for seed in seeds(40)]
    failed = [str(outcome) for outcome in outcomes if not outcome.ok]
    assert not failed, failed[0]
    assert sum(outcome.reports.get("probe_done", 0) for outcome in outcomes) > len(outcomes) // 4
    monkeypatch.setattr(Probing, "judge", lambda self, outcome, me: None)
    assert any("P1" in simulate(seed, setup=odd(seed)).problem for seed in range(12))


def test_nor_into_any_stage_of_a_split_model(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [simulate(seed, setup=odd(seed, set_up_split)) for seed in seeds(40)]
    failed = [str(outcome) for outcome in outcomes if not outcome.ok]
    assert not failed, failed[0]
    assert sum(outcome.reports.get("probe_done", 0) for outcome in outcomes) > len(outcomes) // 8
    monkeypatch.setattr(Probing, "judge", lambda self, outcome, me: None)
    assert any("P1" in simulate(seed, setup=odd(seed, set_up_split)).problem for seed in range(12))


@pytest.mark.parametrize(
    ("draw", "seed"),
    [
        (set_up, 960395),  # lanes of a new member were computed in one generation and agreed on in the next
        (set_up, 970435),  # what looks like another device is a flipped bit of the state
        (set_up_split, 11),  # a member catches up with the step in which others have been compared
        (set_up_split, 972105),  # the odd one dies, and what others made of what it gave them lives on
        (set_up_leased, 971337),  # all go back behind the step up to which lanes were compared
    ],
)
def test_what_was_found_once_is_noticed(draw: Callable[[int], Setup], seed: int) -> None:
    outcome = simulate(seed, setup=draw(seed))
    assert outcome.ok, str(outcome)
