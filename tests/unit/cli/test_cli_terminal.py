"""What is printed cannot steer the terminal, whoever said it: in lines, in drawn tables, in errors, as JSON."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from everstep.base.visible import visible
from everstep.cli.main import run_command
from everstep.cli.terminal import console, guarded, raw, tell
from everstep.observe.events import format_event

HOSTILE = "a\x1b]0;owned\x07b\x1b[2Jc\x9bd\u202ee\u2066f\x7fg\rh\U000e0041\udc80"
SHOWN = r"a\u001b]0;owned\u0007b\u001b[2Jc\u009bd\u202ee\u2066f\u007fg\u000dh\udb40\udc41\udc80"


def harmless(text: str) -> bool:
    return visible(text) == text


def test_what_a_terminal_obeys_becomes_visible() -> None:
    assert visible(HOSTILE) == SHOWN
    assert harmless(SHOWN)
    assert json.loads(f'"{visible(HOSTILE)}"') == HOSTILE
    usual = "step 3\tloss 0.5\n  worker – größer, 中文, 👩\u200d🔬\n"
    assert visible(usual) == usual


def test_prints_are_guarded_while_a_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with guarded():
        print(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        sys.stdout.writelines([HOSTILE, "\n"])
        print("\x1b[1m", end="", file=raw(sys.stdout))
        with guarded():
            print(HOSTILE)
    assert sys.stdout is before
    told = capsys.readouterr()
    assert told.out == f"{SHOWN}\n{SHOWN}\n\x1b[1m{SHOWN}\n"
    assert told.err == f"{SHOWN}\n"


def test_what_cannot_be_encoded_is_printed_all_the_same() -> None:
    before, sys.stdout = sys.stdout, io.TextIOWrapper(io.BytesIO(), "ascii")
    try:
        with guarded():
            print("größer \x1b")
            sys.stdout.flush()
            assert sys.stdout.buffer.getvalue() == b"gr\\xf6\\xdfer \\u001b\n"  # type: ignore[attr-defined]
    finally:
        sys.stdout = before


def test_what_is_drawn_is_guarded(capsys: pytest.CaptureFixture[str]) -> None:
    with guarded():
        table = Table()
        table.add_column(HOSTILE)
        table.add_row("[/nothing][link=http://x]" + HOSTILE)
        drawn = console(width=200)
        drawn.print(table)
        drawn.print(Text(HOSTILE), HOSTILE)
    told = capsys.readouterr().out
    assert harmless(told) and "[/nothing][link=http://x]a" in told and r"\u001b]0;owned" in told


def hostile_run(folder: Path) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "logs").mkdir()
    job = {"task": HOSTILE[:-1], "argv": [], "config": {}, "created_unix_ns": 1}
    (folder / "job.json").write_text(json.dumps(job))
    said = {"reason": HOSTILE[:-1], "state": "[/x]", "host": HOSTILE[:-1], "worker_id": 0, "incarnation": 0}
    kinds = ("job_started", "worker_joined", "worker_evicted", "warning", "job_failed")
    (folder / "events.jsonl").write_bytes(b"".join(format_event(kind, 1, said) for kind in kinds))
    line = json.dumps({"time_unix_ns": 1, "message": HOSTILE[:-1], "source": HOSTILE[:-1], "exception": HOSTILE[:-1]})
    (folder / "logs" / "worker-0.jsonl").write_text(line + "\n")
    (folder / "logs" / f"{'x'}.log").write_text(HOSTILE[:-1] + "\n")
    return folder


@pytest.mark.parametrize("words", ["status", "logs", "top --once", "ledger", "status --json", "logs --json", "report"])
def test_no_command_passes_on_what_a_file_says(tmp_path: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *options = words.split()
    run_command([name, str(hostile_run(tmp_path / "run")), *options])
    told = capsys.readouterr()
    assert harmless(told.out + told.err)
    for line in told.out.splitlines() if "--json" in options else ():
        json.loads(line)
    if name == "report":
        page = (tmp_path / "run" / "report.html").read_text()
        assert harmless(page)


def test_an_error_is_guarded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["status", str(tmp_path / HOSTILE)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and harmless(told)


def test_lines_for_a_reader_that_has_gone_are_dropped() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as stream:
        for _ in range(3):
            tell("x" * 99, stream)
