"""Evaluation gives the same numbers for any number of workers, also when one dies in the middle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.base.errors import ConfigError
from everstep.train.evaluation import evaluate


def fn(batch: int) -> dict[str, Any]:
    return {"a": torch.tensor([batch * 0.1, 1.0]), "b": (batch, 2.0)}


def lonely(chunks: int) -> dict[str, float]:
    return evaluate(fn, chunks, lambda i: i, gather=lambda data: {0: data}, members=lambda: (0, (0,)), seed=1)


def test_what_the_dead_left_undone_is_shared_out_again() -> None:
    others: list[bytes] = []

    class Survivor:
        rounds = 0

        def members(self) -> tuple[int, tuple[int, ...]]:
            return (0, (0, 1)) if self.rounds == 0 else (0, (0,))

        def gather(self, data: bytes) -> Mapping[int, bytes]:
            self.rounds += 1
            others.append(data)
            return {0: data}

    survivor = Survivor()
    found = evaluate(fn, 7, lambda i: i, gather=survivor.gather, members=survivor.members, seed=1)
    assert survivor.rounds == 2
    assert found == lonely(7)


def test_sums_are_divided_by_counts() -> None:
    assert lonely(3) == pytest.approx({"a": 0.1, "b": 0.5})


def test_metrics_of_another_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 numbers"):
        evaluate(
            lambda b: {"x": torch.zeros(3)}, 1, lambda i: i, gather=lambda d: {0: d}, members=lambda: (0, (0,)), seed=0
        )


def test_an_evaluation_leaves_each_module_in_its_own_mode() -> None:
    data = [(torch.randn(2), torch.tensor(0)) for _ in range(8)]
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    model[1].eval()
    seen = []

    def count(batch: Any) -> dict[str, Any]:
        seen.append([m.training for m in model])
        return {"n": torch.tensor([1.0, 1.0])}

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = everstep.join(model, optimizer, data, lanes=2, micro_batch=2, steps=2)
    for step in run:
        for x, y in step:
            step.backward(nn.functional.cross_entropy(model(x), y))
        run.evaluate(count, data)
        assert [m.training for m in model] == [True, False, True]
    assert seen == [[False] * 3] * 2
