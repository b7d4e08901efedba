"""Of which parameters the optimizer's state is divided, and where parameters lie that stay whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim

from everstep.exact.divisible import divided_parameters, divisible, kept_like, whole_spots
from everstep.exact.image import Spot
from everstep.exact.layout import BLOCK_ELEMENTS as BLOCK


def keeping(*states: dict[Any, Any]) -> tuple[optim.Optimizer, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.ones(3, 4)) for _ in states]
    optimizer = optim.SGD(parameters, lr=0.1)
    for parameter, state in zip(parameters, states, strict=True):
        optimizer.state[parameter] = state
    return optimizer, parameters


LIKE = torch.zeros(3, 4)


def test_what_is_kept_for_each_element_is_told_from_what_is_kept_once() -> None:
    once = {"step": torch.tensor(3.0), "eta": 0.5, "name": None, "one": torch.zeros(1)}
    optimizer, (plain, more, none) = keeping({"m": LIKE, **once}, {"m": LIKE, "v": LIKE}, {})
    assert [kept_like(optimizer, p) for p in (plain, more, none)] == [{"m"}, {"m", "v"}, set()]


def test_with_anything_else_the_state_of_a_parameter_is_not_divided() -> None:
    odd: list[Any] = [torch.zeros(3, 1), LIKE.double(), torch.zeros(0), [1.0], {"a": 1}]
    optimizer, parameters = keeping(*({"m": LIKE, "odd": value} for value in odd), {"m": LIKE, "no key": LIKE})
    assert all(kept_like(optimizer, p) is None for p in parameters)
    assert divided_parameters(optimizer, parameters) == []


def test_of_several_kinds_the_one_that_takes_most_is_divided() -> None:
    optimizer, parameters = keeping({"a": LIKE}, {"b": LIKE, "c": LIKE}, {"a": LIKE}, {"a": LIKE}, {})
    found = divided_parameters(optimizer, parameters)
    assert [p is q for p, q in zip(found, (parameters[0], parameters[2], parameters[3]), strict=True)] == [True] * 3


def test_what_is_not_one_range_of_float32_is_not_divided() -> None:
    assert divisible(torch.ones(3, 4)) and not divisible(torch.ones(1)) and not divisible(torch.ones(3, 4).double())
    assert not divisible(torch.ones(3, 4).T)


def places(*sizes: tuple[int, int]) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """(unit's begin, offset) by (unit, elements), in order; and the blocks of the units."""
    spots = {f"p{k}": Spot(unit, 0, k, (size,)) for k, (unit, size) in enumerate(sizes)}
    found, blocks = whole_spots(spots)
    return [(found[name].start, found[name].offset) for name in spots], blocks


def test_one_that_would_cross_the_border_of_a_block_begins_at_one() -> None:
    sizes = [(2, 10), (2, BLOCK - 16), (2, 1), (2, 2 * BLOCK + 1), (2, BLOCK - 32), (5, 7), (5, BLOCK + 1), (5, 20)]
    found, blocks = places(*sizes)
    assert found == [
        *((0, 0), (0, 16), (0, BLOCK), (0, 2 * BLOCK), (0, 4 * BLOCK + 16)),
        *((5 * BLOCK, 5 * BLOCK), (5 * BLOCK, 6 * BLOCK), (5 * BLOCK, 7 * BLOCK + 16)),
    ]
    assert blocks == {2: 5, 5: 3}
    for (_, size), (_, at) in zip(sizes, found, strict=True):
        assert at % BLOCK == 0 or at // BLOCK == (at + size - 1) // BLOCK


def test_a_full_block_is_followed_by_the_next() -> None:
    assert places((0, BLOCK), (0, BLOCK), (1, 3)) == ([(0, 0), (0, BLOCK), (2 * BLOCK, 2 * BLOCK)], {0: 2, 1: 1})
