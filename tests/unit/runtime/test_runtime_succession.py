"""Whether this process's coordinator decides, where another host's may take its place."""

from __future__ import annotations

from pathlib import Path

from everstep.runtime.files.host_directory import leave_word
from everstep.runtime.lead.succession import Lead
from everstep.runtime.link.address import COORDINATOR_FILE, announce

WORD, OTHER = "ab" * 16, "cd" * 16


def says(run_dir: Path, host: str, pid: int) -> None:
    """The directory has the address of this coordinator."""
    announce(run_dir / COORDINATOR_FILE, {"host": host, "port": 7000, "pid": pid})


def test_a_coordinator_that_was_restarted_is_another_one(tmp_path: Path) -> None:
    """Also if nobody has written the address anew yet: it is that of the one before."""
    told: list[str] = []
    lead = Lead(tmp_path, leased=True, address="10.0.0.1", tell=told.append)
    says(tmp_path, "10.0.0.1", 41)
    lead.look(41)
    assert lead.here and told == ["coordinator_leads"]
    lead.look(42)
    assert not lead.here and told[1:] == ["coordinator_follows"]
    says(tmp_path, "10.0.0.1", 42)
    lead.look(42)
    assert lead.here and told[2:] == ["coordinator_leads"]
    says(tmp_path, "10.0.0.2", 42)
    lead.look(42)
    assert not lead.here, "the same number on another host"


def test_it_hears_from_another_one_that_it_is_not_the_one(tmp_path: Path) -> None:
    """Where etcd does not answer, nobody else says so."""
    told: list[str] = []
    lead = Lead(tmp_path, leased=True, address="10.0.0.1", tell=told.append)
    lead.heard(OTHER)
    assert not lead.elsewhere, "it has never led here"
    leave_word(tmp_path, None, WORD)
    for place, elsewhere in ((WORD, False), ("", False), (OTHER, True), (OTHER, True)):
        lead.heard(place)
        assert lead.elsewhere == elsewhere
    assert told == ["led_elsewhere"]
    without = Lead(tmp_path, leased=False, address="10.0.0.1", tell=told.append)
    without.heard(OTHER)
    assert not without.elsewhere


def test_without_a_lease_it_always_decides(tmp_path: Path) -> None:
    told: list[str] = []
    lead = Lead(tmp_path, leased=False, address="10.0.0.1", tell=told.append)
    says(tmp_path, "10.0.0.2", 41)
    lead.look(42)
    assert lead.here and not told
