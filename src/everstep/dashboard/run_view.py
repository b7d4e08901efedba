"""View of a run for a page, as JSON-able data, and the difference to what the page has already. Called with the lock.

A page gets everything once and then only changes: rows of workers, points at the ends of curves, lines of the log.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any, NamedTuple

from everstep.base.cause import Cause
from everstep.base.config import dotted
from everstep.base.digests import version_of
from everstep.dashboard.details import row
from everstep.dashboard.feed import RunFeed
from everstep.report.crew import MEMBERS
from everstep.report.facts import Facts, present_speed
from everstep.report.headline import Now, goes_on_untold, headline, step_of
from everstep.report.history import History
from everstep.report.incidents import Incident
from everstep.report.pace import RECENT_STEPS
from everstep.report.shown_settings import setting_text, shown_settings
from everstep.report.told_facts import Line, Mark, WorkerFact
from everstep.report.usage import Newest
from everstep.report.wall_time import goodput
from everstep.report.words import as_dict, number, one_line, reason_text, whole_number

_LISTED = 200
_FIRST_LINES = 600
_MOST_COLUMNS = 512
_MOST_LIVES = 64
_MOST_SPANS = 1500
_MOST_SETTINGS = 400
_STILL = ("dead", "left", "ended", "spare", "healing")


class WorkerRow(NamedTuple):
    """A worker's row for a page, in this order. rate: samples per second; rss: bytes; cpu: cores; since: ms. cell:
    each process of one on several hosts, and its host; "" for others."""

    state: str
    stage: int | None
    stages: list[int]
    lanes: list[int]
    step: int
    rate: float | None
    rss: int | None
    cpu: float | None
    pid: int | None
    host: str
    life: int
    phase: str
    cause: Cause | None
    reason: str
    since: int
    spent: dict[str, Any] | None
    device: dict[str, int] | None
    cell: str


@dataclass
class PageCursor:
    """State of one page: what it has of one run."""

    resets: int = -1
    rows: dict[int, WorkerRow] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, tuple[int, int]] = field(default_factory=dict)
    line: int = 0
    usage: tuple[int, int] = (-1, -1)


def patch(feed: RunFeed, cursor: PageCursor) -> dict[str, Any]:
    """News of the run for this page; {} if there are none. Moves the cursor on."""
    history, facts = feed.history, feed.history.facts
    found: dict[str, Any] = {}
    if cursor.resets != history.resets:
        fresh = PageCursor(resets=history.resets)
        cursor.__dict__.update(fresh.__dict__)
        found["reset"] = True
    rows = worker_rows(feed)
    shown = head(feed, rows)
    changed = {str(i): row for i, row in rows.items() if cursor.rows.get(i) != row}
    gone = [i for i in cursor.rows if i not in rows]
    if changed or gone:
        found["workers"] = {"fields": WorkerRow._fields, "rows": changed, "gone": gone}
    cursor.rows = rows
    parts: dict[str, Any] = {
        "head": shown,
        "generations": _generations(facts),
        "recoveries": _recoveries(facts),
        "incidents": _incidents(history.incidents(feed.running)),
        "checkpoints": _checkpoints(facts, feed.running),
        "marks": _marks(history.marks(feed.running)),
        "lives": lives(facts),
        "account": {k: round(v, 2) for k, v in history.seconds(feed.running, shown["untold"]).items() if v >= 0.005},
        "efficiency": {"measured": facts.course.efficiency()[:64], "left_out": facts.course.left_out()},
        "metrics": {"step": facts.course.metrics_step, "values": facts.course.metrics},
        "ledger": feed.ledger,
        "config": _config(history),
    }
    for name, value in parts.items():
        if cursor.parts.get(name) != value:
            cursor.parts[name] = found[name] = value
    for name, series in (
        ("steps", facts.course.steps),
        *((f"eval:{k}", s) for k, s in facts.course.evaluations.items()),
        *((f"log:{k}", s) for k, s in facts.logged.series.items()),
    ):
        version, length = cursor.curves.get(name, (-1, 0))
        tail = (series.version, len(series), series.x[-1] if series.x else None)
        news = series.since(version, length) if cursor.parts.get(f"tail:{name}") != tail else None
        if news is not None:
            found.setdefault("curves", {})[name] = news
            cursor.curves[name] = (series.version, len(series))
            cursor.parts[f"tail:{name}"] = tail
    if cursor.usage != (history.usage.version, history.usage.lines) and history.usage.lines:
        cursor.usage = (history.usage.version, history.usage.lines)
        found["usage"] = history.usage.columns(_MOST_COLUMNS)
    lines = _lines(feed.lines, cursor.line)
    if lines:
        cursor.line = lines[-1][0]
        found["log"] = lines
    return found


def head(feed: RunFeed, rows: Mapping[int, WorkerRow]) -> dict[str, Any]:
    """Facts for the first five seconds: state, progress, the last trouble."""
    history, facts, status = feed.history, feed.history.facts, feed.status
    states = [row.state for row in rows.values()]
    live = status if feed.running and status is not None else None
    state = history.told_state(feed.running, live)
    now = history.now(feed.running, live, asked=feed.silent)
    said = headline(facts, now)
    training = feed.running and state in ("running", "recovering")
    total, step, late = history.total_steps, step_of(facts, now), facts.stands_still(now.time_ns)
    untold = goes_on_untold(facts, now)  # the disk refuses events, and the coordinator knows better
    rate = present_speed(facts, now.time_ns) if training and not untold else None
    return {
        "name": history.name,
        "dir": str(feed.run_dir),
        "digest": one_line(history.final.get("state") or history.final.get("model"), 64),
        "digest_version": one_line(version_of(history.final), 20),
        "task": one_line(history.job.get("task")),
        "state": state,
        "cause": (live or {}).get("cause") or facts.condition.cause,
        "reason": reason_text((live or {}).get("reason"))
        or (facts.condition.reason if feed.running or facts.condition.ended_ns else ""),
        "headline": {"level": said.level, "text": said.text, "more": said.more},
        "raised": feed.raised,
        "stands_still": feed.running and late and now.taken_ns is None,
        "usual_s": facts.course.pace.usual_s,
        "last_step_ns": facts.course.last_step_ns or None,
        "running": feed.running,
        "answers": live is not None or not feed.silent,
        "may": feed.may,
        "loaded": history.loaded or bool(history.trouble),
        "step": step,
        "untold": untold,
        "loss_step": facts.course.step if late and step > facts.course.step else None,
        "total": total,
        "loss": facts.course.loss,
        "loss_text": facts.course.loss_text,
        "rate": rate,
        "rate_points": RECENT_STEPS,
        "rate_steps": facts.course.pace.steps,
        "scaling": facts.course.efficiency_text(facts.crew.members),
        "mean_rate": facts.course.mean_samples_per_s(),
        "eta_s": facts.course.eta_s(total) if rate and not late else None,
        "generation": facts.crew.generation,
        "wanted": int(number((live or {}).get("target"))) or (0 if now.taken_ns else facts.crew.wanted),
        "members": sum(s in MEMBERS for s in states),
        "states": {s: states.count(s) for s in sorted(set(states))},
        "goodput": goodput(history.seconds(feed.running, untold)),
        "goodput_by_capacity": history.goodput_by_capacity(feed.running, untold),
        "began_ns": facts.account.begin_ns,
        "ended_ns": facts.condition.ended_ns,
        "last_ns": facts.account.end_ns if not feed.running else None,
        "faults": history.faults(feed.running),
        "recoveries": facts.counts.get("recovery_completed", 0),
        "steps_lost": facts.course.steps_lost,
        "strange": {"level": strange.level, "text": str(strange)} if (strange := facts.course.strange) else None,
    }


def worker_rows(feed: RunFeed) -> dict[int, WorkerRow]:
    """Rows by worker_id, from the events and, while it answers, from the coordinator."""
    facts, usage = feed.history.facts, feed.history.usage.workers
    live = {}
    going = feed.running and not feed.history.begins(feed.running)
    status = feed.status  # once: it is None as soon as the answer is old
    if feed.running and status is not None:
        live = {w["worker_id"]: w for w in status.get("workers", ()) if isinstance(w, dict)}
    done = step_of(facts, Now(0, feed.running, status))
    rows: dict[int, WorkerRow] = {}
    for worker_id in sorted(facts.crew.workers.keys() | live.keys()):
        worker = facts.crew.workers.get(worker_id) or WorkerFact(worker_id)
        now = live.get(worker_id)
        state, life = _state(worker, now, going)
        if state == "dead":
            now = None  # it is said of another life
        measured = usage.get(worker_id)
        if measured is not None and (state in ("dead", "left", "ended") or measured.row.get("incarnation") != life):
            measured = None  # of an ended life
        member = bool(now["lanes"]) if now else worker.role in MEMBERS and state != "dead"
        step = max(now["step"] if now else 0, done if member else 0)  # pulses are older than events
        rate = now.get("samples_per_s") if now and state not in _STILL else None
        if not rate and measured is not None and feed.running and state not in _STILL:
            rate = measured.samples_per_s
        stages = list(now.get("stages") or ()) if now else list(worker.stages)
        pids, hosts = (now.get("pids") or (), now.get("hosts") or ()) if now else (worker.pids, worker.hosts)
        rows[worker_id] = WorkerRow(
            state,
            stages[0] if stages else worker.stage if state == "dead" else None,
            stages,
            list(now["lanes"]) if now else list(worker.lanes),
            step,
            round(number(rate), 2) if rate else None,
            int(number(measured.row.get("rss_bytes"))) if measured else None,
            round(measured.cpu_share, 2) if measured and measured.cpu_share is not None else None,
            (now.get("pid") if now else worker.pid) if state not in ("dead", "left", "ended") else None,
            one_line(", ".join(dict.fromkeys(hosts)) or (now or {}).get("host") or worker.host, 80),
            life,
            one_line(measured.row.get("phase"), 20) if measured and feed.running else "",
            worker.cause,
            worker.reason,
            worker.since_ns // 1_000_000,
            _spent(measured) if feed.running else None,
            _device(measured),
            ", ".join(f"{rank}: {pid} on {host}" for rank, (pid, host) in enumerate(zip(pids, hosts, strict=False))),
        )
    return rows


def _spent(measured: Newest | None) -> dict[str, Any] | None:
    """The worker's time by phase, rounded so that only visible changes are sent."""
    if measured is None or measured.spent is None:
        return None
    found = measured.spent
    rounded = {k: None if v is None else float(f"{v:.3g}") for k, v in vars(found).items() if k != "bytes_per_s"}
    return {**rounded, "bytes_per_s": {name: float(f"{value:.3g}") for name, value in found.bytes_per_s.items()}}


def _device(measured: Newest | None) -> dict[str, int] | None:
    row = measured.row if measured is not None else {}
    allocated, reserved = (whole_number(row.get(f"device_{what}_bytes")) for what in ("allocated", "reserved"))
    return {"allocated": allocated, "reserved": reserved} if reserved else None


def _state(worker: WorkerFact, now: dict[str, Any] | None, running: bool) -> tuple[str, int]:
    """The worker's state, and the incarnation that has it; workers that lived when the job ended have ended, too. A
    worker whose next life is only starting is dead, and a spare for which a place is free heals, as on the chart of
    lives."""
    if not running and worker.state not in ("dead", "left"):
        return "ended", worker.incarnation
    if now is None:
        return worker.state, worker.incarnation
    life, role = int(now.get("incarnation") or 0), str(now.get("role"))
    if worker.state in ("dead", "suspect") and (life <= worker.incarnation or role == "joining"):
        return worker.state, worker.incarnation
    comes = role == "joining" or (role == "spare" and worker.state == "healing" and life == worker.incarnation)
    return ("healing" if comes else role), life


def lives(facts: Facts) -> dict[str, Any]:
    """States of the workers over time: {"spans": [[worker, life, state, begin ms, end ms or null]], "hidden": number
    left out}. If there are many workers, those with the most trouble are shown."""
    ids = {span.worker_id for span in facts.crew.spans}
    if len(ids) > _MOST_LIVES:
        troubled = {span.worker_id for span in facts.crew.spans if span.state in ("dead", "suspect", "healing")}
        ids = set(sorted(ids, key=lambda i: (i not in troubled, i))[:_MOST_LIVES])
    shown = [span for span in facts.crew.spans if span.worker_id in ids][-_MOST_SPANS:]
    spans = [[s.worker_id, s.incarnation, s.state, _ms(s.begin_ns), _ms(s.end_ns)] for s in shown]
    return {"spans": spans, "hidden": len({span.worker_id for span in facts.crew.spans}) - len(ids)}


def _ms(time_ns: int | None) -> int | None:
    return None if time_ns is None else time_ns // 1_000_000


def _config(history: History) -> dict[str, str]:
    """Settings as text, by dotted key."""
    config = dotted(shown_settings(as_dict(history.job.get("config"))))
    return {
        one_line(key, 80): one_line(setting_text(value), 120) for key, value in list(config.items())[:_MOST_SETTINGS]
    }


def _newest(items: Any, most: int = _LISTED) -> list[Any]:
    return list(islice(reversed(items), most))[::-1]


def _generations(facts: Facts) -> list[list[Any]]:
    return [
        [g.number, g.time_ns // 1_000_000, g.step, g.members, list(g.leaders), g.reason, g.cause]
        for g in _newest(facts.crew.generations)
    ]


def _recoveries(facts: Facts) -> list[list[Any]]:
    return [
        [
            r.begin_ns // 1_000_000,
            r.duration_s,
            r.worker_id,
            r.step,
            r.reason,
            [
                [p.use.removeprefix("recovery: "), (p.begin_ns - r.begin_ns) / 1e9, (p.end_ns - p.begin_ns) / 1e9]
                for p in r.phases
            ],
            r.cause,
        ]
        for r in _newest(facts.recoveries, 60)
    ]


def _incidents(incidents: list[Incident]) -> list[list[Any]]:
    """Rows of incidents: number, begin (ms), training goes on (ms, None: not yet), workers, cause, level, line, steps
    done."""
    return [
        [
            one.number,
            one.begin_ns // 1_000_000,
            None if one.end_ns is None else one.end_ns // 1_000_000,
            sorted(one.hits),
            one.cause,
            one.level,
            one.line(),
            list(one.done),
        ]
        for one in _newest(incidents, 100)
    ]


def _checkpoints(facts: Facts, running: bool) -> dict[str, Any]:
    """newest: the newest complete one that is still there (those in memory end with the job's processes); missed: the
    newest one of all, if it was skipped or failed; tiers: for each its newest complete one, and how many were skipped
    and failed."""
    tiers = [
        {
            "tier": name,
            "newest": None if (c := tier.good) is None else [c.step, c.size_bytes, c.duration_s, c.stall_s],
            "skipped": tier.skipped,
            "failed": tier.failed,
        }
        for name, tier in facts.checkpoints.tiers.items()
    ]
    saved = max(facts.checkpoints.good(memory=running), key=lambda c: c.time_ns, default=None)
    newest = None if saved is None else [saved.tier, saved.step, _ms(saved.time_ns)]
    last = next(reversed(facts.checkpoints.newest), None)
    missed = None if last is None or last.ok else [last.tier, last.step, last.skipped, last.cause, last.reason]
    return {"newest": newest, "missed": missed, "tiers": tiers}


def _marks(marks: list[Mark]) -> list[list[Any]]:
    return [[m.time_ns / 1e9, m.step, m.kind, m.worker_id, m.text] for m in _newest(marks, 300)]


def _lines(lines: deque[Line], after: int) -> list[list[Any]]:
    fresh = takewhile(lambda line: line.number > after, islice(reversed(lines), _FIRST_LINES))
    return [row(line) for line in fresh][::-1]


def now_ms() -> int:
    """The server's time in ms; pages show ages by it."""
    return time.time_ns() // 1_000_000
