"""The folder of an agent in the directory in which its host leads: what is told there, and a disk that is full."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from fake_coordinator import FakeCoordinator

from everstep.base.config import Config, to_dict
from everstep.base.errors import ConfigError
from everstep.observe.events import read_events
from everstep.protocol import messages as m
from everstep.runtime.files.agent_files import AgentFiles, PeerWire, bring_left
from everstep.runtime.files.host_directory import OWN_FOLDER, SOURCE_FILE, leave_word
from everstep.runtime.files.run_lock import run_lock
from everstep.runtime.host.agent_link import AgentLink, Pulses, Secrets
from everstep.runtime.host.board import Board
from everstep.runtime.link.address import COORDINATOR_FILE, address_of, announce
from everstep.runtime.link.context import Joining
from everstep.runtime.link.handshake import PEER, role_token

TOKEN, WORD, LOCAL = b"0123456789abcdef", "ab" * 16, "127.0.0.1"
SOURCE = "0123456789abcdef"
JOB = {"created_unix_ns": 5}


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """Directory of a job that was led there, with the folder of that host's agent."""
    top = tmp_path / "job"
    (top / OWN_FOLDER / "ledger").mkdir(parents=True)
    (top / OWN_FOLDER / SOURCE_FILE).write_text(SOURCE + "\n")
    leave_word(top, None, WORD)
    for folder in (top, top / OWN_FOLDER):
        (folder / "job.json").write_text(json.dumps(JOB))
    return top


def tell(top: Path, *steps: int) -> None:
    """Workers commit these steps."""
    for step in steps:
        with (top / OWN_FOLDER / "events.jsonl").open("a") as events:
            events.write(f'{{"time_unix_ns":{step},"kind":"step_committed","step":{step}}}\n')
        with (top / OWN_FOLDER / "ledger" / "worker-0-0.jsonl").open("a") as rows:
            rows.write(f'{{"step":{step}}}\n')


def told(top: Path) -> tuple[list[int], str]:
    """Steps in the job's events, and rows in its ledger."""
    rows = top / "ledger" / f"worker-0-0-{SOURCE}.jsonl"
    return [e["step"] for e in read_events(top / "events.jsonl")], rows.read_text() if rows.exists() else ""


@contextmanager
def agent_in(top: Path) -> Iterator[AgentFiles]:
    """Files of an agent whose head is gone a moment later."""
    head = FakeCoordinator(TOKEN)
    announce(top / COORDINATOR_FILE, address_of(LOCAL, head.port))
    own = {"run_dir": str(top / OWN_FOLDER), "around": str(top), "parent": 1, "own": LOCAL}
    joining = Joining(str(top / COORDINATOR_FILE), "module:entry", [], "here", **own)  # type: ignore[arg-type]
    told = {"task": "t", "argv": [], "coordinator_file": "", "job_pid": 0, "machine": ""}
    facts = m.JobFacts(**told, config=to_dict(Config()), run_dir=str(top), place=WORD, job=JOB)  # type: ignore[arg-type]
    with ExitStack() as held:
        held.callback(head.close)
        pulses = Pulses(Board.create(1), lambda *about: "")
        link = AgentLink(joining, Secrets(TOKEN, None), pulses, list, lambda: 1, lambda message: None)
        held.callback(link.close)
        head.hear(m.AgentHello)
        head.close()
        wire = PeerWire(LOCAL, role_token(TOKEN, PEER), None)
        found = AgentFiles(facts, joining, Config(), wire, link.client)
        held.callback(found.close, done=True)
        yield found


def test_an_agent_that_leaves_without_a_head_brings_rows_as_well_as_events(top: Path) -> None:
    """The job's process looks for rows in its own directory alone, and would say that nobody has them."""
    tell(top, 1, 2, 3)
    with agent_in(top) as files:
        assert not files.finish(0.0), "nobody has answered"
    assert told(top) == ([1, 2, 3], '{"step":1}\n{"step":2}\n{"step":3}\n')


def test_what_was_not_sent_is_brought_when_the_job_goes_on_without_such_a_folder(top: Path) -> None:
    tell(top, 1, 2)
    bring_left(top)
    assert told(top) == ([1, 2], '{"step":1}\n{"step":2}\n')
    tell(top, 3)
    with (top / OWN_FOLDER / "ledger" / "worker-0-0.jsonl").open("a") as rows:
        rows.write('{"ste')  # a host lost its power
    with run_lock(top / OWN_FOLDER):
        bring_left(top)
    assert told(top)[0] == [1, 2], "an agent runs there, and brings it itself"
    for _ in range(2):
        bring_left(top)
    assert told(top) == ([1, 2, 3], '{"step":1}\n{"step":2}\n{"step":3}\n')


def test_nothing_of_another_job_is_brought(top: Path) -> None:
    tell(top, 1)
    (top / OWN_FOLDER / "job.json").write_text('{"created_unix_ns": 6}')
    bring_left(top)
    (top / OWN_FOLDER / "job.json").write_text("[]")
    bring_left(top)
    (top / OWN_FOLDER / "job.json").unlink()
    bring_left(top)
    assert told(top) == ([], "")


def test_an_agent_that_is_started_again_while_the_disk_is_full_goes_on_with_the_facts_that_are_there(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers wait for room, as all do; it would be refused, and the job was ended."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("everstep.runtime.files.host_directory.write_atomically", Mock(side_effect=full))
    with agent_in(top) as files:
        assert files.apart
    (top / OWN_FOLDER / "job.json").unlink()
    with pytest.raises(ConfigError, match="No space left"), agent_in(top):
        pass
