"""Agents under a foreign launcher: how they end, whatever becomes of them."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.base.config import load_config
from everstep.base.errors import NoHead
from everstep.base.exit_codes import NO_HEAD
from everstep.cli import adoption, agent
from everstep.runtime.host import host_agent
from everstep.runtime.host.host_agent import Left

BEGUN: Any = SimpleNamespace(
    where="10.0.0.1:29400", run_dir=None, task="", host="b", joining=lambda *_, **__: None, room=1
)


@contextmanager
def folder(name: str) -> Any:
    yield name


@pytest.fixture(autouse=True)
def _agents_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "_place", lambda foreign: adoption.LauncherPlace("10.0.0.1", [29400]))
    monkeypatch.setattr(adoption, "_leave_launcher", lambda: None)
    monkeypatch.setattr(adoption, "start_of_agent", lambda *_, **__: BEGUN)
    monkeypatch.setattr(agent, "temporary_folder", folder)
    monkeypatch.setattr(agent, "looking", lambda begun: None)
    monkeypatch.setattr(agent, "wait_for_job", lambda begun, look, patient: SimpleNamespace(own="", token=b""))


def ended() -> int:
    foreign: Any = SimpleNamespace(part="agent", rank=1, local_size=1)
    return adoption._meet(foreign, "train", [], b"x" * 32, load_config([]))


@pytest.mark.parametrize(
    ("left", "code"),
    [
        (Left(0, "the job is over: completed"), 0),
        (Left(1, "the job is over: failed: x"), 0),
        (Left(2, "host b: its code is not the job's"), 0),
        (Left(NO_HEAD, "another job listens at 10.0.0.1:29400 by now"), 0),
        (Left(143, "interrupted by SIGTERM"), 143),
    ],
)
def test_no_end_of_an_agent_takes_the_job_down(
    left: Left, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_agent, "take_part", lambda *_: left)
    assert ended() == code
    assert left.words in capsys.readouterr().err


def test_nor_does_one_that_finds_no_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise NoHead("no head at 10.0.0.1:29400 after 600 s")

    monkeypatch.setattr(agent, "wait_for_job", missing)
    assert ended() == 0
    assert capsys.readouterr().err == "error: no head at 10.0.0.1:29400 after 600 s\n"
