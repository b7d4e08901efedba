"""Values that loader processes have as they were when these began: what counts as a change of them."""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from everstep.data.kept_values import kept_values

images = torch.zeros(2)
log = logging.getLogger("data")


class Unruly(dict[str, int]):
    """A dict that cannot be gone through."""

    def items(self) -> Any:
        raise RuntimeError

    def __iter__(self) -> Iterator[str]:
        raise KeyError


class Data:
    """Reads an attribute that has the name of a global, and keeps a model, a logger, and an odd container."""

    def __init__(self) -> None:
        self.images, self.level = torch.ones(2), 1.0
        self.model, self.odd = nn.Linear(2, 2), Unruly(a=1)

    def __getitem__(self, index: int) -> Any:
        log.debug("sample %d", index)
        return self.images[index] * self.level


def collate(batch: Any) -> Any:
    return batch


def test_what_the_loop_does_besides_is_no_change() -> None:
    global images
    data = Data()
    before = kept_values(data, collate)
    images = torch.zeros(2)
    with torch.no_grad():
        data.model.weight.add_(1)
    data.model.eval()
    log.debug("something")
    assert kept_values(data, collate) == before


def test_what_is_set_to_another_value_is() -> None:
    data = Data()
    before = kept_values(data, collate)
    data.transform = None  # type: ignore[attr-defined]
    after = kept_values(data, collate)
    assert after != before and "dataset.transform" in after
    data.level = 2.0
    assert kept_values(data, collate) != after
    after = kept_values(data, collate)
    data.images.add_(1)
    assert kept_values(data, collate) != after


class Tables:
    """Keeps more than a few values, in every kind of table."""

    def __init__(self) -> None:
        self.scale, self.columns = np.ones(1000), np.asfortranarray(np.ones((40, 50)))
        self.seen = torch.from_numpy(self.scale.copy())
        self.view: Any = np.ones(1000)[::2]
        self.view.flags.writeable = False
        self.weights, self.names = [1.0] * 500, {f"k{k}": k for k in range(500)}
        self.last, self.raw, self.numbers = deque(range(500)), bytearray(5000), array("d", [1.0] * 500)
        self.things = np.array([None] * 500, dtype=object)
        self.huge = np.ones((1 << 12, 1 << 9))
        self.long = list(range(1 << 15))


WRITES: dict[str, Callable[[Tables], object]] = {
    "array": lambda data: data.scale.__setitem__(700, 0.5),
    "array by columns": lambda data: data.columns.__setitem__((30, 40), 0.5),
    "array that a tensor views": lambda data: data.seen.numpy().__setitem__(700, 0.5),
    "what a read-only array views": lambda data: data.view.base.__setitem__(700, 0.5),
    "list": lambda data: data.weights.__setitem__(400, 0.5),
    "dict": lambda data: data.names.__setitem__("k400", 7),
    "deque": lambda data: data.last.rotate(1),
    "bytes": lambda data: data.raw.__setitem__(4000, 1),
    "numbers": lambda data: data.numbers.__setitem__(400, 0.5),
    "objects": lambda data: data.things.__setitem__(400, "a"),
    "all of a huge array": lambda data: np.multiply(data.huge, 0.5, out=data.huge),
    "all of a long list": lambda data: data.long.reverse(),
}


@pytest.mark.parametrize("kind", WRITES)
def test_what_is_written_into_a_table_is_seen(kind: str) -> None:
    data = Tables()
    before = kept_values(data, collate)
    assert kept_values(data, collate) == before
    WRITES[kind](data)
    assert kept_values(data, collate) != before


def test_a_sparse_tensor_is_looked_at_from_outside() -> None:
    data, sparse = Data(), torch.ones(2, 2).to_sparse()
    data.images = sparse
    before = kept_values(data, collate)
    assert kept_values(data, collate) == before
    sparse.mul_(2)
    assert kept_values(data, collate) != before


def test_what_loader_processes_may_fill_themselves_starts_none_again(tmp_path: Path) -> None:
    data = Data()
    data.table = np.memmap(tmp_path / "table", np.float32, "w+", shape=(4096,))
    data.cache = torch.zeros(4096).share_memory_()
    before = kept_values(data, collate)
    data.table[:] = 1
    data.cache.numpy()[:] = 1
    assert kept_values(data, collate) == before
    data.cache.add_(1)
    assert kept_values(data, collate) != before, "the loop's own writes count"


def test_a_tensor_that_was_looked_at_may_still_be_resized() -> None:
    data = Data()
    data.order = torch.arange(8)
    kept_values(data, collate)
    data.order.resize_(16)
