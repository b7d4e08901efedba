"""Worker logs: every line says who, in which generation, at which step; warnings and uncaught errors land there too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import logging, sys, threading, warnings
from everstep.observe.logs import set_up_worker_log
context = set_up_worker_log(sys.argv[1], 3, 1)
logging.getLogger("everstep.test").info("before")
context.generation, context.step = 7, 42
logging.getLogger("everstep.test").warning("after")
warnings.warn("careful")
thread = threading.Thread(target=lambda: 1 / 0, name="side")
thread.start()
thread.join()
raise ValueError("the end")
"""


def test_lines_say_who_and_where(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "worker-3.log"
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    text = path.read_text()
    assert "worker 3.1 gen 0 step 0 INFO everstep.test: before" in text
    assert "worker 3.1 gen 7 step 42 WARNING everstep.test: after" in text
    assert "careful" in text
    assert "uncaught in thread side" in text and "ZeroDivisionError" in text
    assert "ValueError: the end" in text
