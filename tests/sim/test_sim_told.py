"""Headline, incidents and metrics agree with the truth that the simulator knows, over its seeds: how the job ended,
who has died and when, how many members are left, and which steps were done."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from everstep.base.cause import Cause
from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.coordinator import Coordinator
from everstep.protocol.coordinator.types import CoordinatorConfig
from everstep.report.facts import Facts
from everstep.report.headline import Now, headline
from everstep.report.tally import Tally
from everstep.report.words import reason_text
from everstep.sim.checks import ToldTwice
from everstep.sim.faults import SimFault
from everstep.sim.life import Life
from everstep.sim.model import SimJob
from everstep.sim.scenario import Simulation, simulate
from everstep.sim.setups import Setup, set_up, set_up_leased, set_up_operated, set_up_split
from sampling import mostly_longer

Event = dict[str, Any]


def happened(seed: int, draw: Callable[[int], Setup]) -> tuple[Simulation, list[Event]]:
    """A simulated job that has ended, and its events; none, if plans got numbers of plans that the journal had lost."""
    one = Simulation(seed, draw(seed), tracing=False)
    try:
        assert one.run() == ""
    except ToldTwice:
        return one, []
    begins = {"kind": "job_started", "time_unix_ns": 1, "workers": one.setup.workers, "step": 0}
    told, steps = [begins], set[int]()
    for event in one.control.site.told:
        if event["kind"] == "job_started":  # it was resumed
            steps.clear()
        if event["kind"] != "step_committed":
            told.append(event)
        elif event["step"] not in steps:  # the next leader repeats what the one before it may not have told
            steps.add(event["step"])
            told.append(event)
    return one, told


def taken(events: list[Event], look: Callable[[Facts, Event], None]) -> Facts:
    """Facts of all events; `look` is called after each."""
    facts = Facts()
    for event in events:
        facts.take(event)
        look(facts, event)
    assert "not understood" not in facts.counts
    return facts


def kinds_of(events: list[Event]) -> Counter[str]:
    return Counter(event["kind"] for event in events)


def by_a_fault(event: Event) -> bool:
    return event["kind"] == "worker_evicted" and event["cause"].is_fault


def key_of(event: Event) -> WorkerKey:
    return WorkerKey(event["worker_id"], event["incarnation"])


@pytest.mark.parametrize("start", mostly_longer(range(0, 50, 10), lambda start: start < 20))
@pytest.mark.parametrize("draw", [set_up, set_up_split, set_up_leased, set_up_operated])
def test_what_is_told_is_what_has_happened(draw: Callable[[int], Setup], start: int) -> None:
    for seed in range(start, start + 10):
        one, events = happened(seed, draw)
        if not events:
            continue
        crew = Seated()
        facts = taken(events, crew.look)
        the_end_is_told_as_it_was(one, facts)
        deaths_are_those_that_were(one, events, facts)
        metrics_count_what_was_told(events)


class Seated:
    """The members of the newest plan that live, by the events alone; the headline has to name the same number."""

    def __init__(self) -> None:
        self.members: set[int] = set()
        self.lives: dict[int, int] = {}
        self.wanted = 0

    def look(self, facts: Facts, event: Event) -> None:
        """Take in an event that `facts` have taken in."""
        if event["kind"] == "generation_started":
            self.members, self.wanted = {seat[0] for seat in event["seats"]}, event["target"]
        elif event["kind"] == "worker_evicted":
            self.members.discard(event["worker_id"])
        elif event["kind"] == "worker_joined":
            if self.lives.get(event["worker_id"], event["incarnation"]) != event["incarnation"]:
                self.members.discard(event["worker_id"])  # a deposed coordinator took its eviction with it
            self.lives[event["worker_id"]] = event["incarnation"]
        said = headline(facts, Now(event["time_unix_ns"]))
        named = re.search(r"(?:Training with|, ) ?(\d+) of (\d+) workers", said.text)
        if named is not None:
            assert tuple(map(int, named.groups())) == (len(self.members), self.wanted), said
        if by_a_fault(event) and facts.incidents.open is not None:
            assert said.level != "good", said


def the_end_is_told_as_it_was(one: Simulation, facts: Facts) -> None:
    fate, now = one.control.fate, Now(one.world.now_ns, running=False, finished=one.control.fate.completed)
    said = headline(facts, now)
    if fate.completed:
        # A coordinator that dies between its journal and its report tells no end: the result does.
        assert facts.condition.state == "completed" or not facts.counts.get("job_completed")
        assert f"all {one.checks.exact.ended_at} steps are done" in said.text
        assert facts.course.step == one.checks.exact.ended_at
    elif fate.stopped and facts.condition.ended_ns is None:  # and of no other one
        assert any(fault.kind == "coordinator_mid_effects" for fault in one.setup.faults), said
    elif fate.stopped:
        assert said.level == "warning" and said.text.startswith("Stopped after step "), said
    else:
        assert said.level == "bad" and said.text.startswith("Failed after step "), said
        assert facts.condition.reason == reason_text(fate.failed)
    assert facts.incidents.open is None


def deaths_are_those_that_were(one: Simulation, events: list[Event], facts: Facts) -> None:
    struck = {who for incident in facts.incidents.all for who in incident.hits}
    evicted = [event for event in events if event["kind"] == "worker_evicted"]
    faults = [event for event in evicted if by_a_fault(event)]
    launchers, raised_again, replayed = sum("launcher" in one.hits for one in facts.incidents.all), 0, Facts()
    for event in events:
        raised_again += event["kind"] == "worker_evicted" and replayed.incidents.has_raised(event)
        replayed.take(event)
    injected, own = kinds_of(events)["fault_injected"], launchers + len(faults) - raised_again
    # An eviction soon after an injected fault is its consequence; a fall back is a fault if no eviction explains it.
    assert own <= facts.faults <= own + injected + kinds_of(events)["fallback"], [
        (e["cause"], e["reason"]) for e in evicted
    ]
    for event in faults:
        who, life = f"worker {event['worker_id']}", one.control.workers[key_of(event)]
        assert who in struck, event
        if event["cause"] is Cause.KILLED:
            spans = one.control.rules.span > 1  # nobody may have seen when its process on another host died
            assert event["died_unix_ns"] is not None or spans, event
            if event["died_unix_ns"] is not None:
                died_where_it_is_told(life, event)
    suspected = {event["worker_id"] for event in events if event["kind"] == "worker_suspected"}
    known = {f"worker {i}" for i in suspected | {event["worker_id"] for event in evicted}}
    known |= {event["target"].replace(":", " ") for event in events if event["kind"] == "fault_injected"}
    assert struck - known <= {"states", "checkpoint", "launcher"}
    for incident in facts.incidents.all:
        assert incident.end_ns is None or incident.begin_ns <= incident.end_ns


def died_where_it_is_told(life: Life, event: Event) -> None:
    assert 0 < life.died_ns <= event["died_unix_ns"] <= event["time_unix_ns"], event


def metrics_count_what_was_told(events: list[Event]) -> None:
    tally, kinds = Tally(), kinds_of(events)
    for event in events:
        tally.take(event)
    assert tally.steps == kinds["step_committed"]
    assert sum(tally.recoveries.values()) == kinds["recovery_completed"]


def torn(k: int) -> Setup:
    """The coordinator dies with the k-th effect after a fault: often between what it writes down and what it tells. And
    members ask about the plan before meanwhile."""
    kill, dies = SimFault("kill", 100, pick=1), SimFault("coordinator_mid_effects", 100, pick=k)
    faults = (kill, dies, SimFault("keys", 300, for_ms=50))
    return Setup(3, 0, 2, 1, "replace", SimJob(12, 6, 3), faults)


def test_a_plan_is_told_though_its_coordinator_died_before_it_did() -> None:
    failed = [str(o) for o in (simulate(seed, setup=torn(k)) for k in range(12) for seed in range(2)) if not o.ok]
    assert not failed, failed[0]


def test_a_plan_that_nobody_tells_is_noticed() -> None:
    def forgets(config: CoordinatorConfig, journal: Sequence[dict[str, Any]], told: int) -> Coordinator:
        return Coordinator(config, journal)

    problems = [simulate(seed, setup=torn(k), coordinator=forgets).promise for k in range(12) for seed in range(2)]
    assert "PromiseBroken" in problems
