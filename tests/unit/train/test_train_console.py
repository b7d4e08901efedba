"""What a script prints reaches the user once: from the leader, by whole lines."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from everstep.train.console import OUTPUT_FILE, LeaderConsole, unstamped


class Lead:
    """Whether this worker leads, as a test wants it."""

    now: bool | None = None


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def shown(run_dir: Path) -> str:
    path = run_dir / OUTPUT_FILE
    kept = [unstamped(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    assert all(0 < time_ns <= time.time_ns() for time_ns, _ in kept)
    return "".join(f"{line}\n" for _, line in kept)


def test_what_is_printed_before_there_is_a_plan_waits(run_dir: Path) -> None:
    log, lead = io.StringIO(), Lead()
    console = LeaderConsole(log, run_dir, lambda: lead.now)
    print("early", file=console)
    assert (shown(run_dir), log.getvalue()) == ("", "early\n")
    lead.now = True
    print("step 1", file=console)
    assert shown(run_dir) == "early\nstep 1\n"


def test_only_the_leader_is_shown_and_by_whole_lines(run_dir: Path) -> None:
    log, lead = io.StringIO(), Lead()
    lead.now = False
    console = LeaderConsole(log, run_dir, lambda: lead.now)
    print("not me", file=console)
    lead.now = True
    print("half", end="", file=console)
    assert shown(run_dir) == ""
    print(" whole", file=console)
    print("no end", end="", file=console)
    console.finish()
    assert shown(run_dir) == "half whole\nno end\n"
    assert log.getvalue() == "not me\nhalf whole\nno end"


def test_a_later_life_does_not_repeat_the_beginning(run_dir: Path) -> None:
    lead = Lead()
    console = LeaderConsole(io.StringIO(), run_dir, lambda: lead.now, first=False)
    print("early", file=console)
    lead.now = True
    print("step 7", file=console)
    assert shown(run_dir) == "step 7\n"


def test_a_full_disk_does_not_stop_the_script(tmp_path: Path) -> None:
    log = io.StringIO()
    print("on", file=LeaderConsole(log, tmp_path / "nowhere", lambda: True))
    assert log.getvalue() == "on\n"


def test_lines_wait_for_a_full_disk(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, log = run_dir / "logs", io.StringIO()
    console = LeaderConsole(log, run_dir, lambda: True)
    folder.rmdir()
    print("one", file=console)
    print("two", file=console)
    folder.mkdir()
    print("three", file=console)
    assert shown(run_dir) == "one\ntwo\nthree\n"
    monkeypatch.setattr("everstep.train.console.MOST_UNSHOWN_BYTES", 30)
    (run_dir / OUTPUT_FILE).unlink()
    folder.rmdir()
    for k in range(4):
        print(f"line {k}", file=console)
    folder.mkdir()
    console.finish()
    assert shown(run_dir) == "line 0\neverstep: 3 lines are missing here: the disk was full\n"
    folder_gone = LeaderConsole(log, run_dir / "nowhere", lambda: True)
    print("never", file=folder_gone)
    folder_gone.finish()
    assert "everstep: 1 lines are here and not in output.log" in log.getvalue()
