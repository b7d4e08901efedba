"""Views of a running job: a live view on a terminal, plain lines in a pipe, JSON for programs.

All three take in the same events. `Watcher` feeds them from events.jsonl in a thread of its own, so that no display can
hold up the job.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from everstep.base.cause import Cause, Why
from everstep.base.foreign import passed_on
from everstep.cli.terminal import LEVEL_STYLES, SilentKeys, console, folded, folded_around_command, tell
from everstep.observe.events import KINDS, follow
from everstep.report.crew import MEMBERS
from everstep.report.facts import Facts, present_speed
from everstep.report.headline import Now, headline
from everstep.report.history import History
from everstep.report.tail import Folder, free_bytes, object_of
from everstep.report.usage import Usage
from everstep.report.words import Event, cause, number_text, rate_text, reason_text, shortened, time_text, whole_number
from everstep.report.words import sentence as words_of
from everstep.runtime.link.address import METRICS_FOLDER
from everstep.train.console import OUTPUT_FILE, unstamped

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_UNTOLD = ("job_started", "step_committed", "logged", "worker_left")
_LAST_EVENTS = 6
_STYLES = {"leader": "bold green", "active": "", "healing": "yellow", "suspect": "yellow", "dead": "bold red"}
_TROUBLED = ("dead", "suspect", "healing")
_NARROW = 72
_LEFT_OUT = ("stage", "lanes", "samples")
_POLL_S = 0.2
_LATE_NS = 10_000_000_000
_LAST_SAMPLES_BYTES = 1 << 16
_LAST_TOLD = 64
_WHOLE = 1 << 14
_PRINTS_WAIT_S = 0.3  # for earlier events: a commit is told a moment after its own time
_SAVES_FIRST = ": a checkpoint is taken first"
_PROCESS_WORDS = {
    "worker_exited": "worker {worker_id} exited: {reason}",
    "worker_restarting": "worker {worker_id} is started again{delay}",
    "slot_lost": "its host gives worker {worker_id} up: {reason}",
    "agent_died": "the agent of this host died, and its workers with it: {reason}",
    "coordinator_died": "the coordinator died: {reason}",
    "led_elsewhere": "another host leads the job, in a directory of its own: its steps are not shown here",
    "warning": "warning: {reason}",
}


class Sentences:
    """Events as lines for people; what an exception says is said once, and left out of the lines that it led to. So
    is a plan's reason in the line that names its leader, and in that of the checkpoint that it asks for."""

    def __init__(self) -> None:
        self._raised: deque[str] = deque(maxlen=_LAST_EVENTS)
        self._planned = self._ends = ""

    def of(self, event: Event) -> str | None:
        """The event's line, None if it says nothing new."""
        whole, own = reason_text(event.get("reason"), _WHOLE), reason_text(event.get("reason"))
        if own != whole:  # what is left out may lie beyond the limit of a line
            said = self._without(f": {whole}").lstrip(":; ")
            event = {**event, "cause": event.get("cause"), "reason": said}
        text = sentence(event)
        raised = event["kind"] == "worker_evicted" and cause(event) is Cause.EXCEPTION and own != ""
        if raised and whole in self._raised:
            return f"worker {event.get('worker_id')} raised the same"
        if event["kind"] == "waiting" and self._raised and cause(event) is Cause.EXCEPTION:
            return "waiting: all workers raised an exception, and are started again"
        if event["kind"] == "checkpoint_completed" and text and self._ends:
            text = text.removesuffix(f": {reason_text(self._ends)}")
        if event["kind"] == "generation_started":
            self._planned, self._ends = own, whole.removesuffix(_SAVES_FIRST) if whole.endswith(_SAVES_FIRST) else ""
        elif event["kind"] == "leader_changed" and text and self._planned:
            text = text.removesuffix(f": {self._planned}")
        text = self._without(text) if text else text
        if raised:
            self._raised.append(whole)
        return text

    def _without(self, text: str) -> str:
        """The text without exceptions that were said before."""
        for known in self._raised:
            words = re.escape(known)
            text = re.sub(rf"(?:[:;] | \()(?:life \d+ of )?worker \d+: {words}\)?|: {words}| \({words}\)", "", text)
        return text


def told_at_the_end(event: Event) -> bool:
    """Whether the command that shows the job ends with these words, on stderr."""
    return event["kind"] == "job_failed" and event.get("state") != "interrupted"


class Display:
    """Shows a job. All methods are called from one thread."""

    def event(self, event: Event, facts: Facts) -> None:
        """An event was written; `facts` include it."""

    def refresh(self, facts: Facts) -> None:
        """Redraw: some time has passed."""

    def note(self, text: str) -> None:
        """Show a text that is no event."""

    def close(self) -> None:
        """End the display: nothing more will come."""


class JsonDisplay(Display):
    """The lines of events.jsonl on stdout; notes on stderr."""

    def event(self, event: Event, facts: Facts) -> None:
        tell(json.dumps(event, separators=(",", ":")), sys.stdout)

    def note(self, text: str) -> None:
        tell(text, sys.stderr)


class FinalStep:
    """Number of the last step, as soon as it is known: a script says it when its workers have joined. look: asks for
    it."""

    def __init__(self, number: int | None, look: Callable[[], int | None] = lambda: None) -> None:
        self._number, self._look = number, look

    def __call__(self) -> int | None:
        """The number, None while nobody knows it."""
        self._number = self._number or self._look()
        return self._number


class PlainDisplay(Display):
    """One line per `log_every` steps (0: none), and one per event worth telling; no escape codes."""

    def __init__(
        self,
        log_every: int,
        last: FinalStep | None = None,
        out: TextIO | None = None,
        free_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        """free_bytes: room on the disk of the events, None if unknown."""
        self._log_every = log_every
        self._last = last or FinalStep(None)
        self._sentences = Sentences()
        self._out = out
        self._free_bytes = free_bytes
        self._said_full = False

    def event(self, event: Event, facts: Facts) -> None:
        if event["kind"] == "step_committed":
            number, total = int(event["step"]), self._last()
            if self._log_every and (number % self._log_every == 0 or number == total):
                self.note(step_line(facts, number, total))
            return
        text = self._sentences.of(event)
        if text and not told_at_the_end(event):
            time_ns = whole_number(event.get("time_unix_ns"))
            late = facts.told_ns - time_ns > _LATE_NS  # a full disk has held it up
            self.note(f"at {_clock(time_ns)}: {text}" if late else text)

    def refresh(self, facts: Facts) -> None:
        stands = facts.stands_still(time.time_ns())
        if stands and not self._said_full:
            said = headline(facts, Now(time.time_ns(), total=self._last(), free_bytes=self._free_bytes()))
            if "disk is full" in said.text:
                self.note(said.whole())
                self._said_full = True
        elif not stands:
            self._said_full = False

    def note(self, text: str) -> None:
        tell(text, self._out or sys.stdout)


class LiveDisplay(Display):
    """Progress bar, a line per worker and the last events, redrawn in place. Incidents that began since `since_ns`
    (None: now), and warnings, stay above it for good. samples: workers' resources."""

    def __init__(
        self, console: Console, samples: Folder, last: FinalStep | None = None, since_ns: int | None = None
    ) -> None:
        from rich.live import Live

        self._since_ns = time.time_ns() if since_ns is None else since_ns
        self._facts = Facts()
        self._kept: int | None = None
        self._samples = samples
        self._usage = Usage()
        self._last_step = last or FinalStep(None)
        self._last: deque[str] = deque(maxlen=_LAST_EVENTS)
        self._sentences = Sentences()
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._keys = SilentKeys()
        self._live.start()

    def event(self, event: Event, facts: Facts) -> None:
        self._facts, text = facts, self._sentences.of(event)
        if self._kept is None:  # by number from now on: the clock may be set back
            earlier = (one.number for one in facts.incidents.all if one.begin_ns < self._since_ns)
            self._kept = max(earlier, default=0)
        if text:
            self._last.append(text)
        if text and event["kind"] == "warning":
            self._keep(whole_number(event.get("time_unix_ns")), text)

    def refresh(self, facts: Facts) -> None:
        self._facts = facts
        self._keep_incidents(over=False)
        for sample in filter(None, map(object_of, self._samples.lines())):
            self._usage.take(sample)
        self._live.update(self._render(facts), refresh=True)

    def note(self, text: str) -> None:
        console = self._live.console
        console.print(folded_around_command(text, console.width), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._keep_incidents(over=True)
        self._live.stop()
        self._keys.restore()

    def _keep_incidents(self, *, over: bool) -> None:
        """Print the incidents whose lines are whole; with `over` all of them."""
        incidents = self._facts.incidents
        if self._kept is None or (incidents.waits and not over):
            return
        for one in incidents.all:
            if one.number > self._kept:
                self._keep(one.begin_ns, one.line())
        self._kept = incidents.count

    def _keep(self, time_ns: int, text: str) -> None:
        print_to = self._live.console
        print_to.print(
            folded(f"{_clock(time_ns)}  {text}", print_to.width, " " * 10),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    def _render(self, facts: Facts) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        total, (width, height), now_ns = self._last_step(), self._live.console.size, time.time_ns()
        phases = {i: str(newest.row.get("phase") or "") for i, newest in self._usage.workers.items()}
        said = headline(facts, Now(now_ns, phases=phases, total=total, free_bytes=self._samples.free_bytes))
        head = Table.grid(padding=(0, 2))
        long = min(32, width // 5)
        bar = [ProgressBar(total=total, completed=facts.course.step, width=long)] if total else []
        room = width - (long + 4) * len(bar)
        line = step_line(facts, facts.course.step, total, now_ns)
        head.add_row(*bar, Text(_whole_parts(line, room), no_wrap=True))
        parts: list[RenderableType] = [Text(said.fitted(2 * width - 2), style=LEVEL_STYLES[said.level]), head]
        parts.append(self._workers(facts, max(3, height - len(self._last) - 6)))
        parts += [Text(f"  {shortened(line, width - 2)}", style="dim", no_wrap=True) for line in self._last]
        return Group(*parts)

    def _workers(self, facts: Facts, most: int) -> RenderableType:
        """A line per worker, at most `most`; workers in trouble come first."""
        from rich.table import Table

        table = Table(box=None, padding=(0, 1), header_style="bold", caption_justify="left")
        names = ("worker", "state", "stage", "lanes", "step", "phase", "samples")
        narrow = self._live.console.width < _NARROW
        for name in (name for name in names if not narrow or name not in _LEFT_OUT):
            whole = 8 if name in ("state", "step", "phase") else len(name)  # half a number is another number
            least = None if name in _LEFT_OUT else whole
            table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=least, max_width=24)
        there = [i for i, worker in facts.crew.workers.items() if worker.state != "left"]
        shown = sorted(sorted(there, key=lambda i: (facts.crew.workers[i].state not in _TROUBLED, i))[:most])
        for i in shown:
            worker, newest = facts.crew.workers[i], self._usage.workers.get(i)
            row = newest.row if newest is not None and newest.row.get("incarnation") == worker.incarnation else {}
            row = row if worker.state not in ("dead", "ended") else {}
            named = (",".join(map(str, found)) or "-" for found in (worker.lanes, worker.stages))
            lanes, stages = (shortened(text, 24, ",") for text in named)
            step, phase, samples = (str(row.get(key, "-")) for key in ("step", "phase", "samples"))
            if row and worker.role in MEMBERS:  # samples come once a second, and know a step before it is told
                step = str(facts.course.step)
            style = _STYLES.get(worker.state, "dim")
            cells = (f"{i}.{worker.incarnation}", worker.state, stages, lanes, step, phase, samples)
            kept = (cell for name, cell in zip(names, cells, strict=True) if not narrow or name not in _LEFT_OUT)
            table.add_row(*kept, style=style)
        if len(there) > len(shown):
            table.caption = f"and {len(there) - len(shown)} more"
        return table


def _clock(time_ns: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_ns / 1e9))


class Note(NamedTuple):
    """An act of the agents or the job, and its subject: kind, worker_id and incarnation."""

    text: str
    about: tuple[str, Any, Any]


class Watcher:
    """Feeds a display from events.jsonl, from `begin_ns` on, in a thread. `facts`: the sum of the events seen so far.

    Lines that the leader of a script prints from now on are shown between the events, in the order of time.
    """

    def __init__(self, path: Path, begin_ns: int, display: Display) -> None:
        self.facts = Facts()
        self._path = path
        self._begin_ns = begin_ns
        self._display = display
        self._ended = threading.Event()
        self._notes: deque[Note] = deque()
        self._due: list[Note] = []
        self._told: deque[tuple[str, Any, Any]] = deque(maxlen=_LAST_TOLD)
        self._output = Output(path.parent / OUTPUT_FILE)
        self._thread = threading.Thread(target=self._run, name="display", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Show everything still unread, and end."""
        self._ended.set()
        self._thread.join()
        self._display.close()

    def process_event(self, event: dict[str, Any]) -> None:
        """Take in an act of the job or its agents; called from the job's thread."""
        words = _PROCESS_WORDS.get(event["kind"])
        if words is not None and not event.get("in_order"):
            delay_s = event.get("delay_s")
            delay = f" in {delay_s:.1f} s" if isinstance(delay_s, int | float) and delay_s else ""
            text = words.format_map({**event, "delay": delay})
            life = event.get("incarnation") if event["kind"] == "worker_exited" else None
            self._notes.append(Note(text, (event["kind"], event.get("worker_id"), life)))

    def _said(self, event: Event) -> None:
        """Note that an event told of this life's end or start, so that the agent's notes need not repeat it."""
        if event["kind"] == "worker_evicted":
            self._told.append(("worker_exited", event.get("worker_id"), event.get("incarnation")))
        elif event["kind"] == "cell_shrunk" or (event["kind"] == "warning" and cause(event) is Cause.CRASH_LOOP):
            self._told.append(("slot_lost", event.get("worker_id"), None))

    def _stopped(self) -> bool:
        """Whether to stop. `follow` asks some times a second, and before its last read: a good moment to redraw."""
        ended = self._ended.is_set()
        for line in self._output.due(time.monotonic()):
            self._display.note(line)
        self._tell_notes()
        if not ended:
            self._display.refresh(self.facts)
        return ended

    def _tell_notes(self) -> None:
        """Tell notes one turn late: if the job is over by then, the exits of its workers interest nobody."""
        if self.facts.condition.exit_code is None:
            for note in self._due:
                if note.about not in self._told:
                    self._display.note(note.text)
        self._due = [self._notes.popleft() for _ in range(len(self._notes))]

    def _run(self) -> None:
        for event in follow(self._path, poll_s=_POLL_S, stop=self._stopped):
            self.facts.take(event)  # earlier starts included: the figures are the job's
            time_ns = int(event.get("time_unix_ns") or 0)
            if time_ns >= self._begin_ns:
                self._begin_ns = 0  # what follows is of this start, also if the clock is set back
                for line in self._output.before(time_ns):
                    self._display.note(line)
                self._said(event)
                self._display.event(event, self.facts)
        for line in self._output.due(math.inf):
            self._display.note(line)
        self._tell_notes()


class Output:
    """Lines that are appended to the leader's output from now on; a line is whole when its end is written.

    If the file was rotated meanwhile, the rest of the rotated one comes first.
    """

    def __init__(self, path: Path) -> None:
        self._files = Folder(path.parent, f"{path.stem}*{path.suffix}")
        self._waiting: deque[tuple[int, float, str]] = deque()
        self._read_ns = 0
        self._read()
        self._waiting.clear()

    def before(self, time_ns: int) -> list[str]:
        if time_ns >= self._read_ns:
            self._read()
        return self._take(lambda printed_ns, _: printed_ns <= time_ns)

    def due(self, now_s: float) -> list[str]:
        """Lines that have waited long enough for an event that precedes them. now_s: of the monotonic clock."""
        self._read()
        return self._take(lambda _, found_s: found_s + _PRINTS_WAIT_S <= now_s)

    def _read(self) -> None:
        self._read_ns, now_s = time.time_ns(), time.monotonic()
        for printed_ns, text in map(unstamped, self._files.lines()):
            self._waiting += [(printed_ns, now_s, line) for line in text.splitlines() or [""]]

    def _take(self, wanted: Callable[[int, float], bool]) -> list[str]:
        taken = []
        while self._waiting and wanted(*self._waiting[0][:2]):
            taken.append(self._waiting.popleft()[2])
        return taken


def choose_display(run_dir: Path, *, as_json: bool, log_every: int, total_steps: int | None) -> Display:
    """The display that fits: JSON if asked for, live on a terminal, else plain, also where another launcher passes
    the lines on."""
    if as_json:
        return JsonDisplay()
    history = History(run_dir)
    last = FinalStep(total_steps, lambda: history.total_steps)
    if sys.stdout.isatty() and not passed_on(os.environ):
        return LiveDisplay(console(), Folder(run_dir / METRICS_FOLDER, "*.jsonl", _LAST_SAMPLES_BYTES), last)
    return PlainDisplay(log_every, last, free_bytes=lambda: free_bytes(run_dir))


def step_line(facts: Facts, number: int, total_steps: int | None, now_ns: int | None = None) -> str:
    """step 12/200  loss 1.2345  lr 0.001  812 samples/s (or tokens/s, where the task counts them)  eta 1m02s ...

    now_ns: while training stands still, the speed falls, and nobody knows the end.
    """
    parts = [f"step {number}" + (f"/{total_steps}" if total_steps else "")]
    stands = now_ns is not None and facts.stands_still(now_ns)
    rate, eta_s = present_speed(facts, now_ns), None if stands else facts.course.eta_s(total_steps)
    if facts.course.loss_text:
        parts.append(f"loss {facts.course.loss_text}")
    learning_rate = facts.course.steps.columns[4][-1] if facts.course.steps.x else math.nan
    if math.isfinite(learning_rate):
        parts.append(f"lr {learning_rate:.3g}")
    if rate is not None and facts.course.tokens_per_sample is not None:
        parts.append(f"{rate_text(rate * facts.course.tokens_per_sample, 0)} tokens/s")
    elif rate is not None:
        parts.append(f"{rate_text(rate, 0)} samples/s")
    if eta_s is not None:
        parts.append(f"eta {duration(eta_s)}")
    parts.append(f"generation {facts.crew.generation}")
    return "  ".join(parts)


def _whole_parts(line: str, most: int) -> str:
    """The parts of a step's line that so many characters hold; a number never loses its unit."""
    while len(line) > most and "  " in line:
        line = line.rpartition("  ")[0]
    return shortened(line, most)


def sentence(event: Event) -> str | None:
    """An event as a line for people; None for those that say nothing new (each step, what agents do)."""
    kind = event["kind"]
    repeated = kind == "nonfinite" and event.get("in_a_row") != 1
    return words_of(event) if kind in KINDS and kind not in _UNTOLD and not repeated else None


def duration(seconds: float) -> str:
    """Duration in whole seconds, in words: 4d05h, 1h02m, 3m04s or 5s."""
    whole = int(seconds + 0.5)
    return f"{whole}s" if whole < 60 else time_text(whole)


def _last_loss(summary: dict[str, Any]) -> str:
    if summary["loss"] is not None:
        return number_text(summary["loss"])
    strange = summary.get("nonfinite")
    return "nan" if strange and strange["last"] >= summary["steps"] else "unknown"


def summary_lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary as names and values for people."""
    digest, recovery, metrics = summary["digest"] or {}, summary["recovery_s"], summary["metrics"] or {}
    rows = [
        ("state", summary["state"]),
        ("steps", str(summary["steps"])),
        ("loss", _last_loss(summary)),
        *((f"test {name}", number_text(value)) for name, value in metrics.items()),
        *((name, number_text(value, "g")) for name, value in (summary.get("logged") or {}).items()),
        ("faults survived", str(summary["faults_survived"])),
        ("steps lost", str(summary["steps_lost"])),
        ("generations", str(summary["generations"])),
    ]
    strange = summary.get("nonfinite")
    if strange:
        within = (
            f"steps, {strange['first']} to {strange['last']}" if strange["steps"] > 1 else f"step, {strange['first']}"
        )
        rows.append(("not finite", f"loss or gradient of {strange['steps']} {within}"))
    if summary["recoveries"]:
        times = f"median {time_text(recovery['median'])}, worst {time_text(recovery['max'])} to the next step"
        rows.append(("recoveries", f"{summary['recoveries']}, {times}"))
    taken = summary.get("checkpoints") or {}
    if taken.get("completed") or taken.get("failed"):
        failed = f", {taken['failed']} failed" if taken["failed"] else ""
        newest = f"the newest of step {taken['newest']}" if taken["newest"] else "none that outlives the job"
        rows.append(("checkpoints", f"{taken['completed']}, {newest}{failed}"))
    rows += [
        ("ledger", "complete" if summary["ledger_complete"] else "incomplete"),
        ("digest of model", str(digest.get("model", "none"))),
        ("digest of state", str(digest.get("state", "none"))),
        ("wall time", duration(summary["wall_s"])),
        ("run directory", summary["run_dir"]),
    ]
    return rows


def print_summary(summary: dict[str, Any]) -> None:
    """A table on a terminal, aligned lines in a pipe."""
    rows = summary_lines(summary)
    if not sys.stdout.isatty():
        for name, value in rows:
            tell(f"{name:<16} {value}", sys.stdout)
        return
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in rows:
        table.add_row(name, value)
    console().print(table)


def summary(
    facts: Facts,
    exit_code: int,
    run_dir: str,
    digest: Mapping[str, Any] | None,
    why: Why | None = None,
    missing_rows: str | None = None,
) -> dict[str, Any]:
    """The object that `run --json` ends with. why: the reason of a bad end. Times are of the newest recoveries.

    missing_rows: rows that the ledger lacks, "" if none; None: nobody has looked, so it does not count as complete. A
    completed job that lacks rows ends with 1.
    """
    strange = facts.course.strange
    states = {0: "completed", 130: "interrupted", 143: "interrupted"}
    times = sorted(recovery.duration_s for recovery in facts.recoveries)
    return {
        "kind": "summary",
        "state": states.get(exit_code, "failed"),
        "exit_code": exit_code or int(bool(missing_rows)),
        "cause": why.cause if why is not None else Cause.DISK if missing_rows else None,
        "reason": "; ".join(text for text in (why.reason if why is not None else "", missing_rows) if text) or None,
        "steps": int(digest["step"]) if digest is not None else facts.course.step,
        "faults_survived": facts.faults,
        "steps_lost": facts.course.steps_lost,
        "nonfinite": {"steps": strange.count, "first": strange.first, "last": strange.last} if strange else None,
        "recoveries": facts.counts.get("recovery_completed", 0),
        "recovery_s": {"median": statistics.median(times) if times else None, "max": times[-1] if times else None},
        "generations": facts.crew.generation,
        "checkpoints": {
            "completed": facts.counts.get("checkpoint_completed", 0),
            "failed": facts.counts.get("checkpoint_failed", 0),
            "skipped": facts.counts.get("checkpoint_skipped", 0),
            "newest": facts.checkpoint_step or None,
        },
        "ledger_complete": missing_rows == "",
        "digest": dict(digest) if digest is not None else None,
        "loss": facts.course.loss,
        "metrics": facts.course.metrics or None,
        "logged": facts.logged.finite() or None,
        "wall_s": round(sum(s for use, s in facts.account.seconds().items() if use != "not running"), 3),
        "run_dir": run_dir,
    }
