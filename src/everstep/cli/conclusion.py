"""End of a job, as its leading command reports it: events, ledger, summary, exit code."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.base.below import home, moved
from everstep.base.cause import Cause
from everstep.base.errors import ConfigError
from everstep.checkpoint.store import DirectoryStore
from everstep.cli.display import print_summary, summary
from everstep.cli.job import JobFile
from everstep.cli.ledger import missing_rows
from everstep.cli.main import complain
from everstep.cli.run_dir import checkpoint_dir, read_digest
from everstep.cli.terminal import folded_around_command, paragraph, tell
from everstep.observe.events import EventLog, read_events
from everstep.report.facts import Facts
from everstep.report.history import History
from everstep.report.raised import raised_lines
from everstep.report.words import reason_text
from everstep.runtime.link.address import EVENTS_FILE

if TYPE_CHECKING:
    from everstep.runtime.job import Job
    from everstep.runtime.job_end import Outcome

ENDS = ("job_completed", "job_failed")
"""Kinds of the event with which a job says how it ended."""


def end_of(process: Job, job: JobFile, events: EventLog, facts: Facts, outcome: Outcome, *, as_json: bool) -> int:
    """Finish the work of a job whose process is over, and find the words for its end. Returns the command's exit code;
    a completed job with an incomplete ledger gets 1."""
    run_dir, exit_code, lacking = process.run_dir, outcome.exit_code, ""
    if not moved(run_dir):
        DirectoryStore(checkpoint_dir(run_dir, job)).drop_leftovers()  # workers may have been killed while they wrote
        lacking = lacking_rows(run_dir, process.reached - 1)  # a step is released after the next one is applied
    if lacking:  # the coordinator told of the end, but reads no ledger: pages and reports get to know of it here
        events.write("warning", cause=Cause.DISK, reason=lacking)
        events.close()
    digest = read_digest(run_dir) if exit_code == 0 else None
    result = summary(facts, exit_code, str(run_dir), digest, outcome.why if exit_code else None, lacking)
    if as_json:
        tell(json.dumps(result, separators=(",", ":")), sys.stdout)
    elif exit_code == 0:
        print_summary(result)
    _say(run_dir, facts, outcome, lacking)
    return int(result["exit_code"])


def tell_json(run_dir: Path, facts: Facts, outcome: Outcome) -> None:
    """The result of a job that has ended, or goes on, on another host: its weights and rows are there."""
    why = outcome.why if outcome.exit_code else None
    tell(json.dumps(summary(facts, outcome.exit_code, str(run_dir), None, why), separators=(",", ":")), sys.stdout)


def _say(run_dir: Path, facts: Facts, outcome: Outcome, lacking: str) -> None:
    """Tell of a bad end on stderr; an interrupted job has not failed, and is told how it goes on. lacking: rows."""
    reached, reason = max(facts.course.step, facts.checkpoint_step), reason_text(outcome.why.reason, 2000)
    stopped = outcome.exit_code > 0 and outcome.state == "interrupted"
    raised = raised_lines(run_dir, facts) if outcome.exit_code and not stopped else []
    if stopped:
        again = History(run_dir).resume
        text = f"stopped after step {reached}: {reason or 'the job was interrupted'}"
        tell(paragraph(text, sys.stderr, "  "), sys.stderr)
        tell(f"to go on: {again}" if again else f"logs in {run_dir / 'logs'}", sys.stderr)
    wrong = [lacking] if lacking else []
    if outcome.exit_code and not stopped:
        why = f"{reason or 'the job failed'} (after step {reached}; logs in {run_dir / 'logs'})"
        wrong.insert(0, raised[0] if raised else why)
    if wrong:
        complain("; ".join(wrong))
    for line in raised[1:]:
        wide = shutil.get_terminal_size().columns - 2 if sys.stderr.isatty() else sys.maxsize
        tell(textwrap.indent(folded_around_command(line, wide), "  "), sys.stderr)


def say_the_end(events: EventLog, run_dir: Path, begin_ns: int, outcome: Outcome) -> None:
    """The coordinator reports the end; if it could not, this process writes the event."""
    there = home(run_dir) if moved(run_dir) else run_dir
    if there is None:
        return
    if there != run_dir:
        events = EventLog(there / EVENTS_FILE)
    own = dropwhile(lambda e: e["time_unix_ns"] < begin_ns, read_events(there / EVENTS_FILE))  # clocks may be set back
    if not any(event["kind"] in ENDS for event in own):
        why, code = outcome.why, outcome.exit_code
        events.write(ENDS[bool(code)], cause=why.cause, reason=why.reason, state=outcome.state, exit_code=code)


def lacking_rows(run_dir: Path, reached: int = 0) -> str:
    """Rows that the ledger lacks, in words; "" if it is complete."""
    try:
        return missing_rows(run_dir, reached)
    except ConfigError as error:
        return f"it is not known whether the ledger is complete: {error}"
