"""The chaos specification: what it says, and one-line errors that name what is wrong."""

from __future__ import annotations

import pytest

from everstep.base.errors import ConfigError
from everstep.chaos.fault import COMPUTE_PHASES, Fault
from everstep.chaos.spec import DRAWN, RandomFaults, Target, parse, parse_now, simulated_failure

EXAMPLE = (
    "kill:target=worker:2,at=30; stop:target=worker:1,at=50,for=5; "
    "kill:target=coordinator,at=60; kill:target=leader:0,at=70,phase=agree"
)


def test_the_example_of_the_interface() -> None:
    assert parse(EXAMPLE) == (
        Fault("kill", Target("worker", 2), 30, None, None, 0),
        Fault("stop", Target("worker", 1), 50, None, 5.0, 1),
        Fault("kill", Target("coordinator"), 60, None, None, 2),
        Fault("kill", Target("leader", 0), 70, "agree", None, 3),
    )


def test_links_are_cut_and_stages_are_struck() -> None:
    text = (
        "partition:target=worker:1+worker:2,at=20,for=3; partition:target=leader:1,at=5,for=0.5,from=peers; "
        "disconnect:target=stage:1,at=6,for=2; slow:target=leader:0,at=2,by=0.05,until=worker_healed*2; "
        "kill:target=backups:0+leader:2,at=7,phase=update"
    )
    faults = parse(text)
    assert faults == (
        Fault("partition", Target("worker", 1, (Target("worker", 2),)), 20, None, 3.0, 0),
        Fault("partition", Target("leader", 1), 5, None, 0.5, 1, True),
        Fault("disconnect", Target("stage", 1), 6, None, 2.0, 2),
        Fault("slow", Target("leader", 0), 2, None, None, 3, by_s=0.05, until=("worker_healed", 2)),
        Fault("kill", Target("backups", 0, (Target("leader", 2),)), 7, "update", None, 4),
    )
    assert "; ".join(str(f) for f in faults) == text


def test_one_rank_of_a_worker_is_struck() -> None:
    text = "kill:target=worker:2/1,at=3; stop:target=worker:0/12,at=4,for=2"
    faults = parse(text)
    assert faults == (
        Fault("kill", Target("worker", 2, rank=1), 3),
        Fault("stop", Target("worker", 0, rank=12), 4, None, 2.0, 1),
    )
    assert "; ".join(str(f) for f in faults) == text
    assert parse("kill:target=worker:2/0,at=3") == parse("kill:target=worker:2,at=3"), "its head"
    assert isinstance(faults[0], Fault) and faults[0].request()["workers"] == [2]


def test_random_faults_and_empty_parts() -> None:
    assert parse("random:p=0.02,seed=7,after_step=30") == (RandomFaults(0.02, 7, 30, 0),)
    assert parse(" ; kill:at=3 ;") == (Fault("kill", Target("random"), 3, None, None, 0),)
    assert parse("") == ()


def test_a_fault_prints_as_it_is_written() -> None:
    assert "; ".join(str(f) for f in parse(EXAMPLE)) == EXAMPLE


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            "kil:target=worker:0,at=1",
            [
                "'kil'",
                "kill, stop, raise, partition, disconnect, slow, flip, throttle, cut, oneway, drop, narrow, random",
                "did you mean 'kill'",
            ],
        ),
        ("kill:target=worker:0,att=1", ["'att'", "target, at, phase, for", "'at'"]),
        ("kill:target=worker:0", ["at=STEP"]),
        ("kill:target=worker:0,at=0", ["at least 1", "got 0"]),
        ("kill:target=worker:0,at=soon", ["whole number", "'soon'"]),
        (
            "kill:target=worker,at=1",
            ["'worker'", "worker:N, leader:STAGE, backups:STAGE, stage:STAGE, coordinator, random"],
        ),
        ("kill:target=worker:x,at=1", ["'worker:x'"]),
        ("kill:at=1,phase=forwrd", ["'forwrd'", "heal", "did you mean 'forward'"]),
        ("kill:at=1,for=3", ["for=SECONDS belongs to stop"]),
        ("stop:at=1,for=-3", ["at least 0"]),
        ("stop:at=1,for=nan", ["finite"]),
        ("kill:at=1,at=2", ["at is given twice"]),
        ("kill:at", ["expected key=value", "'at'"]),
        ("raise:target=coordinator,at=1", ["workers only"]),
        ("partition:target=coordinator,at=1,for=1", ["workers only"]),
        ("partition:target=worker:1,at=1", ["for=SECONDS", "whole again"]),
        ("throttle:at=1", ["for=SECONDS", "all of the time again"]),
        ("kill:at=1,from=peers", ["belongs to partition"]),
        ("partition:at=1,for=1,from=nobody", ["coordinator or peers", "'nobody'"]),
        ("kill:at=1,by=1", ["by=SECONDS belongs to slow"]),
        ("slow:at=1", ["by=SECONDS"]),
        ("slow:at=1,by=1,phase=load", ["phase=PHASE belongs to", "not to slow"]),
        ("slow:at=1,by=1,until=worker_heald*2", ["'worker_heald*2'", "did you mean 'worker_healed'"]),
        ("kill:target=worker:1+coordinator,at=1", ["'coordinator'", "alone"]),
        ("kill:target=worker:1+worker:1,at=1", ["one twice"]),
        ("kill:target=stage:all,at=1", ["'stage:all'"]),
        ("kill:target=worker:1/,at=1", ["'worker:1/'"]),
        ("kill:target=leader:0/1,at=1", ["'leader:0/1'"]),
        ("kill:target=worker:1/1+worker:2,at=1", ["'worker:1/1'"]),
        ("raise:target=worker:1/1,at=1", ["one rank", "kill or stop", "raise is for whole workers"]),
        ("random:seed=1", ["p=PROBABILITY"]),
        ("random:p=2", ["from 0 to 1"]),
        ("random:p=0.1,at=3", ["'at'", "p, seed, after_step"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line(spec: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"kill:at=9; {spec}")
    message = str(caught.value)
    assert repr(spec) in message
    assert "\n" not in message
    for word in words:
        assert word in message


def test_random_draws_depend_on_seed_and_step_alone() -> None:
    source = RandomFaults(0.5, 7, 30)
    ids = (0, 1, 2, 3)
    first = [source.draw(step, ids) for step in range(1, 400)]
    assert first == [RandomFaults(0.5, 7, 30).draw(step, ids) for step in range(1, 400)]
    assert first != [RandomFaults(0.5, 8, 30).draw(step, ids) for step in range(1, 400)]
    assert all(fault is None for fault in first[:30])
    struck = [fault for fault in first[30:] if fault is not None]
    assert 140 < len(struck) < 230
    assert {fault.kind for fault in struck} == set(DRAWN)
    assert {str(fault.target) for fault in struck} == {"worker:0", "worker:1", "worker:2", "worker:3", "coordinator"}
    assert {fault.phase for fault in struck if fault.phase} == set(COMPUTE_PHASES)


@pytest.mark.parametrize("total", [1, 2, 3, 10, 1000])
def test_the_simulated_failure_lies_inside_the_run(total: int) -> None:
    faults = {simulated_failure(total, seed) for seed in range(50)}
    assert all(1 <= fault.at <= total for fault in faults)
    assert all(fault.kind == "kill" and fault.target == Target("random") for fault in faults)
    assert simulated_failure(total, 3) == simulated_failure(total, 3)
    if total == 1000:
        assert len({fault.at for fault in faults}) > 10


def test_a_fault_for_a_running_job() -> None:
    fault = parse_now("stop:target=worker:1+leader:0,for=5")
    assert (fault.at, fault.for_s) == (0, 5.0)
    assert fault.request() == {"fault": "stop:target=worker:1+leader:0,for=5", "workers": [1], "stages": [0]}
    assert parse_now("kill:target=random,at=9").at == 9
    for text in ("", "kill:target=worker:1; kill:target=worker:2", "random:p=0.1", "kill:target=worker"):
        with pytest.raises(ConfigError):
            parse_now(text)
