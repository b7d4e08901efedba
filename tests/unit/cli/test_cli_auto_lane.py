"""`micro_batch: auto`: sizes of lanes, what it does not go with, memory that is too little."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everstep.base.config import load_config
from everstep.base.errors import ConfigError
from everstep.cli import auto_lane, checkpoints_exchange
from everstep.cli.auto_lane import answer, choose_lane, lane_sizes, largest, take_auto, with_lane
from everstep.cli.job import Request, make_job, write_job
from everstep.cli.task_loading import make_task, parse_task
from everstep.runtime.host.fork_server_client import ForkEnded
from everstep.train.trial_lane import lane_ends

TASK = "mlp-digits"


class Server:
    """Answers in this process. dies: sizes with which the fork ends instead."""

    def __init__(self, dies: tuple[int, ...] = ()) -> None:
        self.dies = dies
        self.tried: list[int] = []

    def call(self, entry: str, question: dict[str, Any]) -> Any:
        if "try" in question:
            self.tried.append(question["try"])
            if question["try"] in self.dies:
                raise ForkEnded("killed by SIGKILL")
        if entry.endswith("auto_lane:answer"):
            return answer(question)
        return {"probe": {"defaults": {"lanes": 8, "micro_batch": 4, "steps": 4}}}


def asked(*layers: dict[str, Any], batch_size: int | None = None) -> Request:
    return Request(tuple(("here", layer) for layer in layers), batch_size)


def test_the_last_layer_decides() -> None:
    assert take_auto([("a", {"micro_batch": "auto", "lanes": 4})]) == ([("a", {"lanes": 4})], True)
    assert take_auto([("a", {"micro_batch": 4}), ("b", {"micro_batch": " AUTO"})]) == ([("a", {}), ("b", {})], True)
    later = [("a", {"micro_batch": "auto"}), ("b", {"micro_batch": 4})]
    assert take_auto(later) == (later, False) and take_auto([]) == ([], False)


def test_lanes_divide_the_batch_and_leave_each_worker_one() -> None:
    assert lane_sizes(32, 2) == [1, 2, 4, 8, 16] and lane_sizes(20, 3) == [1, 2, 4, 5] and lane_sizes(7, 7) == [1]
    assert largest([1, 2, 4], lambda size: size < 4) == 2 and largest([1, 2], lambda size: False) is None


def test_the_largest_lane_that_fits_keeps_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose_lane(TASK, asked({"workers": 2}), Server(), None)  # type: ignore[arg-type]
    assert (chosen.micro_batch, chosen.lanes) == (16, 2) and "16 samples per lane, 2 lanes" in chosen.words
    assert with_lane(asked(), chosen).explicit == ("lanes", "micro_batch")
    server = Server(dies=(16, 8))
    chosen = choose_lane(TASK, asked({"workers": 2}, batch_size=48), server, None)  # type: ignore[arg-type]
    assert (chosen.micro_batch, chosen.lanes) == (24, 2) and server.tried == [24]
    server = Server(dies=(32, 16))
    assert choose_lane(TASK, asked(), server, None).micro_batch == 8  # type: ignore[arg-type]
    assert server.tried == [32, 16, 8]
    monkeypatch.setattr(auto_lane, "available_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"micro_batch: auto: no lane of a batch of 32 fits: the smallest, of 1,"):
        choose_lane(TASK, asked(), Server(), None)  # type: ignore[arg-type]


def test_a_lane_is_taken_as_soon_as_there_is_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = lane_sizes(1024, 1)
    question = {"task": TASK, "request": {"layers": [], "batch_size": None}, "batch": 1024, "sizes": sizes}
    needs = answer(question)["bytes"]
    for size, least in zip(sizes[-3:], needs[-3:], strict=True):
        monkeypatch.setattr(auto_lane, "available_bytes", lambda least=least: least / auto_lane.ROOM + 2)
        assert choose_lane(TASK, asked(batch_size=1024), Server(), None).micro_batch == size  # type: ignore[arg-type]


def test_a_job_that_goes_on_keeps_its_lanes(tmp_path: Path) -> None:
    config = {"lanes": 4, "micro_batch": 8, "steps": 4}
    write_job(tmp_path, make_job(TASK, (), load_config([("here", config)]), None, asked()))
    chosen = choose_lane(TASK, asked(), Server(), tmp_path)  # type: ignore[arg-type]
    assert (chosen.micro_batch, chosen.lanes) == (8, 4) and "as the job in" in chosen.words
    other = choose_lane(TASK, asked(batch_size=64), Server(), tmp_path)  # type: ignore[arg-type]
    assert other.micro_batch == 64, "a job with another batch is another job, and is refused as such"


def test_a_job_that_starts_from_a_checkpoint_takes_its_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    numerics: dict[str, Any] = {"lanes": 4, "micro_batch": 8}
    found = SimpleNamespace(name="/there/step-0000000003", manifest=SimpleNamespace(identity={"numerics": numerics}))
    monkeypatch.setattr(checkpoints_exchange, "choose", lambda place: found)
    chosen = choose_lane(TASK, asked({"resume_from": "/there"}), Server(), None)  # type: ignore[arg-type]
    assert (chosen.micro_batch, chosen.lanes) == (8, 4) and "as the checkpoint /there/step-0000000003" in chosen.words
    for other in ({"lanes": 3}, {"lanes": "4"}, {"micro_batch": None}):
        found.manifest.identity["numerics"] = numerics | other
        assert choose_lane(TASK, asked({"resume_from": "/there"}), Server(), None).lanes == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ({"lanes": 4}, "lanes=4: it chooses the number of lanes"),
        ({"accumulate": 2}, "accumulate=2"),
        ({"stages": 2, "workers": 2}, "stages=2: it looks at one lane of the whole model"),
        ({"cell.fsdp": 2}, "cell.fsdp=2"),
        ({"batch": "per_worker"}, "batch=per_worker: it keeps the global batch"),
        ({"hosts.min": 2, "network.address": "10.0.0.1"}, "hosts.min=2"),
    ],
)
def test_what_it_does_not_go_with(layer: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="micro_batch: auto does not go with") as error:
        choose_lane(TASK, asked(layer), Server(), None)  # type: ignore[arg-type]
    assert said in str(error.value) and "give a number" in str(error.value)


def test_fewer_samples_than_workers() -> None:
    with pytest.raises(ConfigError, match="--batch-size: expected at least one sample for each of 4 workers, got 3"):
        choose_lane(TASK, asked({"workers": 4}, batch_size=3), Server(), None)  # type: ignore[arg-type]


def test_a_lane_that_does_not_get_its_memory_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(parse_task(TASK))
    task.config = load_config([("here", {"steps": 1})])
    assert lane_ends(task, 4)
    for error, ends in (
        (MemoryError(), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), False),
        (RuntimeError("the shapes differ"), True),
        (ValueError("no"), True),
    ):

        def fails(*_: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(task, "loss", fails)
        assert lane_ends(task, 4) is ends, error
