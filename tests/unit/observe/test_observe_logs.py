"""Worker logs: each record says who, in which generation, at which step; warnings and uncaught errors are some."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from everstep.observe.logs import MOST_CHARACTERS, RECORD, RecordHandler, WorkerLog

SCRIPT = """
import ctypes, logging, sys, threading, warnings
from everstep.observe.logs import set_up_worker_log
context = set_up_worker_log(2, 3, 1)
logging.getLogger("everstep.test").info("before")
context.generation, context.step, context.stage, context.role = 7, 42, 1, "leader"
logging.getLogger("everstep.test").warning("after %d", 1)
warnings.warn("careful")
thread = threading.Thread(target=lambda: 1 / 0, name="side")
thread.start()
thread.join()
if sys.argv[1] == "crash":
    ctypes.string_at(0)
raise ValueError("the end")
"""


def run(how: str) -> tuple[list[dict], str]:
    """The records that the script wrote, and what else it did."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True)
    assert done.returncode != 0
    lines = done.stderr.split("\n")
    mark = RECORD.decode()
    records = [json.loads(line[1:]) for line in lines if line.startswith(mark)]
    return records, "\n".join(line for line in lines if line and not line.startswith(mark))


def test_records_say_who_and_where() -> None:
    records, rest = run("raise")
    assert rest == ""
    before, after, careful, thread, uncaught = records
    assert (before["message"], before["level"], before["logger"]) == ("before", "info", "everstep.test")
    found = {
        k: after[k] for k in ("message", "level", "worker_id", "incarnation", "generation", "step", "stage", "role")
    }
    assert found == {
        "message": "after 1",
        "level": "warning",
        "worker_id": 3,
        "incarnation": 1,
        "generation": 7,
        "step": 42,
        "stage": 1,
        "role": "leader",
    }
    assert after["host"] == os.uname().nodename and after["pid"] > 0
    assert abs(after["time_unix_ns"] - time.time_ns()) < 60e9 and "exception" not in after
    assert (after["module"], after["file"]) == ("<string>", "<string>") and after["line"] > before["line"] > 0
    assert "careful" in careful["message"]
    assert "uncaught in thread side" in thread["message"] and "ZeroDivisionError" in thread["exception"]
    assert uncaught["level"] == "critical" and "ValueError: the end" in uncaught["exception"]


def test_a_crash_in_native_code_leaves_its_stack() -> None:
    _, rest = run("crash")
    assert "Fatal Python error" in rest and 'File "<string>"' in rest


def test_what_cannot_be_logged_disturbs_nobody(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    logger = logging.Logger("test")
    logger.addHandler(RecordHandler(WorkerLog(0, 0), theirs))
    logger.error("nobody reads this")
    logger.error("%d", "no number")
    os.close(theirs)


def test_long_messages_are_cut() -> None:
    line = WorkerLog(0, 0).line("info", "l", "é" * 2 * MOST_CHARACTERS, exception="x" * 2 * MOST_CHARACTERS + "end")
    said = json.loads(line)
    assert len(said["message"]) == MOST_CHARACTERS + 1 and len(said["exception"]) == MOST_CHARACTERS
    assert said["exception"].endswith("end")
