"""What the user's code raised: one block, from the log of the worker; and the lines of the run, which say it once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from everstep.cli.display import Sentences
from everstep.observe.logs import RAISED_IN
from everstep.report.history import History
from everstep.report.raised import raised_lines
from told_events import T0, S, event, trained, write_events

RAISED = {"cause": "exception", "reason": "Bad.loss raised ValueError: no such label: 17 (task.py:17)"}
FAILED = event("job_failed", 7, step=10, state="failed", exit_code=1, **RAISED)
TRACEBACK = """Traceback (most recent call last):
  File "/usr/lib/python3/site-packages/torch/nn.py", line 3, in call
  File "/home/me/bad task.py", line 17, in loss
    raise ValueError("no such label: 17")
ValueError: no such label: 17

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/home/me/elsewhere.py", line 1, in run
everstep.base.errors.TaskError: Bad.loss raised ValueError: no such label: 17 (task.py:17)
"""


def record(at_s: float, level: str, message: str, **more: Any) -> str:
    said = {"time_unix_ns": T0 + round(at_s * S), "level": level, "logger": "x", "message": message, "source": "log"}
    return json.dumps({**said, **more}) + "\n"


def failed_run(run_dir: Path, *records: str, end: dict[str, Any] = FAILED) -> History:
    write_events(run_dir, [*trained(), end])
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / "logs" / "worker-1.jsonl").write_text("".join(records))
    return History(run_dir).load()


def test_the_block_names_exception_line_lane_and_the_command_for_more(tmp_path: Path) -> None:
    lane = record(6.5, "error", f"{RAISED_IN}3 of step 11 (samples 52, 17)")
    last = record(6.6, "critical", RAISED["reason"], exception=TRACEBACK)
    history = failed_run(tmp_path, lane, last, record(6.7, "info", "bye"))
    assert raised_lines(tmp_path, history.facts) == [
        "Bad.loss raised ValueError: no such label: 17",
        "at /home/me/bad task.py:17, in lane 3 of step 11 (samples 52, 17), in worker 1",
        f"traceback and log: everstep logs {tmp_path} --worker 1 --level error",
    ]


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    bare = record(6.6, "critical", "ValueError: x", exception="damaged")
    history = failed_run(tmp_path, bare)
    assert raised_lines(tmp_path, history.facts)[:2] == ["ValueError: x", "in worker 1"]
    assert raised_lines(tmp_path, failed_run(tmp_path, record(6.6, "info", "x")).facts) == []
    killed = {**FAILED, "cause": "killed", "reason": "killed by SIGKILL"}
    assert raised_lines(tmp_path, failed_run(tmp_path, bare, end=killed).facts) == []


def test_the_lines_of_a_run_say_an_exception_once() -> None:
    text = RAISED["reason"]
    lines = Sentences()
    evicted = event("worker_evicted", 5, worker_id=1, incarnation=0, **RAISED)
    assert lines.of(evicted) == f"worker 1 was evicted: {text}"
    led_to = f"worker 0 failed at step 1 as worker 1 did: {text}: a checkpoint is taken first"
    shown = [
        lines.of(event("generation_started", 6, generation=2, workers=[0], cause="exception", reason=led_to)),
        lines.of(event("fallback", 6, step=1, cause="exception", reason=f"every holder is gone ({text}): from disk")),
        lines.of({**FAILED, "reason": f"worker 1 (incarnation 0): {text}; checkpoint of step 1 in x"}),
    ]
    assert shown == [
        "generation 2 with workers 0: worker 0 failed at step 1 as worker 1 did: a checkpoint is taken first",
        "fallback: every holder is gone: from disk",
        "failed: worker 1 (incarnation 0); checkpoint of step 1 in x",
    ]
    assert Sentences().of(FAILED) == f"failed: {text}"
