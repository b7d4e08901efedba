"""The exception of the user's code that ended the job, as a block of lines from the worker's log."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from everstep.base.cause import Cause
from everstep.observe.logs import RAISED_IN
from everstep.report.excerpt import around
from everstep.report.facts import Facts
from everstep.report.words import one_line
from everstep.runtime.link.address import LOGS_FOLDER

_FRAME = re.compile(r'^ *File "([^"\n]+)", line (\d+)', re.MULTILINE)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MOST_TRACEBACK = 1 << 16


def raised_lines(run_dir: Path, facts: Facts) -> list[str]:
    """Exception; the user's own line, with lane, step, samples and workers where they are known; the step after which
    the job ended; the command that shows the log, or the host that has it. [] of a job that did not end with an
    exception, or whose worker left no word."""
    end = facts.condition
    if end.ended_ns is None or end.state != "failed" or end.cause is not Cause.EXCEPTION:
        return []
    lines = [line for line in around(run_dir, end.ended_ns) if line.worker_id is not None]
    last = next((line for line in reversed(lines) if line.more and line.fields.get("level") == "critical"), None)
    if last is None:
        return _elsewhere(run_dir, facts)
    before = [line for line in lines if line.worker_id == last.worker_id and line.time_ns <= last.time_ns]
    frame = _own_frame(last.more[-_MOST_TRACEBACK:])
    said = (str(line.fields.get("message")) for line in reversed(before))
    lane = next((text for text in said if text.startswith(RAISED_IN)), "")
    step = facts.incidents.newest.step if facts.incidents.newest is not None else None
    lane = one_line(lane.removeprefix("raised "), 300) or (f"in step {step}" if step else "")
    where = [f"at {one_line(frame, 400)}" if frame else "", lane]
    logs = shlex.join(["everstep", "logs", str(run_dir), "--worker", str(last.worker_id), "--level", "error"])
    told = ", ".join(filter(None, [*where, _hit_workers(facts, last.worker_id)]))
    return [one_line(last.fields.get("message")), told, _ended(facts), f"traceback and log: {logs}"]


def _elsewhere(run_dir: Path, facts: Facts) -> list[str]:
    """The block by the events alone, of a worker whose host keeps its log in a directory of its own."""
    newest = facts.incidents.newest
    if newest is None or not facts.crew.on_several_hosts():
        return []
    for i, worker in facts.crew.workers.items():
        hit = newest.hits.get(f"worker {i}")
        if hit is None or hit.cause is not Cause.EXCEPTION or not worker.host:
            continue
        if not any((run_dir / LOGS_FOLDER).glob(f"worker-{i}.*jsonl")):
            logs = f"traceback and log: on host {worker.host}, in {LOGS_FOLDER}/ of its own directory"
            return [hit.reason, f"in step {newest.step}, {_hit_workers(facts, i)}", _ended(facts), logs]
    return []


def _ended(facts: Facts) -> str:
    saved = facts.checkpoint_step
    left = f"with a checkpoint of step {saved}" if saved else "without a checkpoint"
    return f"the job ended after step {facts.course.step}, {left}"


def _hit_workers(facts: Facts, worker_id: int | None) -> str:
    """The worker whose log is read, and the others that raised with it."""
    newest = facts.incidents.newest
    hits = newest.hits.values() if newest is not None else ()
    others = [hit.who for hit in hits if hit.cause is Cause.EXCEPTION and hit.who != f"worker {worker_id}"]
    others.sort(key=lambda who: (len(who), who))  # worker 2 before worker 10
    return f"in worker {worker_id}" + (f", as in {', '.join(others[:6])}" if others else "")


def _own_frame(traceback: str) -> str:
    """FILE:LINE of the user's own innermost line in the first traceback, else of any code's; "" if there is none."""
    first = traceback.partition("\nThe above exception was")[0]
    frames = _FRAME.findall(first)
    own = [(file, line) for file, line in frames if _is_own(file)]
    return ":".join((own or frames)[-1]) if frames else ""


def _is_own(file: str) -> bool:
    """Whether a file is the user's; another host may have this package elsewhere."""
    inside = file.rpartition("/everstep/")[2]
    ours = inside != file and os.path.exists(_PACKAGE + inside)
    return not ours and not file.startswith("<") and "site-packages" not in file
