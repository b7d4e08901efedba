"""The report of one run, and the comparison of several, as one HTML file that needs nothing else.

No script, no network: figures are SVG, colours follow the reader's light or dark. All text is escaped by `Html`.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from everstep.base.config import dotted
from everstep.base.digests import version_of
from everstep.report import figures
from everstep.report.history import History, names_of
from everstep.report.logfiles import LogFiles
from everstep.report.logged import GRADIENT_NORM
from everstep.report.shown_settings import setting_text, shown_settings
from everstep.report.style import PAGE_CSS
from everstep.report.svg import escape
from everstep.report.told_facts import TierCount
from everstep.report.wall_time import goodput
from everstep.report.words import as_dict, number, number_text, one_line, rate_text, size_text, time_text, whole_number

_MOST_ROWS = 60


@dataclass(frozen=True)
class Proof:
    """Evidence of exactness: the ledger's audit, and the comparison with a reference run.

    ledger: {"clean", "steps", "problems", "epochs"} or None with the reason in `ledger_note`. differences: lines, none
    if the runs are bitwise equal; None if there is no reference.
    """

    ledger: dict[str, Any] | None = None
    ledger_note: str = ""
    reference: str = ""
    differences: list[str] | None = None


def report_page(history: History, proof: Proof, running: bool = False) -> str:
    """The report of one run."""
    facts = history.facts
    seconds = history.seconds(running)
    drawn = figures.figures(history, running)
    state = history.state(running)
    said = history.headline(running)
    tone = {"good": "good", "bad": "bad"}.get(said.level, "warn")
    body = [
        f"<h1>{escape(history.name)}</h1>",
        f'<p><span class="state {tone}">{escape(state)}</span> <span class="soft">'
        f"{escape(_headline(history))}</span></p>",
        f"<p>{escape(said.whole())}</p>",
        _tiles(history, seconds, running),
        _section("What happened", *_story(history, running), *_said(history)),
        _section(
            "Loss",
            _panel(drawn["loss"]),
            *(_panel(drawn[name]) for name in drawn if name.startswith(("evaluation", "logged"))),
        ),
        _section("Throughput", _panel(drawn["throughput"]), _panel(drawn.get("scaling", "")), _efficiency(history)),
        _section("Step time", _panel(drawn.get("steptime", "")), _panel(drawn.get("busy", ""))),
        _section("Communication", _panel(drawn.get("communication", "")), _communication(history)),
        _section("Workers", _panel(drawn["workers"]), _workers(history), _generations(history)),
        _section("Recoveries", _panel(drawn["recoveries"])) if facts.recoveries else "",
        _section("Where the time went", _panel(drawn["goodput"]), _account(seconds)),
        _section("Checkpoints", _checkpoints(history)),
        _section("Exactness", _exactness(history, proof)),
        _section("Environment", _environment(history)),
    ]
    return _page(f"{history.name}: report", body)


def compare_page(histories: Sequence[History]) -> str:
    """The comparison of several runs, drawn over each other."""
    names = names_of(histories)
    accounts = [h.seconds(h.running()) for h in histories]
    columns = [
        {
            "task": one_line(h.job.get("task")),
            "state": h.state(h.running()),
            "steps": str(h.facts.course.step),
            "last loss": _loss(h),
            "samples per second": _rate(h),
            "wall time": _wall_time(account),
            "goodput": _percent(goodput(account)),
            "generations": str(h.facts.crew.generation),
            "recoveries": str(h.facts.counts.get("recovery_completed", 0)),
            "digest of model": str(h.final.get("model", "none")),
            "digest of state": str(h.final.get("state", "none")),
        }
        for h, account in zip(histories, accounts, strict=True)
    ]
    rows = [[key, *(column[key] for column in columns)] for key in columns[0]]
    digests = [one_line(h.final.get("state") or h.final.get("model"), 200) for h in histories]
    verdict = "The final states are bitwise equal." if len(set(digests)) == 1 else "The final states are not all equal."
    if len({str(version_of(h.final)) for h in histories}) > 1:
        verdict = "Their digests are of different versions, which say nothing of each other: see everstep verify."
    if "" in digests:
        missing = ", ".join(name for name, digest in zip(names, digests, strict=True) if not digest)
        verdict = f"Of {missing} there is no final state to compare: not finished."
    own = [figures.own_chart(histories, name) for name in figures.own_curves(histories)]
    body = [
        f"<h1>{escape(' · '.join(names))}</h1>",
        f'<p class="soft">{len(histories)} runs over each other</p>',
        _section("Side by side", _table(["", *names], rows)),
        _section("Exactness", f"<p>{escape(verdict)}</p>"),
        _section("Loss", *map(_panel, (figures.loss_chart(histories), *own))),
        _section("Throughput", _panel(figures.throughput_chart(histories))),
        _section("Where the time went", *map(_panel, map(figures.goodput_chart, accounts, names))),
        _section("Workers", *(f"<h3>{escape(name)}</h3>{_lives(h)}" for name, h in zip(names, histories, strict=True))),
        _section("Settings that differ", _differences(histories, names)),
    ]
    return _page(" · ".join(names), body)


def _page(title: str, body: Iterable[str]) -> str:
    csp = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{csp}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{PAGE_CSS}</style></head><body><main>{''.join(body)}"
        f'<p class="soft">Written {escape(time.strftime("%Y-%m-%d %H:%M:%S %Z"))} by everstep.</p>'
        "</main></body></html>\n"
    )


def _section(title: str, *parts: str) -> str:
    """A part of the page; empty if it has nothing to show."""
    if not any(parts):
        return ""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _panel(content: str) -> str:
    if not content:
        return ""
    return f'<div class="panel" tabindex="0" role="group" aria-label="figure">{content}</div>'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def cell(tag: str, i: int, text: str) -> str:
        style = ' class="n"' if i in numbers else ""
        return f"<{tag}{style}>{escape(text)}</{tag}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(header))
    head = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    lines = "".join(f"<tr>{''.join(cell('td', i, text) for i, text in enumerate(row))}</tr>" for row in rows)
    return _panel(f"<table>{head}<tbody>{lines}</tbody></table>")


def _headline(history: History) -> str:
    task = one_line(history.job.get("task"))
    begin = history.facts.began_ns
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begin / 1e9)) if begin else "never started"
    return ", ".join(part for part in (task, f"started {when}") if part)


def _tiles(history: History, seconds: dict[str, float], running: bool) -> str:
    facts = history.facts
    durations = [r.duration_s for r in facts.recoveries]
    total, over = history.total_steps, history.state(running) in ("failed", "interrupted")
    tiles = [
        ("steps", f"{facts.course.step}" + (f" of {total}" if total else "")),
        ("last loss", _loss(history)),
        ("samples per second", _rate(history)),
        ("wall time", _wall_time(seconds)),
        ("goodput", _percent(goodput(seconds))),
        ("goodput by capacity", _percent(history.goodput_by_capacity(running))),
        ("faults" if over else "faults survived", str(history.faults(running)) if facts.counts else "unknown"),
        ("median recovery", time_text(median(durations)) if durations else _no_recovery(history, running)),
        ("steps lost", str(facts.course.steps_lost)),
    ]
    tiles += [("loss or gradient not finite", str(facts.course.strange))] if facts.course.strange else []
    tiles += [(f"test {name}", number_text(value)) for name, value in list(facts.course.metrics.items())[:4]]
    norm = {GRADIENT_NORM: GRADIENT_NORM.lower()}
    tiles += [(norm.get(name, name), number_text(value, "g")) for name, value in list(facts.logged.newest.items())[:4]]
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _no_recovery(history: History, running: bool) -> str:
    if not history.facts.counts:
        return "unknown"
    return "none has ended" if any(one.end_ns is None for one in history.incidents(running)) else "none needed"


def _story(history: History, running: bool) -> list[str]:
    """One line per incident; checkpoints and all the rest are folded away below."""
    incidents = [[_at(history, one.begin_ns), one.level, one.line()] for one in history.incidents(running)]
    none = "<p>No fault.</p>" if history.facts.counts else "<p>There are no events: nothing is known.</p>"
    shown = _table(["time", "level", "what"], incidents[-_MOST_ROWS:], (0,)) if incidents else none
    return [shown, f"<details><summary>Event by event</summary>{''.join(_events(history))}</details>"]


def _events(history: History) -> list[str]:
    lines = history.facts.log
    rows = [[_at(history, line.time_ns), line.level, line.text] for line in lines]
    worth = [row for row, line in zip(rows, lines, strict=True) if line.kind != "worker_joined"][-_MOST_ROWS:]
    found = [_table(["time", "level", "what"], worth, (0,))]
    if len(rows) > len(worth):
        text = "\n".join("  ".join(row) for row in rows)
        found.append(f"<details><summary>All {len(rows)} lines</summary><pre>{escape(text)}</pre></details>")
    return found


def _said(history: History) -> list[str]:
    """The newest warnings and errors of the workers."""
    found = (line for line in LogFiles(history.run_dir, events=False).read() if line.at_least("warning"))
    newest = deque(found, maxlen=_MOST_ROWS)
    if not newest:
        return []
    lines = [f"{_at(history, line.time_ns)}  {line.source}  {line.level}  {line.whole()}" for line in newest]
    title = f"The last {len(lines)} warnings in the workers' logs"
    return [f"<details><summary>{title}</summary><pre>{escape(chr(10).join(lines))}</pre></details>"]


def _efficiency(history: History) -> str:
    found = history.facts.course.efficiency()
    left_out = history.facts.course.left_out()
    note = f"<p>{escape(left_out)}</p>" if left_out else ""
    if len(found) < 2:
        return note
    rows = [
        [
            *(f"{e['workers']:.0f}", rate_text(e["samples_per_s"]), f"{e['speed_up']:.2f}", f"{e['ideal']:.2f}"),
            _percent(e["efficiency"]),
            *(f"± {100 * e['spread']:.0f} %", f"{e['steps']:.0f}"),
        ]
        for e in found
    ]
    return (
        _table(
            [
                *("workers", "samples per second", f"speed-up, of {found[0]['workers']:.0f}", "ideal"),
                *("scaling efficiency", "spread of a step", "steps"),
            ],
            rows,
            tuple(range(7)),
        )
        + note
    )


def _communication(history: History) -> str:
    total = history.usage.total_bytes
    steps = max(1, history.facts.course.step)
    rows = [[name, size_text(sent), size_text(sent / steps)] for name, sent in sorted(total.items())]
    return _table(["operation", "sent by all workers", "per step"], rows, (1, 2)) if rows else ""


def _workers(history: History) -> str:
    """The last sample of each slot's newest life."""
    rows = []
    for i, newest in sorted(history.usage.workers.items())[:_MOST_ROWS]:
        row = newest.row
        seconds = {one_line(k): number(v) for k, v in as_dict(row.get("seconds")).items()}
        most = sorted(seconds, key=lambda k: -seconds[k])[:3]
        whole = sum(seconds.values()) or 1.0
        life, step, passes = (str(whole_number(row.get(key))) for key in ("incarnation", "step", "passes"))
        used = (time_text(number(row.get("cpu_s"))), size_text(number(row.get("rss_bytes"))))
        shares = ", ".join(f"{k} {100 * seconds[k] / whole:.0f} %" for k in most)
        rows.append([f"{i}.{life}", step, passes, *used, shares])
    header = ["worker", "step", "passes", "processor", "memory", "most of its time"]
    return _table(header, rows, (1, 2, 3, 4)) if rows else ""


def _generations(history: History) -> str:
    rows = []
    for g in list(history.facts.crew.generations)[-_MOST_ROWS:]:
        numbers = (str(g.number), _at(history, g.time_ns), str(g.step), str(g.members))
        rows.append([*numbers, ", ".join(map(str, g.leaders)), g.cause, g.reason])
    return _table(["generation", "time", "step", "members", "leaders", "cause", "why"], rows, (0, 1, 2, 3))


def _account(seconds: dict[str, float]) -> str:
    whole = sum(seconds.values()) or 1.0
    rows = [[use, f"{value:.3f}", f"{100 * value / whole:.2f} %"] for use, value in seconds.items()]
    rows.append(["all", f"{sum(seconds.values()):.3f}", "100.00 %"])
    return _table(["where", "seconds", "share"], rows, (1, 2))


def _checkpoints(history: History) -> str:
    found = list(history.facts.checkpoints.newest)
    if not found:
        return "<p>None were written.</p>"
    tiers = [_tier(name, tier) for name, tier in history.facts.checkpoints.tiers.items()]
    rows = [
        [
            _at(history, c.time_ns),
            c.tier,
            str(c.step),
            "complete" if c.ok else f"{'skipped' if c.skipped else 'failed'} ({c.cause}): {c.reason}",
            size_text(c.size_bytes) if c.size_bytes else "",
            time_text(c.duration_s) if c.duration_s else "",
            time_text(c.stall_s) if c.stall_s else "",
        ]
        for c in found[-_MOST_ROWS:]
    ]
    each = _table(["time", "tier", "step", "result", "size", "took", "stall"], rows, (0, 2, 4, 5, 6))
    return (
        _table(["tier", "complete", "skipped", "failed", "newest", "size", "stall in all"], tiers, (1, 2, 3, 4, 5, 6))
        + each
    )


def _tier(name: str, tier: TierCount) -> list[str]:
    newest = [f"step {tier.good.step}", size_text(tier.good.size_bytes)] if tier.good else ["none", ""]
    return [name, *map(str, (tier.complete, tier.skipped, tier.failed)), *newest, time_text(tier.stall_s)]


def _exactness(history: History, proof: Proof) -> str:
    digest = history.final
    rows = [[f"digest of {key}", str(digest[key])] for key in ("model", "state") if digest.get(key)]
    rows = rows or [["digest", "none: the job has not finished"]]
    if proof.differences is not None:
        equal = f"bitwise equal to {proof.reference}"
        rows.append(["compared", equal if not proof.differences else f"differs from {proof.reference}"])
        rows += [["", line] for line in proof.differences[:20]]
    else:
        rows.append(["compared", "with nothing: give --reference DIR of an undisturbed run"])
    if proof.ledger is not None:
        problems = proof.ledger.get("problems") or []
        verdict = (
            "clean: every sample counted exactly once" if proof.ledger.get("clean") else f"{len(problems)} problems"
        )
        rows.append(["ledger", f"{proof.ledger.get('steps')} steps, {verdict}"])
        rows += [["", one_line(problem)] for problem in problems[:20]]
    else:
        rows.append(["ledger", proof.ledger_note or "not read"])
    return _table(["", ""], rows)


def _environment(history: History) -> str:
    job = history.job
    rows = [[one_line(k), one_line(v)] for k, v in as_dict(job.get("versions")).items()]
    hosts = sorted({w.host for w in history.facts.crew.workers.values() if w.host})
    rows += [["run directory", str(history.run_dir.resolve())], ["hosts", ", ".join(hosts[:20]) or "unknown"]]
    config = escape(json.dumps(shown_settings(as_dict(job.get("config"))), indent=2, default=str))
    return f"{_table(['', ''], rows)}<details><summary>Effective config</summary><pre>{config}</pre></details>"


def _differences(histories: Sequence[History], names: Sequence[str]) -> str:
    flat = [_settings(h) for h in histories]
    keys = sorted({key for one in flat for key in one})
    rows = [[key, *(one.get(key, "") for one in flat)] for key in keys if len({one.get(key) for one in flat}) > 1]
    return _table(["key", *names], rows) if rows else "<p>None.</p>"


def _settings(history: History) -> dict[str, str]:
    """Settings as text, by dotted key."""
    config = dotted(shown_settings(as_dict(history.job.get("config"))))
    return {one_line(key, 80): one_line(setting_text(value)) for key, value in config.items()}


def _lives(history: History) -> str:
    running = history.running()
    return _panel(figures.workers_chart(history.facts, history.marks(running)))


def _wall_time(seconds: dict[str, float]) -> str:
    return time_text(sum(s for use, s in seconds.items() if use != "not running"))


def _at(history: History, time_ns: int) -> str:
    return f"{(time_ns - history.facts.began_ns) / 1e9:.2f} s"


def _loss(history: History) -> str:
    return history.facts.course.loss_text or "none"


def _rate(history: History) -> str:
    rate = history.facts.course.mean_samples_per_s()
    return "unknown" if rate is None else rate_text(rate)


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f} %"
