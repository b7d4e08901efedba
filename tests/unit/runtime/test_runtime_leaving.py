"""A command that a signal interrupts: it ends there and then, wherever Python is, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

LIMIT_S = 60


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


COMMAND = """
import os, signal, sys
import everstep.cli.main as cli
from everstep.__main__ import main

{where}
cli.run_command = lambda: interrupted() or 0
main()
"""
HOOK = """
def interrupted():
    os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.{name}))
    if os.fork() == 0:
        os._exit(0)
"""
DESTRUCTOR = """
class Fragile:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})

def interrupted():
    Fragile()
"""


@pytest.mark.parametrize("where", [HOOK, DESTRUCTOR], ids=["hook of fork", "destructor"])
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_nothing_swallows_a_signal(where: str, name: str, code: int) -> None:
    ended = python(COMMAND.format(where=where.format(name=name)))
    assert (ended.returncode, ended.stderr.count("error: interrupted"), len(ended.stderr.splitlines())) == (code, 1, 1)


def test_what_a_command_must_not_leave_behind_is_gone(tmp_path: Path) -> None:
    ended = python(
        """
        import os, signal, sys
        from pathlib import Path
        from everstep.base.leaving import before_leaving, leave, temporary_folder

        def fails():
            raise ValueError("this keeps no other act from being done")

        with before_leaving(lambda: Path(sys.argv[1], "over").touch()), before_leaving(lambda: None):
            pass
        folder = Path(sys.argv[1])
        with before_leaving((folder / "done").touch), temporary_folder("kept-", folder) as own:
            (own / "file").write_text("large")
            with before_leaving(fails):
                leave(signal.SIGTERM)
        """,
        str(tmp_path),
    )
    assert (ended.returncode, ended.stderr) == (143, "error: interrupted by SIGTERM\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done"]


def test_a_bound_command_ends_with_its_parent_and_hears_signals_as_ever() -> None:
    parent = subprocess.Popen(
        [
            *(sys.executable, "-P", "-c"),
            "import subprocess, sys; from everstep.runtime.host.bound import bound_command;"
            "subprocess.Popen(bound_command('sh', '-c', 'grep SigIgn /proc/$$/status; exec cat')); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin is not None and parent.stdout is not None
    ignored = int(parent.stdout.readline().split()[1], 16)
    assert not ignored & (1 << signal.SIGPIPE - 1)
    parent.kill()
    assert parent.stdout.read() == ""  # nobody has the other end any more
    parent.wait(LIMIT_S)
    parent.stdin.close()


def test_a_bound_command_that_is_not_there() -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "everstep.runtime.host.bound", str(os.getpid()), "no-such-command"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (ended.returncode, ended.stderr) == (
        127,
        "error: 'no-such-command' cannot be run: No such file or directory\n",
    )


@pytest.mark.parametrize(("name", "told"), [("SIGINT", ""), ("SIGTERM", "error: interrupted by SIGTERM\n")])
def test_a_command_that_ctrl_c_is_to_end_tells_no_error(name: str, told: str) -> None:
    code = "import signal; from everstep.base.leaving import leave, until_ctrl_c\nwith until_ctrl_c(): leave(signal.{})"
    ended = python(code.format(name))
    assert (ended.returncode, ended.stderr) == (128 + getattr(signal, name), told)
