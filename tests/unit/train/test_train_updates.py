"""What comes before a change of the state, and what a change of members does to a checkpoint in progress."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from everstep.train.updates import Updates


class Recorder:
    """Remembers the names of what was called, in a list that several share."""

    def __init__(self, calls: list[str], name: str) -> None:
        self._calls, self._name = calls, name

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **more: self._calls.append(f"{self._name}.{name}")


def test_a_step_is_passed_on_before_all_who_read_the_state_are_waited_for() -> None:
    calls: list[str] = []
    view: Any = SimpleNamespace(stages={}, me=0)
    parts: list[Any] = [Recorder(calls, name) for name in ("donor", "keeper", "saver", "loop")]
    Updates(view, *parts).before(4, {}, {})
    assert calls == ["donor.feed", "donor.busy_snapshot", "keeper.stand_still", "saver.before_update"]
