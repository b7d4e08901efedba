"""Where a worker stands still: found while some code holds the interpreter lock, in the user's lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from everstep.runtime.host.stacks import SHOW_STACKS, StackReader

HOLDS = """
import ctypes, os, threading
from everstep.runtime.host.stacks import show_on_signal

show_on_signal(2)
threading.Thread(target=threading.Event().wait, daemon=True).start()

def sleeps_without_letting_go():
    os.write(1, b"here"), ctypes.PyDLL(None).pause()

sleeps_without_letting_go()
"""


def where(text: str) -> str:
    reader, found = StackReader(), ""
    for line in text.encode().split(b"\n"):
        found = reader.take(line) or found
    return found


def test_a_process_that_holds_the_interpreter_lock_shows_its_stacks(tmp_path: Path) -> None:
    script = tmp_path / "holds.py"
    script.write_text(HOLDS)
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert os.read(process.stdout.fileno(), 4) == b"here"
        process.send_signal(SHOW_STACKS)
        seen = b""
        while b"in <module>" not in seen:
            seen += os.read(process.stderr.fileno(), 1 << 16)
        process.send_signal(signal.SIGKILL)
    assert where(seen.decode()) == f"{script}:9 (sleeps_without_letting_go)"


THREAD = "Thread 0x00007f00 (most recent call first):"
LIBRARY, OWN = f'  File "{sysconfig.get_path("stdlib")}/threading.py", line 3 in wait', '  File "/me/a.py", line 7 in f'


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([THREAD, LIBRARY, OWN, '  File "/me/a.py", line 9 in <module>'], "/me/a.py:7 (f)"),
        ([THREAD, OWN, "", THREAD, LIBRARY], f"{sysconfig.get_path('stdlib')}/threading.py:3 (wait)"),
        ([THREAD, '  File "/x/site-packages/t/n.py", line 1 in g', OWN], "/me/a.py:7 (f)"),
        ([OWN], ""),
        ([THREAD, "something else", OWN], ""),
        (["printed", THREAD, f"{OWN} and more " + "x" * 300], ""),
    ],
)
def test_the_innermost_line_of_the_users_own(lines: list[str], expected: str) -> None:
    assert where("\n".join(lines)) == expected
