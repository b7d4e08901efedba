"""The loop over a job's steps, with a session that says what it is told to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from everstep.base.errors import NonFinite
from everstep.protocol.driver.operations import JoinAsked, StepAsked
from everstep.train import session as whole
from everstep.train.run import Run


class Session:
    """A split job's, of so many steps, in a worker that comes when the step is done with which the job ends."""

    def __init__(self, at: int, total: int) -> None:
        self.asked: list[Any] = []
        self.closed = False
        link = SimpleNamespace(
            finished=lambda step: False,
            turn=lambda view, stopped: None,
            stop_words=lambda error, number: None,
            row=SimpleNamespace(set=lambda **fields: None),
            at_exit=lambda act: None,
        )
        order = SimpleNamespace(total_steps=total)
        self.view: Any = SimpleNamespace(
            stages=SimpleNamespace(split=True),
            link=link,
            step=at,
            order=order,
            is_main=True,
            config=SimpleNamespace(seed=0),
        )
        self.executor: Any = SimpleNamespace(ask=self.ask, arrived=lambda: False, jumped=False)
        self.membership = SimpleNamespace(connect=lambda: None)
        self.profiling = SimpleNamespace(wanted=None)
        self.updates = SimpleNamespace(begin_step=lambda: None)
        self.loop = SimpleNamespace(enter=lambda step: None)

    def ask(self, event: Any) -> None:
        self.asked.append(event)
        raise NonFinite("its loss is not finite")

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("total", [11, 20], ids=["it is the last", "others would follow"])
def test_a_joiner_hears_in_the_loop_that_the_job_ends_with_the_step_that_it_carried_out(total: int) -> None:
    """Outside of its loop a worker would be gone at once, and with it the checkpoint that is to be taken first."""
    session: Any = Session(11, total)
    steps = iter(Run(session, session.view))
    step = next(steps)
    assert session.asked == [JoinAsked()] and not session.closed
    with pytest.raises(NonFinite):
        step.run_split()
    assert session.asked == [JoinAsked(), StepAsked(12)] and not session.closed


def test_all_parts_of_a_session_are_closed_though_one_of_them_raises() -> None:
    closed: list[str] = []

    def part(name: str) -> Any:
        return SimpleNamespace(close=lambda: closed.append(name))

    def raises() -> None:
        raise RuntimeError("a snapshot failed")

    replicas = {0: SimpleNamespace(lanes=SimpleNamespace(seeder=part("seeder")))}
    session: Any = SimpleNamespace(
        view=SimpleNamespace(publisher=part("publisher"), transport=part("transport"), stages=replicas),
        transfers=SimpleNamespace(close_feeds=lambda: closed.append("feeds")),
        **{name: part(name) for name in ("lanes", "profiling", "saver", "_cell")},
        _keeper=SimpleNamespace(close=raises),
    )
    with pytest.raises(RuntimeError, match="a snapshot failed"):
        whole.Session.close(session)
    assert closed == ["publisher", "feeds", "lanes", "profiling", "saver", "transport", "seeder", "_cell"]
