"""What the command of a host that has led says and does when its job's process is over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.base.cause import Cause, Why
from everstep.base.config import load_config
from everstep.base.exit_codes import ANOTHER_LEADS
from everstep.cli import leading
from everstep.cli.job import JobFile, write_job
from everstep.observe.events import read_events
from everstep.runtime import job as job_module
from everstep.runtime.job_end import Outcome
from everstep.runtime.lead.succession import Succession
from everstep.runtime.link.address import EVENTS_FILE
from everstep.runtime.start import Start

CONFIG = load_config([("test", {"control.etcd": "etcd://127.0.0.1:5/j", "steps": 3})])
COMPLETED = Why(Cause.COMPLETED, "said so")


class FakeJob:
    """A job's process on the host on which the job has begun."""

    outcome = Outcome(0, "completed", COMPLETED)

    def __init__(self, begun: Start) -> None:
        self.run_dir, self.reached = begun.folder, 3
        self.left_agent = self.signalled = 0
        self.deposed = self.outcome.elsewhere or self.outcome.exit_code == ANOTHER_LEADS

    def run(self, on_event: Callable[[dict[str, Any]], None]) -> Outcome:
        return self.outcome

    def interrupt(self, number: int) -> None:
        self.signalled = number


def led(run_dir: Path, monkeypatch: pytest.MonkeyPatch, outcome: Outcome) -> int:
    monkeypatch.setattr(FakeJob, "outcome", outcome)
    monkeypatch.setattr(job_module, "Job", FakeJob)
    job = JobFile("task.py:Task", (), CONFIG)
    write_job(run_dir, job)
    begun = Start(CONFIG, run_dir=run_dir, early=object(), succession=Succession(owner="o"))  # type: ignore[arg-type]
    return leading.see_through(begun, job)


@pytest.mark.parametrize("elsewhere", (False, True))
def test_an_end_on_another_host_is_not_told_as_that_of_this_directory(
    elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows and weights that are not here are there."""
    code = led(tmp_path, monkeypatch, Outcome(0, "completed", COMPLETED, elsewhere=elsewhere))
    said, complained = capsys.readouterr()
    assert ("the job has ended on another host" in said) == elsewhere
    assert code == int(not elsewhere) and ("the ledger lacks" in complained) == (not elsewhere)
    kinds = [event["kind"] for event in read_events(tmp_path / EVENTS_FILE)]
    assert ("job_completed" in kinds) == (not elsewhere)
