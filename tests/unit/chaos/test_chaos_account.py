"""What became of faults, told from events; and whether a scenario brought about what it should."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.base.cause import Cause
from everstep.base.errors import ConfigError
from everstep.chaos.fault_account import account, missing
from everstep.chaos.scenarios import SCENARIOS, Scenario, named
from everstep.chaos.spec import parse

S = 1_000_000_000


def event(at_s: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time_unix_ns": int(at_s * S), "kind": kind, **fields}


EVENTS = [
    event(1, "step_committed", step=5),
    event(2, "fault_injected", fault="kill", target="leader:1", worker_id=2, incarnation=0, step=6, phase="forward"),
    event(2.1, "worker_evicted", worker_id=2, incarnation=0, cause="killed", reason="killed by SIGKILL"),
    event(2.05, "step_committed", step=5),
    event(2.4, "step_committed", step=6),
    event(2.5, "recovery_completed", duration_s=0.4),
    event(3, "worker_healed", worker_id=2, incarnation=1),
    event(4, "fault_injected", fault="disconnect", target="worker:0", worker_id=0, incarnation=0, step=7, phase="load"),
    event(5, "fault_injected", fault="kill", target="coordinator", worker_id=None, step=8, phase="load"),
    event(5.5, "coordinator_restarted"),
    event(
        6, "fallback", step=4, steps_redone=4, source="copy", cause="killed", reason="stage 1 was restored from a copy"
    ),
    event(9, "job_completed", state="completed", reason="step 8 was the last"),
]


def test_what_became_of_each() -> None:
    found = account(EVENTS)
    assert [(one.fault, one.outcome) for one in found.hits] == [
        ("kill", "evicted, healed and back"),
        ("disconnect", "went on"),
        ("kill", "the coordinator was restarted"),
    ]
    assert found.hits[0].recovery_s == pytest.approx(0.4), "to the first step committed after the eviction"
    assert found.hits[1].recovery_s is None
    assert (found.steps_redone, found.state, found.reason, found.steps) == (4, "completed", "", 6)
    assert found.to_dict()["recovery_s"] == {"median": 0.4, "max": 0.4}


def test_a_failed_job_says_why() -> None:
    found = account([event(1, "job_failed", cause="quorum", reason="too few workers")])
    assert (found.state, found.cause, found.reason) == ("failed", Cause.QUORUM, "too few workers")
    assert account([]).state == "not over"
    assert account([event(1, "step_committed", step=3), event(2, "job_failed", step=4)]).steps == 4
    again = account([event(1, "job_failed", cause="quorum", reason="too few workers"), event(2, "job_started")])
    assert (again.state, again.cause, again.reason) == ("not over", None, ""), "it goes on"


def test_a_clock_that_is_set_back_changes_no_outcome() -> None:
    back_s = 3600
    later = [
        {**e, "time_unix_ns": e["time_unix_ns"] - back_s * S} if e["time_unix_ns"] > 3.5 * S else e for e in EVENTS
    ]
    steps = [event(3.4, "step_committed", step=7), event(3.6 - back_s, "step_committed", step=8)]
    kill = event(3.8 - back_s, "fault_injected", fault="kill", target="worker:1", worker_id=1, incarnation=0, step=9)
    gone = event(3.9 - back_s, "worker_evicted", worker_id=1, incarnation=0, cause="killed", reason="killed")
    told = account([*later[:7], *steps, kill, gone, event(4 - back_s, "step_committed", step=9), *later[7:]])
    assert [one.outcome for one in told.hits[1:]] == ["evicted", "went on", "the coordinator was restarted"]
    assert told.hits[1].recovery_s == pytest.approx(0.2)
    assert (told.state, told.hits[0], told.steps) == ("completed", account(EVENTS).hits[0], 9)
    between = account([*EVENTS[:3], event(2.2 - back_s, "step_committed", step=6)])
    assert (between.hits[0].outcome, between.hits[0].recovery_s) == ("evicted", None), "nobody knows how long"


def test_a_fault_has_no_outcome_of_the_next_start() -> None:
    pause = event(1, "fault_injected", fault="stop", target="worker:1", worker_id=1, incarnation=0, step=3)
    lost = event(3, "worker_evicted", worker_id=1, incarnation=0, cause="killed", reason="killed")
    assert account([pause, event(2, "job_started", step=0), lost]).hits[0].outcome == "went on"


def test_what_a_scenario_lacks_is_named() -> None:
    found = account(EVENTS)
    calm = Scenario(
        "x", "", "", {"worker_evicted": 1}, bears={"fallback": {"cause": Cause.KILLED, "source": "copy"}}, never=()
    )
    assert missing(calm, found) == []
    silent = {"worker_evicted": {"cause": Cause.SILENT}}
    wrong = Scenario("x", "", "", {"worker_evicted": 2}, bears=silent, never=("fallback",))
    assert [line.split(",")[0] for line in missing(wrong, found)] == [
        "expected at least 2 worker_evicted",
        "expected a worker_evicted with cause=silent",
        "expected no fallback",
    ]


def test_the_table_is_sound() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert len(set(names)) == len(names)
    assert {
        "single_failure",
        "multi_failure",
        "cascading_failures",
        "leader_recovery",
        "all_backup_failure",
        "network_partition",
    } < set(names)
    for phase in ("forward", "backward", "reduction", "update", "promotion", "heal"):
        assert f"death_in_{phase}" in names
    for scenario in SCENARIOS:
        assert parse(scenario.chaos)
        assert scenario.expects and scenario.about


def test_scenarios_by_name() -> None:
    assert [s.name for s in named(["network_partition", "single_failure"])] == ["single_failure", "network_partition"]
    assert named([]) == SCENARIOS
    with pytest.raises(ConfigError, match=r"no scenario is called 'single_fail'.*did you mean 'single_failure'"):
        named(["single_fail"])
