"""Values that loader processes have as they were when these began: what counts as a change of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

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
