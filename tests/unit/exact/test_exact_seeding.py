"""Seeds: derivation, all generators, units, recomputation."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from everstep.exact.seeding import UnitSeeder, derive, preserve_rng, sample_seed, seed_all

FIXED = 0xB4FB5A8DE61ABA77
"""Seeds may never change between versions: a resumed job would draw other numbers."""


def draw() -> tuple[float, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
        float(torch.randn(())),
    )


def test_derive_is_fixed_and_tells_arguments_apart() -> None:
    assert derive(1, 2, 3) == FIXED
    seen = {derive(a, b) for a in range(50) for b in range(50)} | {derive(a) for a in range(50)} | {derive()}
    assert len(seen) == 2551 and all(0 <= s < 1 << 64 for s in seen)
    assert derive(-1) == derive((1 << 64) - 1)
    assert sample_seed(1, 0, 5) != sample_seed(1, 1, 5) != sample_seed(0, 1, 5)


def test_seed_all_fixes_every_generator() -> None:
    seed_all(1 << 63)
    torch.randn(1), random.gauss(0, 1), np.random.randn()  # leave half-used pairs behind
    seed_all(77)
    first = draw()
    draw()
    torch.randn(1), random.gauss(0, 1), np.random.randn()
    seed_all(77)
    assert draw() == first
    seed_all(78)
    second = draw()
    assert all(a != b for a, b in zip(first, second, strict=True))
    seed_all(77 + (1 << 40))  # torch's CPU generator takes the lower 32 bits only
    assert all(a != b for a, b in zip(first[:4], draw()[:4], strict=True))


def test_preserve_rng() -> None:
    seed_all(5)
    draw()
    with preserve_rng():
        expected = draw()
        seed_all(1)
    assert draw() == expected
    with preserve_rng():
        expected = draw()
    with pytest.raises(ValueError), preserve_rng():
        seed_all(3)
        raise ValueError
    assert draw() == expected


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(4)
        self.drawn.append(noise)
        return x * self.weight * noise


def test_a_units_draws_do_not_depend_on_units_before_it() -> None:
    units = [Noise(), Noise()]
    seeder = UnitSeeder(units, 9)
    seeder.begin_lane(3, 1)
    units[1](units[0](torch.ones(4)))
    seeder.begin_lane(3, 1)
    torch.rand(100)
    units[1](torch.ones(4))
    units[1](torch.ones(4))
    seeder.begin_lane(3, 2)
    units[1](torch.ones(4))
    first, again, second_call, other_lane = units[1].drawn
    assert torch.equal(first, again)
    assert not torch.equal(first, second_call) and not torch.equal(first, other_lane)
    assert not torch.equal(first, units[0].drawn[0])


def test_what_is_drawn_outside_units_depends_on_step_and_lane() -> None:
    seeder, drawn = UnitSeeder([Noise()], 9), []
    for step, lane in ((3, 1), (3, 2), (4, 1), (3, 1)):
        seeder.begin_lane(step, lane)
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[3] and len(set(drawn)) == 3


def test_inactive_outside_lanes_and_after_close() -> None:
    unit = Noise()
    seeder = UnitSeeder([unit], 9)
    for _ in range(2):
        unit(torch.ones(4))
    seeder.begin_lane(1, 0)
    seeder.end_lane()
    unit(torch.ones(4))
    assert not torch.equal(unit.drawn[0], unit.drawn[1])
    seeder.close()
    seeder.begin_lane(1, 0)
    torch.default_generator.manual_seed(1)
    unit(torch.ones(4))
    assert torch.equal(unit.drawn[-1], torch.rand(4, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    ("preserve", "only"),
    # Without restored generators the last call is taken to be repeated first, so only the last may be alone.
    [(True, None), (True, 0), (True, 1), (True, 2), (False, None), (False, 2)],
)
def test_recomputation_draws_what_its_forward_call_drew(preserve: bool, reentrant: bool, only: int | None) -> None:
    """Two units, one of them called three times; all calls are checkpointed, or only one of them."""
    units = [Noise(), Noise()]
    seeder = UnitSeeder(units, 2)
    seeder.begin_lane(1, 0)
    x = torch.ones(4, requires_grad=True)
    calls = [0, 1, 0, 0]
    number = 0
    for which in calls:
        kept = only is not None and (which != 0 or number != only)
        number += which == 0
        if kept:
            x = units[which](x)
        else:
            x = checkpoint(units[which], x, use_reentrant=reentrant, preserve_rng_state=preserve)
    x.sum().backward()
    forward = [units[0].drawn[:3], units[1].drawn[:1]]
    repeated = [units[0].drawn[3:], units[1].drawn[1:]]
    expected = [forward[0][::-1], forward[1]] if only is None else [[forward[0][only]], []]
    for mine, wanted in zip(repeated, expected, strict=True):
        assert len(mine) == len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True))
