"""The reading library: growing, torn, rotated, replaced and huge files; facts; the account of time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from everstep.observe.events import format_event
from everstep.report.facts import facts_of
from everstep.report.history import History
from everstep.report.series import Series
from everstep.report.tail import Folder, Tail
from everstep.report.usage import Usage
from everstep.report.wall_time import TimeAccount, goodput

T0 = 1_800_000_000_000_000_000
S = 1_000_000_000


def event(kind: str, at_s: float, **fields: Any) -> bytes:
    return format_event(kind, T0 + round(at_s * S), fields)


def plan(at_s: float, generation: int, lanes: dict[int, list[int]], reason: str = "because") -> bytes:
    leader = min(lanes)
    seats = [[i, 0, "active", taken] for i, taken in lanes.items()]
    return event(
        "generation_started", at_s, generation=generation, step=0, reason=reason, workers=sorted(lanes), leader=leader,
        lanes={str(i): taken for i, taken in lanes.items()}, seats=seats, leaders=[leader],
    )  # fmt: skip


def killed_run() -> list[bytes]:
    """3 workers; 10 steps of a second each; worker 0 dies during step 6 and comes back."""
    lines = [event("job_started", 0, step=0, workers=3)]
    lines += [event("worker_joined", 2 + i / 10, worker_id=i, incarnation=0, pid=10 + i, host="h") for i in range(3)]
    lines.append(plan(3, 1, {0: [0, 1], 1: [2], 2: [3]}))
    lines += [
        event("step_committed", 3 + s, step=s, generation=1, loss=1 / s, samples=8, lr=[0.1]) for s in range(1, 6)
    ]
    lines.append(event("worker_evicted", 8.6, worker_id=0, incarnation=0, died_unix_ns=T0 + 8 * S + S // 2, reason="K"))
    lines.append(plan(8.7, 2, {1: [0, 1, 2], 2: [3]}, "worker 0 is dead"))
    phases = {"notice": 0.1, "decide": 0.1, "unblock": 0.1, "regroup": 0.1, "settle": 0.1, "redo": 0.4, "heal": 0.0}
    lines.append(event("recovery_completed", 9.5, worker_id=0, duration_s=1.0, phases_s=phases, generation=2, step=5))
    lines += [event("step_committed", 3.5 + s, step=s, generation=2, loss=1 / s, samples=8) for s in range(6, 11)]
    lines.append(event("worker_joined", 12, worker_id=0, incarnation=1, pid=99, host="h"))
    return lines


def history(run_dir: Path, lines: list[bytes]) -> History:
    (run_dir / "events.jsonl").write_bytes(b"".join(lines))
    return History(run_dir).load()


def test_a_run_with_a_kill(tmp_path: Path) -> None:
    known = history(tmp_path, killed_run())
    facts = known.facts
    assert (facts.condition.state, facts.course.step, facts.crew.generation) == ("running", 10, 2)
    assert {i: w.state for i, w in facts.crew.workers.items()} == {0: "healing", 1: "leader", 2: "active"}
    assert facts.crew.workers[0].pid == 99
    assert [(g.number, g.members) for g in facts.crew.generations] == [(1, 3), (2, 2)]
    assert [mark.kind for mark in facts.marks] == ["evicted"]
    states = [(s.state, s.incarnation) for s in facts.crew.spans if s.worker_id == 0]
    assert states == [("spare", 0), ("leader", 0), ("dead", 0), ("healing", 1)]
    dead = next(s for s in facts.crew.spans if s.state == "dead")
    assert (dead.begin_ns, dead.end_ns) == (T0 + round(8.5 * S), T0 + 12 * S)


@pytest.mark.parametrize("cause", ["drained", "scaled", "preempted", "rebalanced"])
def test_a_worker_that_has_left_in_order_is_no_spare(tmp_path: Path, cause: str) -> None:
    """Neither a member that a plan leaves out, nor a spare that is dismissed."""
    why = {"cause": cause, "reason": "asked"}
    spare = event("worker_joined", 9, worker_id=4, incarnation=0, pid=4, host="h")
    left = {**json.loads(plan(13, 3, {0: [2, 3], 1: [0, 1]})), "target": 2, **why}
    lines = [*killed_run(), spare, json.dumps(left).encode() + b"\n"]
    assert {i: w.state for i, w in history(tmp_path, lines).facts.crew.workers.items()} == {
        0: "leader", 1: "active", 2: "left", 4: "spare",
    }  # fmt: skip
    crew = history(tmp_path, [*lines, *(event("worker_left", 13, worker_id=i, **why) for i in (2, 4))]).facts.crew
    assert [crew.workers[i].state for i in (2, 4)] == ["left", "left"]
    assert [s.state for s in crew.spans if s.worker_id == 4] == ["healing", "spare", "left"]
    assert [s.state for s in crew.spans if s.worker_id == 2] == ["spare", "active", "left"]


@pytest.mark.parametrize(
    ("address", "doors", "words"),
    [
        ("127.0.0.1", {"port": 0, "slots": 0}, ""),
        ("127.0.0.1", {"port": 5, "slots": 2}, "--listen 127.0.0.1:5 --slots 2 "),
        ("10.0.0.1", {"port": 29400, "slots": 2}, "--listen 10.0.0.1:29400 --slots 2 "),
        ("10.0.0.1", {"port": 29400, "slots": None}, "--listen 10.0.0.1:29400 --no-local-workers "),
        ("10.0.0.1", {"port": 29400, "slots": 0}, "--listen 10.0.0.1:29400 "),
        ("10.0.0.1", {"port": 0, "slots": 0}, ""),
        ("10.0.0.1", None, "--listen 10.0.0.1:0 "),
        ("10.0.0.1", {"port": "x", "slots": [1]}, "--listen 10.0.0.1:0 "),
    ],
)
def test_a_job_of_several_hosts_goes_on_where_they_find_it(
    address: str, doors: object, words: str, tmp_path: Path
) -> None:
    config = {"network": {"address": address}, "hosts": {"min": 2}}
    job = {"task": "t", "config": config, "explicit": ["hosts.min", "network.address"], "doors": doors}
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert History(tmp_path).resume == f"everstep run t --run-dir {tmp_path} {words}--set hosts.min=2"


def test_the_account_adds_up_to_the_wall_time(tmp_path: Path) -> None:
    seconds = history(tmp_path, killed_run()).seconds(running=False)
    assert sum(seconds.values()) == pytest.approx(13.5)
    assert seconds["start-up"] == pytest.approx(3.0)
    assert seconds["recovery: redo"] == pytest.approx(0.4)
    assert seconds["recovery: other"] == pytest.approx(0.1)
    assert seconds["training"] == pytest.approx(13.5 - 3 - 1)
    assert goodput(seconds) == pytest.approx(9.5 / 13.5)


def test_what_overlaps_counts_once_and_old_intervals_are_folded() -> None:
    account = TimeAccount()
    account.reach(0)
    for i in range(30_000):
        account.paint(i * 10, i * 10 + 4, "evaluation")
        account.paint(i * 10 + 2, i * 10 + 6, "recovery: settle")
        account.reach(i * 10 + 10)
    assert len(account.intervals) <= 20_000
    seconds = {cause: round(value * 1e9) for cause, value in account.seconds().items()}
    assert seconds == {"training": 120_000, "evaluation": 60_000, "recovery: settle": 120_000}


def test_a_dead_job_that_starts_again_was_not_running_in_between(tmp_path: Path) -> None:
    lines = [*killed_run(), event("job_started", 100, step=7, workers=3), plan(103, 3, {0: [0], 1: [1], 2: [2, 3]})]
    lines += [event("step_committed", 104, step=8, generation=3, loss=1.0, samples=8)]
    known = history(tmp_path, lines)
    assert known.seconds(running=False)["not running"] == pytest.approx(100 - 13.5)
    rate = known.goodput_by_capacity(False)
    ran_s = sum(s for use, s in known.seconds(running=False).items() if use != "not running")
    assert rate is not None and rate * ran_s == pytest.approx(known.facts.account.by_capacity_s())
    assert (known.facts.course.step, known.facts.course.steps.x[-1]) == (8, 8)
    assert known.facts.course.steps_lost == 3, "steps 8 to 10 were done again"


def test_waiting_suspicion_fallback_and_failure(tmp_path: Path) -> None:
    lines = [
        *killed_run(),
        event("worker_suspected", 14, worker_id=2, reason="silent"),
        event("waiting", 15, reason="too few"),
        plan(18, 3, {1: [0, 1], 2: [2, 3]}),
        event("fallback", 18.1, step=7, steps_redone=3, reason="stage lost"),
    ]
    known = history(tmp_path, lines)
    assert (known.facts.course.step, known.facts.course.steps_lost, known.facts.course.steps.x[-1]) == (7, 3, 10)
    seconds = known.seconds(running=False)
    assert seconds["waiting for workers"] == pytest.approx(3.0)
    assert seconds["steps done again"] == pytest.approx(3.0)
    ended = history(tmp_path, [*lines, event("job_failed", 20, state="failed", reason="why", exit_code=1)])
    condition = ended.facts.condition
    assert (condition.state, condition.reason, condition.exit_code) == ("failed", "why", 1)
    assert all(span.end_ns is not None for span in ended.facts.crew.spans)


def test_events_of_older_jobs_and_nonsense(tmp_path: Path) -> None:
    old = event("generation_started", 1, generation=1, leader=1, lanes={"1": [0], "2": [1]}, workers=[1, 2])
    bad = [
        b"{half",
        b"[1]\n",
        b'{"kind": 5}\n',
        b"\xff\xfe\n",
        b"[" * 5000 + b"\n",
        b'{"kind":"x","time_unix_ns":NaN}\n',
    ]
    bad += [event("step_committed", 2, step="x"), event("recovery_completed", 3, duration_s="y", phases_s=[1])]
    bad += [event("generation_started", 4, seats=[[1]]), event("evaluated", 5, metrics="z")]
    bad += [event("checkpoint_completed", 6, tier={}, step=None, duration_s=None)]
    known = history(tmp_path, [b"".join(bad), event("job_started", 0, workers=2), old])
    assert {i: w.state for i, w in known.facts.crew.workers.items()} == {1: "leader", 2: "active"}
    assert known.foreign >= 4
    assert json.dumps(known.seconds(running=False))


def test_half_a_line_spoils_no_other(tmp_path: Path) -> None:
    """A disk that was full left it, and another process has appended."""
    torn = event("step_committed", 3, step=3)[:-30]
    known = history(tmp_path, [event("step_committed", 2, step=2), torn, event("step_committed", 4, step=4)])
    assert known.facts.course.step == 4 and known.tally.steps == 2 and known.foreign == 0


def test_a_torn_last_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one\ntw")
    tail = Tail(path)
    assert list(tail.read()) == [[b"one"]]
    assert list(tail.read()) == []
    with open(path, "ab") as file:
        file.write(b"o\nthree")
    assert list(tail.read()) == [[b"two"]]


def test_a_file_that_is_cut_off_or_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one\ntwo\n")
    tail = Tail(path)
    list(tail.read())
    path.write_bytes(b"new\n")
    assert (list(tail.read()), tail.replaced) == ([[b"new"]], 1)
    other = tmp_path / "b"
    other.write_bytes(b"other and longer\n")
    os.replace(other, path)
    assert (list(tail.read()), tail.replaced) == ([[b"other and longer"]], 2)


def test_rotated_files_are_read_once(tmp_path: Path) -> None:
    current = tmp_path / "host.jsonl"
    folder = Folder(tmp_path, "*.jsonl")
    current.write_bytes(b"1\n2\n")
    assert list(folder.read()) == [[b"1", b"2"]]
    current.rename(tmp_path / "host-0001.jsonl")
    current.write_bytes(b"3\n")
    assert list(folder.read()) == [[b"3"]]
    assert list(folder.read()) == []


def test_a_file_that_cannot_be_looked_at_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "b.jsonl").write_bytes(b"1\n2\n")
    assert list(Folder(tmp_path, "*.jsonl").read()) == [[b"1", b"2"]]


def test_a_checkpoint_that_was_found_damaged_is_not_the_newest_whole_one() -> None:
    def damaged(step: int) -> bytes:
        return event("fallback", 70, step=step, what="checkpoint", cause="corrupt", reason="a block differs")

    saved = [event("checkpoint_completed", s, step=s, tier="disk", bytes=1, duration_s=0.1) for s in (20, 40, 60)]
    for told, newest in (([], 60), ([damaged(60)], 40), ([damaged(60), damaged(20)], 0), ([damaged(60), saved[2]], 60)):
        assert facts_of(json.loads(line) for line in [*saved, *told]).checkpoint_step == newest


def test_fresh_begins_anew(tmp_path: Path) -> None:
    known = history(tmp_path, killed_run())
    (tmp_path / "events.jsonl").rename(tmp_path / "old")
    (tmp_path / "events.jsonl").write_bytes(event("job_started", 50, workers=1))
    known.load()
    assert (known.facts.course.step, known.resets, known.facts.crew.wanted) == (0, 1, 1)


def test_series_stay_small_and_exact_in_sum() -> None:
    series = Series(("sum", "mean", "min", "max", "last"), points=64)
    for i in range(10_000):
        series.add(i, (1.0, float(i), float(i), float(i), float(i)))
    assert len(series) <= 64
    assert sum(series.columns[0]) == 10_000
    assert len({*series.columns[0][:-1]}) == 1, "each point but the last stands for as many"
    assert (series.columns[2][0], series.columns[3][-1], series.columns[4][-1]) == (0.0, 9999.0, 9999.0)
    length, version = len(series), series.version
    series.add(10_000, (1.0, None, None, None, None))
    news = series.since(version, length)
    assert news is not None
    assert (news["start"], sum(series.columns[0])) == (length - 1, 10_001)
    series.add(500, (0.0, 0.0, 0.0, 0.0, 0.0))  # done again from there
    assert series.x[-1] == 500 and series.version > version


def test_usage_of_two_lives_and_two_hosts(tmp_path: Path) -> None:
    def line(t_s: float, worker: int, life: int, step: int, forward_s: float, host: str) -> str:
        row = {"worker_id": worker, "incarnation": life, "step": step, "samples": 8 * step, "rss_bytes": 100}
        row |= {"seconds": {"forward": forward_s, "idle": 0}, "bytes": {"all_reduce": 1000 * step}, "cpu_s": t_s}
        return json.dumps({"t": T0 + int(t_s * S), "host": host, "workers": [row]}) + "\n"

    folder = tmp_path / "metrics"
    folder.mkdir()
    (folder / "a.jsonl").write_text(
        line(0, 0, 0, 1, 1.0, "a") + line(1, 0, 0, 3, 2.0, "a") + line(2, 0, 1, 3, 0.5, "a")
    )
    (folder / "b.jsonl").write_text(line(0, 1, 0, 1, 1.0, "b") + line(1, 1, 0, 3, 3.0, "b") + "torn")
    usage = History(tmp_path).load().usage
    assert usage.total_s == {"forward": pytest.approx(5.5)}
    assert usage.workers[1].samples_per_s == pytest.approx(16.0)
    assert usage.workers[0].row["incarnation"] == 1
    columns = usage.columns()
    assert columns["seconds"]["forward"][1] == pytest.approx(3.0 / 4)


def test_a_long_file_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with open(path, "wb") as file:
        file.write(event("job_started", 0, workers=4) + plan(1, 1, {0: [0], 1: [1], 2: [2], 3: [3]}))
        text = (
            '{"time_unix_ns":%d,"kind":"step_committed","generation":1,"step":%d,"worker_id":0,"incarnation":0,'
            '"pid":77,"reason":null,"loss":1.5,"samples":8,"lr":[0.1]}'
        )
        for base in range(0, 50_000, 10_000):
            steps = range(base, base + 9_900)
            file.write("".join(text % (T0 + 2 * S + s * S // 50, s) + "\n" for s in steps).encode())
            slow = [event("worker_suspected", 2 + base / 50 + i, worker_id=i % 4, reason="slow") for i in range(100)]
            file.write(b"".join(slow))
    known = History(tmp_path)
    known.load()
    assert known.facts.counts["step_committed"] == 49_500
    assert known.facts.counts["worker_suspected"] == 500
    assert len(known.facts.course.steps) <= 2048
    assert len(known.facts.log) <= 4000


def test_columns_are_wide_enough_for_slow_steps() -> None:
    """A step takes 4 s: by the second, most of its time would be counted in no step."""
    usage = Usage()
    for t in range(64):
        row = {"worker_id": 0, "step": t // 4, "phase": "forward", "seconds": {"forward": 0.9 * t}, "rss_bytes": 50}
        usage.take({"t": T0 + t * S, "host": "a", "workers": [row if t < 63 else {**row, "rss_bytes": 0}]})
    columns = usage.columns()
    assert columns["width_s"] == 8
    assert columns["seconds"]["forward"][1:3] == pytest.approx([3.6, 3.6])
    assert usage.workers[0].row["rss_bytes"] == 50, "a process that is just leaving has none"


def test_an_eviction_is_marked_at_the_step_that_was_struck(tmp_path: Path) -> None:
    lines = [*killed_run()[:10], event("fault_injected", 8.5, worker_id=0, step=7), *killed_run()[10:]]
    marks = {mark.kind: mark.step for mark in history(tmp_path, lines).facts.marks}
    assert (marks["fault"], marks["evicted"]) == (7, 7)


def test_what_a_spare_has_waited_is_no_part_of_a_step() -> None:
    usage = Usage()
    for t, (phase, step, seconds) in enumerate(
        [("idle", 0, {}), ("forward", 5, {"other": 60.0}), ("forward", 6, {"other": 60.0, "forward": 0.5})]
    ):
        row = {"worker_id": 0, "incarnation": 0, "step": step, "phase": phase, "seconds": seconds}
        usage.take({"t": T0 + t * S, "host": "a", "workers": [row]})
    columns = usage.columns()
    assert columns["seconds"]["forward"] == [None, None, 0.5]
    assert columns["seconds"]["other"] == [None, None, 0.0] and usage.total_s["other"] == 60.0


@pytest.mark.parametrize(
    ("asked", "size", "joined", "last"),
    [
        ({"steps": 36}, None, None, 36),
        ({"steps": 36, "epochs": 2}, 68, None, 34),
        ({"steps": 30, "epochs": 2}, 68, None, 30),
        ({"epochs": 2}, 67, None, 34),
        ({"epochs": 2}, None, None, None),
        ({"epochs": 2, "batch": "per_worker"}, 68, None, None),
        ({"steps": 36, "batch": "per_worker"}, 68, None, 36),
        ({"steps": 36}, None, {"size": 68, "lanes": 2, "micro_batch": 2, "steps": None, "epochs": 1}, 17),
        ({"steps": 36}, None, {"size": "many", "epochs": True, "lanes": 0}, 36),
        ({"steps": -1, "epochs": 1 << 70}, 68, None, None),
        ({}, None, ["no", "object"], None),
    ],
)
def test_the_last_step_is_the_earlier_one_of_steps_and_epochs(
    asked: dict[str, Any], size: int | None, joined: object, last: int | None, tmp_path: Path
) -> None:
    config = {"lanes": 4, "micro_batch": 1, **asked}
    (tmp_path / "job.json").write_text(json.dumps({"task": "t", "config": config, "dataset_size": size}))
    if joined is not None:
        (tmp_path / "dataset.json").write_text(json.dumps(joined))
    lines = [event("job_started", 0, step=0, workers=1), event("step_committed", 1, step=5, loss=1.0)]
    assert history(tmp_path, lines).total_steps == last
    lines.append(event("job_completed", 2, step=6, exit_code=0, state="completed"))
    assert history(tmp_path, lines).total_steps == 6  # a loop may be left before: that is all there was to do


def test_efficiency_is_told_of_what_was_measured_long_enough(tmp_path: Path) -> None:
    """Two steps of a start that was warm, or cold, say nothing: they made 130 % of it."""
    lines = [event("job_started", 0, step=0, workers=2), plan(1, 1, {0: [0], 1: [1]})]
    lines += [event("step_committed", 1 + s, step=s, loss=1.0, samples=8) for s in range(1, 14)]
    lines += [plan(14.5, 2, {0: [0], 1: [1], 2: [2]})]
    lines += [event("step_committed", 15 + s / 10, step=13 + s, loss=1.0, samples=8) for s in range(1, 5)]
    facts = history(tmp_path, lines).facts
    assert [(e["workers"], e["efficiency"], e["steps"]) for e in facts.course.efficiency()] == [(2, 1.0, 12)]
    why = "left out, as fewer than 10 undisturbed steps were measured"
    assert facts.course.left_out() == f"3 workers (3 steps): {why}"
    lines += [event("step_committed", 15.4 + s, step=17 + s, loss=1.0, samples=8) for s in range(1, 8)]
    facts = history(tmp_path, lines).facts
    assert ([e["steps"] for e in facts.course.efficiency()], facts.course.left_out()) == ([12, 10], "")
    assert [e["spread"] for e in facts.course.efficiency()] == pytest.approx([0.0, 0.565], abs=1e-3)  # 0.1 s and 1 s


def test_efficiency_says_what_it_is_relative_to(tmp_path: Path) -> None:
    lines = [event("job_started", 0, step=0, workers=2), plan(1, 1, {0: [0], 1: [1]})]
    lines += [event("step_committed", 1 + s, step=s, loss=1.0, samples=8) for s in range(1, 13)]
    assert history(tmp_path, lines).facts.course.efficiency_text(2) == ""
    lines += [plan(13.5, 2, {i: [i] for i in range(4)})]
    lines += [event("step_committed", 14 + 0.625 * s, step=12 + s, loss=1.0, samples=8) for s in range(1, 13)]
    facts = history(tmp_path, lines).facts
    few, many = facts.course.efficiency()
    assert [(e["speed_up"], e["ideal"], e["efficiency"]) for e in (few, many)] == [(1, 1, 1), (1.6, 2, 0.8)]
    assert few["relative_to"] == many["relative_to"] == 2
    said = "4 workers: 1.60x of 2 workers, ideal 2.00x, efficiency 80% ± 0%"
    assert facts.course.efficiency_text(4) == facts.course.efficiency_text(3) == facts.course.efficiency_text(2) == said


def test_an_efficiency_has_its_error_and_no_standstill(tmp_path: Path) -> None:
    """A step that a frozen machine holds up for a minute says nothing about the speed of so many workers."""
    at = [1.0]

    def steps(first: int, each: list[float]) -> list[bytes]:
        at[1:] = [at[0] + sum(each[: n + 1]) for n in range(len(each))]
        told = [event("step_committed", t, step=first + n, loss=1.0, samples=8) for n, t in enumerate(at[1:])]
        at[:] = at[-1:]
        return told

    lines = [event("job_started", 0, step=0, workers=2), plan(1, 1, {0: [0], 1: [1]}), *steps(1, [1.0, 1.5] * 8)]
    lines += [plan(at[0], 2, {i: [i] for i in range(4)}), *steps(17, [0.5, 1.0] * 8 + [61.0] + [0.5] * 2)]
    facts = history(tmp_path, lines).facts
    assert facts.course.pace.samples_per_s() == pytest.approx(16), "nor about the present one"
    assert facts.course.efficiency_text(4) == "4 workers: 1.72x of 2 workers, ideal 2.00x, efficiency 86% ± 8%"
    assert history(tmp_path, lines).seconds(False)["stalled"] == pytest.approx(60.25, abs=0.3)


def test_a_clock_that_is_set_back_takes_no_time_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The account goes on, a hang is seen, and a directory that was taken in the future is not taken anew."""
    back = 3600.0
    saved = event("checkpoint_completed", 14 - back, tier="disk", step=11)  # before its commit is told
    steps = (event("step_committed", 13.5 + s - back, step=10 + s, samples=8) for s in range(1, 6))
    known = history(tmp_path, [*killed_run(), saved, *steps])
    seconds, facts = known.seconds(False), known.facts
    assert (sum(seconds.values()), seconds["training"]) == (pytest.approx(17.5), pytest.approx(13.5))
    assert not facts.stands_still(T0 + round((19 - back) * S)) and facts.stands_still(T0 + round((60 - back) * S))
    (tmp_path / "lock").touch()
    os.utime(tmp_path / "lock", ns=(T0, T0))
    monkeypatch.setattr("everstep.report.history.time.time_ns", lambda: T0 + round((19 - back) * S))
    assert (known.begins(running=True), known.state(running=True)) == (False, "running")
    assert sum(known.seconds(running=True).values()) == pytest.approx(18)


@pytest.mark.parametrize("state, cause", [("failed", "quorum"), ("interrupted", "interrupted")])
def test_what_a_job_did_at_its_end_is_told_as_that(tmp_path: Path, state: str, cause: str) -> None:
    """The last step is done at 13.5 s, a worker dies at 20 s, and nobody recovers until the end at 30 s."""
    gone = event("worker_evicted", 20, worker_id=1, incarnation=0, cause="killed", reason="K")
    stop = [event("commanded", 27, command="stop", cause="requested", reason="x")] if state == "interrupted" else []
    end = event("job_failed", 30, state=state, cause=cause, reason="x")
    spent = history(tmp_path, [*killed_run(), gone, *stop, end]).seconds(running=False)
    assert spent["recovery: other"] == pytest.approx(10.1), "0.1 s of it is of the first one"
    assert "finishing" not in spent


def test_a_clock_that_is_set_forward_adds_no_time(tmp_path: Path) -> None:
    """The leader tells so before the first step of the new time; other hosts' events may come before it."""
    ahead = 3600.0
    steps = [event("step_committed", 13.5 + s + ahead, step=10 + s, samples=8) for s in range(1, 6)]
    said = event("warning", 14.6 + ahead, cause="clock", reason="the clock was set", clock_set_s=ahead)
    saved = event("checkpoint_completed", 14.5 + ahead, tier="disk", step=10)
    for told in ([said, saved, *steps], [saved, said, *steps], [saved, steps[0], said, *steps[1:]]):
        seconds = history(tmp_path, [*killed_run(), *told]).seconds(False)
        assert sum(seconds.values()) == pytest.approx(18.5)
        assert seconds.get("stalled", 0.0) < 1.0, seconds
        (tmp_path / "events.jsonl").unlink()


def test_what_is_told_late_sets_no_clock_back(tmp_path: Path) -> None:
    """A full disk held up the commits of a leader that is gone by now."""
    late = event("step_committed", 13.4, step=9, generation=2, loss=1.0, samples=8)
    more = [event("step_committed", 60, step=11, loss=1.0, samples=8), late]
    assert sum(history(tmp_path, [*killed_run(), *more]).seconds(False).values()) == pytest.approx(60)
