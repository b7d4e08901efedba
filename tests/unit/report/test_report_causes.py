"""Nothing but what people read follows from sentences: reworded, a job's numbers, states and verdicts are the same."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import recorded_run as recorded

pytest.importorskip("prometheus_client", reason="the extra [dashboard] is not installed")

from everstep.base.cause import Cause
from everstep.chaos.fault_account import account, missing
from everstep.chaos.scenarios import SCENARIOS
from everstep.cli.display import summary
from everstep.cli.status import workers_of
from everstep.dashboard.feed import RunFeed
from everstep.dashboard.run_view import WorkerRow, head, worker_rows
from everstep.report.figures import figures
from everstep.report.history import History
from everstep.report.page import Proof, report_page
from everstep.report.prometheus import expose, families
from everstep.report.tally import FAULTS

NOW_NS = recorded.T0_NS + 60 * recorded.SECOND_NS
EVICTIONS = ("killed", "crashed", "exited", "exception", "oom", "hung", "silent", "host_lost", "link", "corrupt")
SENTENCES = ("reason", "text", "more")


def _seats(members: list[int]) -> dict[str, Any]:
    return {"seats": [[i, i % 2, "active", [i]] for i in members], "leaders": members[:2], "workers": members}


def eventful() -> list[bytes]:
    """A job that sees everything: each cause of an eviction, whoever leaves, falls back, waits, fails to save."""
    event, lines, step, at_s = recorded.event, list(recorded.events()), 10, 20.0

    def add(kind: str, **more: Any) -> None:
        nonlocal at_s
        at_s += 0.1
        lines.append(event(kind, at_s, **more))

    for generation, cause in enumerate(EVICTIONS, start=3):
        who = generation % 3
        members = [i for i in range(3) if i != who]
        add("worker_suspected", worker_id=who, cause=cause, reason=f"killed by no progress for {generation} s")
        add("worker_evicted", worker_id=who, incarnation=generation, cause=cause, reason="worker 1 leaves as asked")
        add("generation_started", generation=generation, cause=cause, reason="exit code 0", **_seats(members))
        add("leader_changed", generation=generation, worker_id=members[0], cause=cause, reason="its host h is silent")
        step += 1
        add("step_committed", step=step, generation=generation, loss=1.0, samples=24)
        recovery = {"duration_s": 0.2, "phases_s": recorded.PHASES_S}
        add("recovery_completed", worker_id=who, cause=cause, reason="no progress for 3 s", **recovery)
        add("worker_joined", worker_id=who, incarnation=generation + 1, cause="joined", reason="leaves as asked")
    add("generation_started", generation=20, cause="joined", reason="leaves as asked", **_seats([0, 1, 2]))
    add("worker_healed", worker_id=2, cause="joined", reason="killed by")
    add("generation_started", generation=21, cause="drained", reason="somebody has gone", **_seats([0, 1]))
    for tier, cause in (("disk", "busy"), ("disk", "disk"), ("object", "store"), ("memory", "config")):
        add("checkpoint_failed", step=step, tier=tier, cause=cause, reason="killed by SIGKILL")
    add("fallback", step=step, what="checkpoint", cause="corrupt", reason="steps are done again")
    add("fallback", step=step - 2, steps_redone=2, source="copy", cause="killed", reason="all is well")
    add("fault_injected", step=3, worker_id=1, phase="heal", fault="kill", target="x", cause="injected", reason="boo")
    add("waiting", cause="killed", reason="worker 3 (incarnation 1): killed by SIGKILL")
    add("warning", cause="refused", reason="completed")
    add("job_failed", state="failed", exit_code=3, cause="quorum", reason="no progress for 600 s")
    return lines


def _with(events: list[bytes], **changes: Any) -> list[bytes]:
    """The same events, with these fields replaced where they are; None: left out."""
    found = []
    for line in events:
        event = json.loads(line)
        for name, value in changes.items():
            if event.get(name) and value is None:
                del event[name]
            elif event.get(name):
                event[name] = value
        found.append(json.dumps(event).encode() + b"\n")
    return found


def _run(run_dir: Path, events: list[bytes]) -> Path:
    recorded.make_run(run_dir)
    (run_dir / "events.jsonl").write_bytes(b"".join(events))
    return run_dir


def _unsaid(value: Any) -> Any:
    """A value without the sentences in it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _unsaid(getattr(value, f.name)) for f in fields(value) if f.name not in SENTENCES}
    if isinstance(value, dict):
        return {k: _unsaid(v) for k, v in value.items() if k not in SENTENCES}
    if isinstance(value, list | tuple) or type(value).__name__ == "deque":
        return [_unsaid(v) for v in value]
    return value if isinstance(value, str | int | float | bool | frozenset | None) else vars(value)


def _known(run_dir: Path) -> dict[str, Any]:
    """All that is made of a run directory, sentences left out."""
    history = History(run_dir).load()
    facts, feed = history.facts, RunFeed(run_dir, logs=False)
    feed.load()
    rows = worker_rows(feed)
    at = WorkerRow._fields.index("reason")
    found = account(json.loads(line) for line in (run_dir / "events.jsonl").read_bytes().splitlines())
    return {
        "metrics": expose(families(history, True, None, NOW_NS))[0].replace(run_dir.name.encode(), b""),
        "facts": _unsaid(facts),
        "summary": _unsaid({**summary(facts, 3, "x", None)}),
        "status": workers_of(facts),
        "rows": {i: (*row[:at], *row[at + 1 :]) for i, row in rows.items()},
        "head": {k: _unsaid(v) for k, v in head(feed, rows).items() if k not in ("name", "dir", "reason")},
        "figures": figures(history),
        "chaos": [len(missing(scenario, found)) for scenario in SCENARIOS],
        "seconds": history.seconds(False),
    }


@pytest.mark.parametrize("words", ["x", "killed by SIGKILL", "no progress for 9 s", "worker 1 leaves as asked"])
def test_only_what_people_read_follows_from_sentences(tmp_path: Path, words: str) -> None:
    plain = _known(_run(tmp_path / "plain", eventful()))
    reworded = _known(_run(tmp_path / "reworded", _with(eventful(), reason=words)))
    for name, value in plain.items():
        if name == "figures":  # what is drawn names workers' reasons nowhere but where the pointer rests
            assert value.keys() == reworded[name].keys()
        else:
            assert value == reworded[name], name


def test_what_is_counted_and_shown_follows_from_the_causes(tmp_path: Path) -> None:
    history = History(_run(tmp_path / "run", eventful())).load()
    counted = history.tally.recoveries
    assert counted == dict.fromkeys(FAULTS, 0) | {Cause.read(c): 1 for c in EVICTIONS} | {Cause.KILLED: 2}
    assert [r.cause for r in history.facts.recoveries] == [Cause.KILLED, *map(Cause.read, EVICTIONS)]
    failures = {key: n for key, n in history.tally.checkpoint_failures.items() if n}
    assert failures == {
        ("disk", Cause.DISK): 1,
        ("object", Cause.STORE): 2,
        ("memory", Cause.CONFIG): 1,
    }
    assert {key: n for key, n in history.tally.checkpoints_skipped.items() if n} == {("disk", Cause.BUSY): 1}
    left = history.facts.crew.workers[2]
    assert (left.state, left.cause, left.reason) == ("left", Cause.DRAINED, "somebody has gone")
    assert (history.facts.condition.state, history.facts.condition.cause) == ("failed", Cause.QUORUM)
    assert "<td>host_lost</td>" in report_page(history, Proof())


def test_run_directories_of_older_versions_are_shown(tmp_path: Path) -> None:
    run_dir = _run(tmp_path / "old", _with(eventful(), cause=None))
    known, history = _known(run_dir), History(run_dir).load()
    assert history.facts.counts.get("not understood") is None
    assert history.tally.recoveries[Cause.UNKNOWN] == 1 + len(EVICTIONS)
    assert known["head"]["cause"] is Cause.UNKNOWN
    assert {g.cause for g in history.facts.crew.generations} == {Cause.UNKNOWN}


def test_a_cause_that_is_none_is_unknown(tmp_path: Path) -> None:
    run_dir = _run(tmp_path / "odd", _with(eventful(), cause={"no": ["cause"]}))
    assert History(run_dir).load().tally.recoveries[Cause.UNKNOWN] == 1 + len(EVICTIONS)
