"""The injector: who is struck, when, and that nobody is struck twice. Strikes are real, on child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from everstep.base.plan import Member, Plan, Seat, WorkerKey
from everstep.chaos.fault_kinds import ChaosError
from everstep.chaos.inject import Injector
from everstep.chaos.spec import parse


def plan_of(*worker_ids: int, generation: int = 3) -> Plan:
    members = tuple(Member(i, 0, "localhost") for i in worker_ids)
    seats = tuple(Seat(i, 0, "active", (n,)) for n, i in enumerate(worker_ids))
    return Plan(generation, "test", members, seats, lanes=8)


class Reports:
    """Collects what an injector reports."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def __call__(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})


def injector(spec: str, run_dir: Path, worker_id: int = 0, incarnation: int = 0) -> tuple[Injector, Reports]:
    run_dir.mkdir(parents=True, exist_ok=True)
    reports = Reports()
    return Injector(parse(spec), run_dir, WorkerKey(worker_id, incarnation), reports, seed=1), reports


def strikes(
    spec: str, run_dir: Path, worker_id: int, calls: list[tuple[int, str]], plan: Plan
) -> list[tuple[int, str]]:
    """The calls at which a `raise` fault strikes."""
    chaos, _ = injector(spec, run_dir, worker_id)
    struck = []
    for step, phase in calls:
        try:
            chaos.at(step, phase, plan)
        except ChaosError:
            struck.append((step, phase))
    return struck


CALLS = [(step, phase) for step in (1, 2, 3) for phase in ("load", "forward", "backward", "reduce", "agree", "update")]


def test_strikes_its_target_in_its_step_and_phase_once(tmp_path: Path) -> None:
    plan = plan_of(0, 1, 2)
    assert strikes("raise:target=worker:1,at=2,phase=agree", tmp_path, 0, CALLS, plan) == []
    assert strikes("raise:target=worker:1,at=2,phase=agree", tmp_path, 1, CALLS * 2, plan) == [(2, "agree")]
    assert strikes("raise:target=worker:1,at=2,phase=agree", tmp_path, 1, CALLS, plan) == [], "once per job"


def test_without_a_phase_at_the_first_one_but_not_while_healing(tmp_path: Path) -> None:
    assert strikes("raise:target=worker:1,at=2", tmp_path, 1, [(2, "heal"), *CALLS], plan_of(0, 1)) == [(2, "load")]


def test_heal_waits_for_the_first_heal_from_there_on(tmp_path: Path) -> None:
    calls = [(1, "heal"), (2, "load"), (5, "heal")]
    assert strikes("raise:target=worker:1,at=2,phase=heal", tmp_path, 1, calls, plan_of(0, 1)) == [(5, "heal")]


def test_a_target_that_was_away_is_struck_when_it_is_back(tmp_path: Path) -> None:
    assert strikes("raise:target=worker:1,at=2", tmp_path, 1, [(7, "load"), (8, "load")], plan_of(0, 1)) == [
        (7, "load")
    ]


def test_leader_follows_the_plan(tmp_path: Path) -> None:
    assert strikes("raise:target=leader:0,at=1", tmp_path / "a", 2, CALLS, plan_of(2, 3)) == [(1, "load")]
    assert strikes("raise:target=leader:0,at=1", tmp_path / "b", 2, CALLS, plan_of(1, 2, 3)) == []
    assert strikes("raise:target=leader:1,at=1", tmp_path / "c", 2, CALLS, plan_of(2, 3)) == [], "no such stage"


def test_random_means_one_worker_and_everybody_agrees_whom(tmp_path: Path) -> None:
    plan = plan_of(0, 2, 5, 7)
    for at in range(1, 9):
        struck = [
            w for w in plan.worker_ids if strikes(f"raise:at={at}", tmp_path / f"{at}-{w}", w, [(at, "load")], plan)
        ]
        assert len(struck) == 1


def test_random_faults_strike_once_per_step(tmp_path: Path) -> None:
    plan = plan_of(0, 1, 2)
    calls = [
        (step, phase) for step in range(1, 60) for phase in ("load", "forward", "backward", "reduce", "agree", "update")
    ]
    spec = "random:p=1,seed=3"
    faults = [parse(spec)[0].draw(step, plan.worker_ids) for step in range(1, 60)]  # type: ignore[union-attr]
    mine = [f for f in faults if f is not None and f.kind == "raise" and str(f.target) == "worker:1"]
    assert mine
    chaos, reports = injector(spec, tmp_path, 1)
    chaos._random = [_OnlyRaise(source) for source in chaos._random]  # type: ignore[misc]
    struck = []
    for step, phase in calls + calls:
        try:
            chaos.at(step, phase, plan)
        except ChaosError:
            struck.append((step, phase))
    assert struck == [(f.at, f.phase) for f in mine]
    assert len(reports.events) == len(mine)


class _OnlyRaise:
    """Random faults less those that would end the test itself."""

    def __init__(self, source: Any) -> None:
        self.index, self._source = source.index, source

    def draw(self, step: int, worker_ids: tuple[int, ...]) -> Any:
        fault = self._source.draw(step, worker_ids)
        return fault if fault is not None and fault.kind == "raise" else None


def test_the_event_says_what_where_and_why(tmp_path: Path) -> None:
    chaos, reports = injector("raise:target=worker:1,at=2,phase=reduce", tmp_path, 1, incarnation=4)
    with pytest.raises(ChaosError) as caught:
        chaos.at(2, "reduce", plan_of(0, 1))
    assert len(reports.events) == 1
    event = reports.events[0]
    assert event["kind"] == "fault_injected"
    assert (event["generation"], event["step"], event["worker_id"], event["incarnation"]) == (3, 2, 1, 4)
    assert (event["fault"], event["target"], event["phase"], event["pid"]) == (
        "raise",
        "worker:1",
        "reduce",
        os.getpid(),
    )
    assert "worker 1.4" in event["reason"] and "step 2" in event["reason"]
    assert caught.value.signature == "chaos:0:1.4:2"


def test_coordinator_is_struck_by_the_leader_alone(tmp_path: Path) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        other, _ = injector("kill:target=coordinator,at=1", tmp_path, 1)
        leader, reports = injector("kill:target=coordinator,at=1", tmp_path, 0)
        for chaos in (other, leader):
            chaos.coordinator_pid = lambda: victim.pid
        other.at(1, "load", plan_of(0, 1))
        assert victim.poll() is None
        leader.at(1, "load", plan_of(0, 1))
        assert victim.wait(30) == -signal.SIGKILL
        assert reports.events[0]["pid"] == victim.pid
        assert reports.events[0]["worker_id"] is None
    finally:
        victim.kill()
        victim.communicate()


@pytest.mark.parametrize("fault", ["kill", "stop", "stop:for", "throttle:for"])
def test_a_coordinator_of_another_host_is_struck_by_others_who_are_asked_once(tmp_path: Path, fault: str) -> None:
    kind, _, lasts = fault.partition(":")
    spec = f"{kind}:target=coordinator,at=2{',for=1' if lasts else ''}"
    asked: list[tuple[int, int, int, str]] = []
    for worker_id in (0, 1, 0):  # the leader, and a later life of it
        chaos, reports = injector(f"raise:target=worker:9,at=1; {spec}", tmp_path, worker_id)
        chaos.strike_due = lambda index, step, phase, plan, who=worker_id: asked.append((who, index, step, phase))
        for step, phase in CALLS:
            chaos.at(step, phase, plan_of(0, 1))
        assert reports.events == [], "whoever has it struck tells"
    assert asked == [(0, 1, 2, "load")]


def test_a_fault_that_was_asked_for_is_named_by_its_number(tmp_path: Path) -> None:
    asked: list[int] = []
    chaos, _ = injector("", tmp_path)
    chaos.strike_due = lambda index, step, phase, plan: asked.append(index)
    chaos.now("throttle:target=coordinator,at=2,for=1", 77, 1, "load", plan_of(0))
    for step, phase in CALLS:
        chaos.at(step, phase, plan_of(0))
    assert asked == [77]


def test_one_rank_is_struck_by_its_head(tmp_path: Path) -> None:
    limb = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        chaos, reports = injector("kill:target=worker:1/1,at=2", tmp_path, 1)
        chaos.pids = lambda: (os.getpid(), limb.pid)
        chaos.at(1, "load", plan_of(0, 1))
        assert limb.poll() is None
        chaos.at(2, "load", plan_of(0, 1))
        assert limb.wait(30) == -signal.SIGKILL
    finally:
        limb.kill()
        limb.communicate()
    (event,) = reports.events
    assert (event["pid"], event["worker_id"], event["target"]) == (limb.pid, 1, "worker:1/1")
    assert "rank 1 of worker 1.0" in event["reason"]


def test_a_rank_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    chaos, reports = injector("kill:target=worker:1/1,at=2", tmp_path, 1)
    chaos.at(2, "load", plan_of(0, 1))
    assert [event["kind"] for event in reports.events] == ["warning"]
    assert "rank 1 of worker 1.0, it has 1" in reports.events[0]["reason"]


STRUCK = """
import sys
from pathlib import Path
from everstep.base.plan import Member, Plan, Seat, WorkerKey
from everstep.chaos.inject import Injector
from everstep.chaos.spec import parse
plan = Plan(1, "", (Member(0, 0, "h"),), (Seat(0, 0, "active", (0,)),), lanes=1)
report = lambda kind, **fields: print(kind, flush=True)
Injector(parse(sys.argv[1]), Path(sys.argv[2]), WorkerKey(0, 0), report).at(1, "load", plan)
print("alive", flush=True)
"""


def test_kill_is_sigkill_after_the_report(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", STRUCK, "kill:at=1", str(tmp_path)], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b"fault_injected\n"


def test_stop_for_a_while_goes_on_by_itself(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", STRUCK, "stop:at=1,for=0.3", str(tmp_path)], capture_output=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout == b"fault_injected\nalive\n"
    assert time.monotonic() - begin >= 0.3


def test_throttled_it_stops_and_goes_on(tmp_path: Path) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        chaos, _ = injector("throttle:target=coordinator,at=1,for=0.2", tmp_path)
        chaos.coordinator_pid = lambda: victim.pid
        chaos.at(1, "load", plan_of(0))
        _, status = os.waitpid(victim.pid, os.WCONTINUED)
        assert os.WIFCONTINUED(status), "said only of what had been stopped"
    finally:
        victim.kill()
        victim.communicate()


def test_without_faults_nothing_is_touched(tmp_path: Path) -> None:
    chaos, reports = injector("", tmp_path)
    for step, phase in CALLS:
        chaos.at(step, phase, plan_of(0))
    assert list(tmp_path.iterdir()) == []
    assert reports.events == []


def staged(*pools: tuple[int, ...], generation: int = 3) -> Plan:
    members = tuple(Member(i, 0, "localhost") for i in sorted({i for pool in pools for i in pool}))
    seats = tuple(Seat(i, k, "active", (n,)) for k, pool in enumerate(pools) for n, i in enumerate(pool))
    return Plan(generation, "test", members, seats, lanes=8, stages=len(pools))


@pytest.mark.parametrize(
    ("target", "struck"),
    [("stage:1", {2, 3, 4}), ("backups:1", {3, 4}), ("backups:2", set()), ("worker:0+leader:2", {0, 5})],
)
def test_stages_and_their_backups(tmp_path: Path, target: str, struck: set[int]) -> None:
    plan = staged((0, 1), (2, 3, 4), (5,))
    spec = f"raise:target={target},at=2,phase=forward"
    assert {w for w in plan.worker_ids if strikes(spec, tmp_path, w, CALLS, plan)} == struck


def test_who_takes_the_place_of_the_struck_is_not_struck(tmp_path: Path) -> None:
    spec = "raise:target=backups:1,at=2"
    before, after = staged((0,), (1, 2, 3)), staged((0, 3), (1, 4), generation=4)
    assert strikes(spec, tmp_path, 2, [(2, "load")], before) == [(2, "load")]
    assert strikes(spec, tmp_path, 4, [(2, "load"), (3, "load")], after) == []
    assert strikes(spec, tmp_path, 2, [(3, "load")], staged((0,), (1, 2, 3))) == [], "a later life"
    assert strikes(spec, tmp_path, 3, [(2, "load")], before) == [(2, "load")], "it was meant as well"


def test_links_are_cut_by_whoever_has_them(tmp_path: Path) -> None:
    calls = []
    chaos, reports = injector("partition:target=worker:1+worker:2,at=2,for=1.5,from=peers", tmp_path, 1)
    chaos.cut_off = lambda for_s, breaks, peers: calls.append((for_s, breaks, peers))
    other, _ = injector("disconnect:target=stage:0,at=1,for=2", tmp_path / "b", 1)
    other.cut_off = chaos.cut_off
    chaos.at(2, "load", plan_of(0, 1, 2))
    other.at(2, "load", plan_of(0, 1, 2))
    assert calls == [(1.5, False, True), (2.0, True, False)]
    assert reports.events[0]["fault"] == "partition"


def test_slow_lasts_until_something_was_reported_and_follows_its_target(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text("")
    spec = "slow:target=leader:0,at=2,by=0.2,until=worker_healed"
    chaos, reports = injector(spec, tmp_path, 1)

    def seconds(step: int, phase: str, plan: Plan) -> float:
        begin = time.monotonic()
        chaos.at(step, phase, plan)
        return time.monotonic() - begin

    assert seconds(1, "forward", plan_of(1, 2)) < 0.1, "not yet"
    assert seconds(2, "forward", plan_of(0, 1)) < 0.1, "not the leader"
    assert seconds(2, "load", plan_of(1, 2)) < 0.1, "not forward"
    assert seconds(2, "forward", plan_of(1, 2)) >= 0.2
    assert [event["fault"] for event in reports.events] == ["slow"]
    later, told = injector(spec, tmp_path, 1, incarnation=1)
    begin = time.monotonic()
    later.at(3, "forward", plan_of(1, 2))
    assert time.monotonic() - begin >= 0.2, "a later life is slow too"
    assert told.events == [], "and said once"
    events.write_text('{"time_unix_ns": 1, "kind": "worker_healed"}\n')
    assert seconds(4, "forward", plan_of(1, 2)) < 0.1


def test_settling_has_faults_of_its_own(tmp_path: Path) -> None:
    calls = [(1, "settle"), (2, "load"), (2, "settle")]
    assert strikes("raise:target=worker:1,at=2,phase=settle", tmp_path / "a", 1, calls, plan_of(0, 1)) == [
        (2, "settle")
    ]
    assert strikes("raise:target=worker:1,at=1", tmp_path / "b", 1, calls, plan_of(0, 1)) == [(2, "load")]


def test_a_fault_for_a_running_job_strikes_its_target_only(tmp_path: Path) -> None:
    plan = plan_of(0, 1, 2)
    (mine, told), (other, _) = injector("", tmp_path, 1), injector("", tmp_path, 2)
    for chaos in (mine, other):
        chaos.at(4, "load", plan)
        chaos.now("raise:target=worker:1", 77, 5, "forward", plan)
    other.at(5, "backward", plan)
    with pytest.raises(ChaosError):
        mine.at(5, "backward", plan)
    mine.at(5, "reduce", plan)
    assert [(e["fault"], e["target"], e["step"]) for e in told.events] == [("raise", "worker:1", 5)]
    assert "'raise:target=worker:1' strikes worker 1.0" in told.events[0]["reason"]


def test_whom_it_kills_falls_wherever_it_is(tmp_path: Path) -> None:
    """Also a spare, which enters no phase and has no plan yet; and of a leader's heirs none is struck."""
    code = (
        "import sys; from pathlib import Path; from test_chaos_inject import injector;"
        "injector('', Path(sys.argv[1]), 4)[0].now('kill:target=worker:4', 9, 1, 'idle', None)"
    )
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == -signal.SIGKILL
    heir, told = injector("", tmp_path, 1)
    (tmp_path / "chaos" / "10").write_text("0.0\n")
    heir.now("kill:target=leader:0", 10, 3, "load", plan_of(1, 2))
    heir.at(3, "forward", plan_of(1, 2))
    assert told.events == []
