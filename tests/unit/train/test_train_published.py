"""What the leader reports is told once, even if it dies at that moment."""

from __future__ import annotations

from pathlib import Path

from everstep.base.plan import WorkerKey
from everstep.observe.events import read_events
from everstep.train.published import Publisher


def told(run_dir: Path) -> list[int]:
    return [event["step"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "evaluated"]


def pair(run_dir: Path) -> tuple[Publisher, Publisher]:
    """A leader that has told step 2, and the worker that will lead after it."""
    first, second = Publisher(run_dir, WorkerKey(0, 0), 1), Publisher(run_dir, WorkerKey(1, 0), 1)
    first.release(1, True)
    second.release(1, False)
    first.report("evaluated", 2, True, {"metrics": {}})
    second.report("evaluated", 2, False, {"metrics": {}})
    return first, second


def test_the_leader_alone_tells(tmp_path: Path) -> None:
    pair(tmp_path)
    assert told(tmp_path) == [2]


def test_the_next_leader_tells_what_the_dead_one_could_not(tmp_path: Path) -> None:
    _, second = pair(tmp_path)
    second.report("evaluated", 4, False, {"metrics": {}})
    second.release(5, True)
    assert told(tmp_path) == [2, 4]


def test_it_does_not_repeat_what_was_told(tmp_path: Path) -> None:
    first, second = pair(tmp_path)
    first.report("evaluated", 4, True, {"metrics": {}})
    second.report("evaluated", 4, True, {"metrics": {}})  # it became the leader within the evaluation
    second.release(5, True)
    second.report("evaluated", 6, True, {"metrics": {}})
    assert told(tmp_path) == [2, 4, 6]
