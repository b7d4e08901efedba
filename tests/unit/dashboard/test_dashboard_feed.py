"""The threads behind a dashboard: a run in trouble is in no other one's way, and what is old is not shown as new."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from everstep.dashboard import catalog as catalog_module
from everstep.dashboard import feed as feed_module
from everstep.dashboard.catalog import Catalog
from everstep.dashboard.feed import Feeds, RunFeed
from everstep.report.notes import read_notes
from everstep.runtime import commands
from told_events import trained, write_events

LIMIT_S = 60.0


@pytest.fixture
def two_runs(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in "ab"]
    for run_dir in found:
        run_dir.mkdir()
        write_events(run_dir, trained())
    return found


def test_an_old_answer_is_none(two_runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFeed(two_runs[0])
    run.status = {"state": "running"}
    assert run.status == {"state": "running"}
    monkeypatch.setattr(feed_module, "_STALE_S", -1.0)
    assert run.status is None


def test_the_ledger_of_the_job_before_is_not_shown(two_runs: list[Path]) -> None:
    audits: list[Path] = []

    def audit(run_dir: Path) -> dict[str, Any]:
        audits.append(run_dir)
        return {"clean": len(audits) == 1, "steps": 10, "problems": []}

    run = RunFeed(two_runs[0], audit)
    run.load()
    assert run.check_ledger(automatic=True)["clean"] and run.check_ledger(automatic=True)["clean"] and len(audits) == 1
    write_events(two_runs[0], trained(), earlier_ns=10**9)  # another job, up to the same step
    run.load()
    assert run.ledger == {} and run.check_ledger(automatic=True)["clean"] is False


def test_one_run_that_cannot_be_read_leaves_the_rows_of_others(two_runs: list[Path]) -> None:
    deep = '{"config": ' + '{"a": ' * 700 + "1" + "}" * 701
    for content in (deep, '{"config": {"checkpoint": {"disk": {"path": "\\u0000"}}}}'):
        (two_runs[0] / "job.json").write_text(content)
        catalog = Catalog(two_runs[0].parent)
        while catalog.advance():
            pass
        assert all(row["step"] == 10 and row["said"]["level"] == "bad" for row in catalog.rows.values())


def test_a_run_in_trouble_says_so_in_its_row(two_runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(path: Path) -> Any:
        if path.name == "a":
            raise RuntimeError("broken")
        return read_notes(path)

    monkeypatch.setattr(catalog_module, "read_notes", notes)
    catalog = Catalog(two_runs[0].parent)
    with pytest.raises(RuntimeError):
        catalog.advance()
    assert catalog.rows["a"]["said"] == {"level": "bad", "text": "This run cannot be read: RuntimeError: broken"}
    assert catalog.rows["b"]["step"] == 10 and catalog.rows["a"].keys() == catalog.rows["b"].keys()


def test_a_silent_coordinator_holds_up_no_other(two_runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    over, often, asked = threading.Event(), threading.Event(), []

    def ask(run_dir: Path, *_: Any, **__: Any) -> dict[str, Any]:
        if run_dir.name == "a":
            over.wait(LIMIT_S)
        asked.append(run_dir.name)
        if asked.count("b") == 3:
            often.set()
        return {"state": "running"}

    monkeypatch.setattr(commands, "ask", ask)
    monkeypatch.setattr(feed_module.History, "running", lambda history: True)
    monkeypatch.setattr(feed_module, "_STATUS_S", 0.01)
    feeds = Feeds(two_runs)
    feeds.start()
    try:
        assert often.wait(LIMIT_S) and asked == ["b"] * len(asked)
    finally:
        over.set()
        feeds.stop()


def test_an_error_in_one_run_is_told_once_and_leaves_the_others_alone(
    two_runs: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, often, reads = RunFeed.read, threading.Event(), []

    def fail(run: RunFeed) -> bool:
        if run.run_dir.name == "a":
            raise ValueError("no such thing")
        reads.append(read(run))
        if len(reads) > 3 and run.history.loaded:
            often.set()
        return reads[-1]

    monkeypatch.setattr(RunFeed, "read", fail)
    monkeypatch.setattr(feed_module, "_IDLE_S", 0.01)
    feeds = Feeds(two_runs)
    feeds.start()
    try:
        assert often.wait(LIMIT_S) and not feeds.stopped
    finally:
        feeds.stop()
    said = capsys.readouterr().err
    assert said.count("cannot go on reading") == 1 and str(two_runs[0]) in said


class Dying(Feeds):
    def _read(self) -> None:
        return


def test_a_page_is_not_told_that_all_goes_on_if_a_thread_has_died(two_runs: list[Path]) -> None:
    feeds = Dying(two_runs)
    assert not feeds.stopped
    feeds.start()
    try:
        for thread in [one for one in threading.enumerate() if one.name == "dashboard-files"]:
            thread.join(LIMIT_S)
        assert feeds.stopped
    finally:
        feeds.stop()
