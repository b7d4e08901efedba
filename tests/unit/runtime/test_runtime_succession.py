"""Whether this process's coordinator decides, where another host's may take its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep.runtime.files.host_directory import leave_word
from everstep.runtime.lead.journal import Journal
from everstep.runtime.lead.journal_and_lease import FileStore
from everstep.runtime.lead.succession import Lead, Succession
from everstep.runtime.link.address import COORDINATOR_FILE, announce

WORD, OTHER = "ab" * 16, "cd" * 16


def says(run_dir: Path, host: str, pid: int) -> None:
    """The directory has the address of this coordinator."""
    announce(run_dir / COORDINATOR_FILE, {"host": host, "port": 7000, "pid": pid})


def test_a_coordinator_that_was_restarted_is_another_one(tmp_path: Path) -> None:
    """Also if nobody has written the address anew yet: it is that of the one before, and no other host leads."""
    told: list[str] = []
    lead = Lead(tmp_path, Succession(owner="o"), "10.0.0.1", told.append)
    says(tmp_path, "10.0.0.1", 41)
    lead.look(41)
    assert lead.here and told == ["coordinator_leads"]
    lead.look(42)
    assert not lead.here and not lead.by_another
    says(tmp_path, "10.0.0.1", 42)
    lead.look(42)
    assert lead.here and told == ["coordinator_leads"]
    says(tmp_path, "10.0.0.2", 42)
    lead.look(42)
    assert not lead.here and lead.by_another, "the same number on another host"
    assert told[1:] == ["coordinator_follows"]


def test_who_leads_is_known_from_the_start(tmp_path: Path) -> None:
    """Nobody else where the job begins; and where one stands by that has not heard of another one, another one."""
    for guest in (False, True):
        lead = Lead(tmp_path, Succession(guest, "o"), "10.0.0.1", lambda kind: None)
        lead.look(41)
        assert not lead.here and lead.by_another == guest


def test_it_hears_from_another_one_that_it_is_not_the_one(tmp_path: Path) -> None:
    """Where etcd does not answer, nobody else says so."""
    told: list[str] = []
    lead = Lead(tmp_path, Succession(owner="o"), "10.0.0.1", told.append)
    lead.heard(OTHER)
    assert not lead.elsewhere, "it has never led here"
    leave_word(tmp_path, None, WORD)
    for place, elsewhere in ((WORD, False), ("", False), (OTHER, True), (OTHER, True)):
        lead.heard(place)
        assert lead.elsewhere == elsewhere
    assert told == ["led_elsewhere"]
    without = Lead(tmp_path, Succession(), "10.0.0.1", told.append)
    without.heard(OTHER)
    assert not without.elsewhere


def test_without_a_lease_it_always_decides(tmp_path: Path) -> None:
    told: list[str] = []
    lead = Lead(tmp_path, Succession(), "10.0.0.1", told.append)
    says(tmp_path, "10.0.0.2", 41)
    lead.look(42)
    assert lead.here and not told


def test_who_takes_a_job_over_finds_that_in_the_journal_and_so_does_the_next_life(tmp_path: Path) -> None:
    """It goes on with a job that was to be stopped (`Saving.replay_stop`)."""
    events: Any = None
    stop = {"kind": "stop", "cause": "requested", "reason": "stopped", "exit_code": 130, "grace_ns": 1}
    Journal(tmp_path / "journal").append(stop)
    term = {"kind": "term", "term": 1}
    for anew in (True, False):
        store = FileStore(Journal(tmp_path / "journal"), events, anew)
        assert store.fence() == 1 and store.entries == [stop, term]
