"""Prometheus and the sinks agree with the truth that the simulator knows, over its seeds: steps and samples, members of
the plan in force, who has died of what and when, and how the job ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_sim_told import Event, happened, key_of

from everstep.base.cause import Cause
from everstep.base.config import load_config
from everstep.cli.job import JobFile, write_job
from everstep.observe.events import format_event
from everstep.report.history import History
from everstep.report.prometheus import expose, families
from everstep.sim.scenario import Simulation
from everstep.sim.setups import Setup, set_up, set_up_leased, set_up_operated, set_up_split
from everstep.sinks.publication import Publication
from everstep.sinks.sink import Sink

T0 = 1_800_000_000_000_000_000
DRAWS = [set_up, set_up_split, set_up_leased, set_up_operated]


def write(folder: Path, events: list[Event]) -> Path:
    """A run directory with these events; those of the simulator are told since the world began."""
    folder.mkdir(exist_ok=True)
    write_job(folder, JobFile("mine", (), load_config([("test", {"steps": 10})]), created_unix_ns=T0))
    said = b""
    for event in events:
        fields = {name: value for name, value in event.items() if name not in ("kind", "time_unix_ns")}
        if fields.get("died_unix_ns") is not None:
            fields["died_unix_ns"] += T0
        said += format_event(event["kind"], event["time_unix_ns"] + T0, fields)
    (folder / "events.jsonl").write_bytes(said)
    return folder


def scraped(run_dir: Path, running: bool, now_ns: int) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples as Prometheus reads them: by name, and values of labels."""
    history = History(run_dir)
    while history.poll():
        pass
    text, _ = expose(families(history, running, None, now_ns + T0))
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    assert found["everstep_unreadable_lines_total"] == {(): 0}
    return found


def by_label(found: dict[tuple[str, ...], float]) -> Counter[str]:
    return Counter({label: int(value) for (label,), value in found.items() if value})


@pytest.mark.parametrize("draw", DRAWS)
def test_what_prometheus_reads_is_what_has_happened(tmp_path: Path, draw: Callable[[int], Setup]) -> None:
    for seed in range(60, 64):
        one, events = happened(seed, draw)
        sums_are_true(one, events, scraped(write(tmp_path / f"{seed}", events), False, one.world.now_ns))
        plans = [n for n, event in enumerate(events) if event["kind"] == "generation_started"]
        for at in {plans[-1], plans[len(plans) // 2]}:
            part, now_ns = events[: at + 1], events[at]["time_unix_ns"]
            members_are_true(one, events[at], scraped(write(tmp_path / f"{seed}", part), True, now_ns))


def sums_are_true(one: Simulation, events: list[Event], found: dict[str, dict[tuple[str, ...], float]]) -> None:
    """After the end."""
    steps, kinds = found["everstep_steps_total"][()], Counter(event["kind"] for event in events)
    assert found["everstep_samples_total"][()] == steps * one.checks.job.lanes
    assert steps == kinds["step_committed"]
    newest = 0 if kinds["job_started"] > 1 and not one.control.fate.completed else one.checks.exact.ended_at
    if one.control.fate.completed:
        assert found["everstep_step"][()] == newest
        assert kinds["job_started"] > 1 or steps == newest  # each step of the job, once
        assert one.checks.newest <= found["everstep_generation"][()] <= max(one.checks.records.plans)
    # Nobody lives on, by their metrics.
    assert not {*by_label(found["everstep_workers"])} - {"dead"}
    told = [event for event in events if event["kind"] == "recovery_completed"]
    assert by_label(found["everstep_recoveries_total"]) == Counter(str(event["cause"]) for event in told)
    assert found["everstep_recovery_seconds_count"]["total",] == len(told)
    spent_s = [recovery_is_true(one, event) for event in told]
    assert found["everstep_recovery_seconds_sum"]["total",] == pytest.approx(sum(spent_s), abs=1e-6)


def recovery_is_true(one: Simulation, event: Event) -> float:
    """A recovery from a death by a signal begins when that process died. Returns how long it took."""
    life = one.control.workers.get(key_of(event)) if event.get("worker_id") is not None else None
    begin_ns = event["time_unix_ns"] - round(event["duration_s"] * 1e9)
    assert 0 <= begin_ns <= event["time_unix_ns"] <= one.world.now_ns, event
    if event["cause"] is Cause.KILLED and life is not None:
        assert life.died_ns and begin_ns <= event["time_unix_ns"], event
    spent = event["phases_s"]
    assert all(0 <= seconds <= event["duration_s"] + 1e-6 for seconds in spent.values()), event
    return float(event["duration_s"])


def members_are_true(one: Simulation, told: Event, found: dict[str, dict[tuple[str, ...], float]]) -> None:
    """While it runs: right after a plan came into force."""
    plan = one.checks.records.plans.get(told["generation"])
    if plan is None or {seat[0] for seat in told["seats"]} != set(plan.worker_ids):
        return  # the job was resumed since, and its generations count from one again
    states = by_label(found["everstep_workers"])
    assert states["leader"] + states["active"] + states["standby"] == len(plan.members), (told, states)
    assert states["leader"] == len({plan.leader(stage) for stage in range(plan.stages)}), (told, states)
    assert found["everstep_generation"][()] == plan.generation
    assert found["everstep_wanted_workers"][()] == told["target"]


class Heard(Sink):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int, int]] = []  # step, time, generation and number of workers
        self.kinds: Counter[str] = Counter()
        self.ended = ""

    def scalars(self, step: int, time_ns: int, values: Any) -> None:
        if "job/generation" in values:
            self.steps.append((step, time_ns - T0, int(values["job/generation"]), int(values["job/workers"])))

    def event(self, step: int, text: str, event: Event) -> None:
        assert text
        self.kinds[event["kind"]] += 1

    def end(self, state: str) -> None:
        self.ended = state


@pytest.mark.parametrize("draw", DRAWS)
def test_a_sink_hears_of_each_step_once(tmp_path: Path, draw: Callable[[int], Setup]) -> None:
    for seed in range(70, 74):
        one, events = happened(seed, draw)
        kinds, heard, folder = Counter(event["kind"] for event in events), Heard(), tmp_path / f"{seed}"
        for part in (len(events) // 3, len(events) // 2, len(events)):  # each time by another process
            publication = Publication(write(folder, events[:part]), "recorder", heard)
            publication.advance(part == len(events))
            publication.end(running=part < len(events))
        # A coordinator that dies between its journal and its report tells of no plan.
        started = {event["generation"] for event in events if event["kind"] == "generation_started"}
        first = [step for step, _, _, _ in heard.steps]
        assert first == sorted(set(first))
        committed = {event["step"]: event for event in reversed(events) if event["kind"] == "step_committed"}
        assert set(first) == set(committed)
        for step, time_ns, generation, workers in heard.steps:
            assert (time_ns, generation) == (committed[step]["time_unix_ns"], committed[step]["generation"])
            if kinds["job_started"] == 1 and generation in started:
                assert workers == len(one.checks.records.plans[generation].members), (seed, step, workers)
        assert heard.kinds == kinds - Counter({"step_committed": kinds["step_committed"]})
        fate = one.control.fate
        states = {"completed": fate.completed, "interrupted": fate.stopped, "failed": bool(fate.failed)}
        ends = kinds["job_completed"] + kinds["job_failed"]
        assert states[heard.ended] or not ends, (heard.ended, states)
