"""Recording steps: from which on, how many, what is told, and that nothing of it reaches the training."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.base.config import load_config
from everstep.protocol import messages as wire
from everstep.report.traces import read_trace
from everstep.train.profiling import WorkerProfiling
from everstep.train.worker_link import LoneLink


class Told(list[wire.Profiled]):
    """What was told, by any thread."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def take(self, message: Any) -> None:
        self.append(message)
        self.came.set()


def made(run_dir: Path) -> tuple[WorkerProfiling, LoneLink, Told]:
    told, link = Told(), LoneLink(load_config([]), run_dir)
    return WorkerProfiling(link, torch.device("cpu"), told.take), link, told


def train(profiling: WorkerProfiling, link: LoneLink, numbers: range) -> torch.Tensor:
    torch.manual_seed(3)
    total = torch.zeros(4, 4)
    for number in numbers:
        if profiling.wanted is not None:
            profiling.begin_step(number)
        link.row.set(phase="forward")
        total += torch.rand(4, 4) @ torch.rand(4, 4)
        link.row.set(phase="update")
    return total


def test_steps_are_recorded_and_change_nothing(tmp_path: Path) -> None:
    profiling, link, told = made(tmp_path)
    row = link.row
    plain = train(profiling, link, range(1, 9))
    profiling.ask(wire.ProfileNow(name="p", first_step=3, steps=2))
    assert torch.equal(train(profiling, link, range(1, 9)), plain)
    profiling.close()
    assert profiling.wanted is None and link.row is row
    assert [(m.name, m.ok) for m in told] == [("p", True)]
    trace = read_trace(tmp_path / "profiles" / "p" / "worker-0.json.gz")
    assert [number for _, number in trace.said["steps"]] == [3, 4]
    assert [name for _, name in trace.said["phases"]] == ["forward", "update"] * 2
    products = [e for e in trace.events if e.get("name") == "aten::mm"]
    assert len(products) == 2
    begin_ns, end_ns = trace.window_ns
    assert all(begin_ns <= trace.base_ns + 1000 * e["ts"] <= end_ns for e in products), "times since 1970"
    assert [p.name for p in (tmp_path / "profiles" / "p").iterdir()] == ["worker-0.json.gz"]
    profiling.ask(wire.ProfileNow(name="p", first_step=3, steps=2))
    assert len(told) == 2 and profiling.wanted is None, "told again, not done again"


def test_the_end_of_the_job_ends_it(tmp_path: Path) -> None:
    profiling, link, told = made(tmp_path)
    profiling.ask(wire.ProfileNow(name="late", first_step=100, steps=1))
    profiling.ask(wire.ProfileNow(name="other", first_step=1, steps=1))
    train(profiling, link, range(1, 3))
    profiling.end()
    assert [(m.name, m.ok) for m in told] == [("other", False), ("late", False)]
    assert "records another profile (late)" in told[0].reason and "over before step 100" in told[1].reason
    profiling.ask(wire.ProfileNow(name="short", first_step=1, steps=50, memory=True, stacks=True))
    train(profiling, link, range(3, 5))
    profiling.end()
    assert told[-1] == wire.Profiled(worker_id=0, incarnation=0, name="short", ok=True)
    trace = read_trace(tmp_path / "profiles" / "short" / "worker-0.json.gz")
    assert [number for _, number in trace.said["steps"]] == [3, 4]


def test_what_goes_wrong_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiling, link, told = made(tmp_path)
    (tmp_path / "profiles").write_text("a file where the folder should be")
    profiling.ask(wire.ProfileNow(name="p", first_step=1, steps=1))
    train(profiling, link, range(1, 3))
    (tmp_path / "profiles").unlink()
    profiling.ask(wire.ProfileNow(name="q", first_step=1, steps=1))
    train(profiling, link, range(1, 2))
    (tmp_path / "profiles" / "q").rmdir()
    train(profiling, link, range(2, 3))
    profiling.close()
    assert [(m.name, m.ok) for m in told] == [("p", False), ("q", False)]
    assert "does not start" in told[0].reason and "cannot be written" in told[1].reason
    assert profiling.wanted is None
