"""Normalised gradients and committed statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from everstep.base.errors import InvariantViolation
from everstep.base.ports import Piece, Reduced
from everstep.exact.gradient import GradientHandOver, clip_factor, gradient_norm
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout, untie


def reduced_of(layout: GradientLayout, flat: torch.Tensor, presence: bytes | None = None) -> Reduced:
    border = layout.numel // 3
    pieces = (Piece(0, border, flat[:border]), Piece(border, layout.numel, flat[border:]))
    return Reduced(1, pieces, presence or bytes([1]) * len(layout.entries), ((0, layout.n_blocks),))


def test_gradients_are_multiplied_once_and_the_kept_one_is_not_touched() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Linear(4, 5))
    layout = GradientLayout.build(model, [model])
    hand_over = GradientHandOver(layout, model)
    for scale in (1 / 3, 0.1, 2.0**-20):
        flat = torch.randn(layout.numel)
        kept = flat.clone()
        hand_over.hand_over(reduced_of(layout, flat), scale)
        assert torch.equal(flat, kept)
        for entry, parameter in zip(layout.entries, model.parameters(), strict=True):
            assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
            expected = entry.view(flat).numpy() * np.float32(scale)
            assert np.array_equal(parameter.grad.numpy(), expected)
    hand_over.clear()
    assert all(p.grad is None for p in model.parameters())


def test_what_was_reduced_in_host_memory_goes_to_the_models_device() -> None:
    """The meta device stands for one with memory of its own: torch refuses to mix it with the host's, too."""
    model = nn.Linear(3, 4, device="meta")
    layout = GradientLayout.build(model, [model])
    GradientHandOver(layout, model).hand_over(reduced_of(layout, torch.randn(layout.numel)), 0.5)
    assert model.weight.grad is not None and model.weight.grad.is_meta


def test_absent_stays_none_and_present_again_later() -> None:
    model = nn.Linear(3, 4)
    layout = GradientLayout.build(model, [model])
    hand_over = GradientHandOver(layout, model)
    flat = torch.randn(layout.numel)
    hand_over.hand_over(reduced_of(layout, flat, bytes([1, 0])), 1.0)
    assert model.weight.grad is not None and model.bias.grad is None
    hand_over.hand_over(reduced_of(layout, flat), 1.0)
    assert model.bias.grad is not None


@pytest.mark.parametrize("rows", [(1, 1, 1), (0, 1, 1), (1, 0, 0), (0, 0, 1), (0, 0, 0)])
def test_places_of_use_are_added_in_unit_order(rows: tuple[int, ...]) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    model[1].weight = model[2].weight = model[0].weight
    untie(model, list(model))
    layout = GradientLayout.build(model, list(model))
    flat = torch.randn(layout.numel) * 1e3
    hand_over = GradientHandOver(layout, model)
    hand_over.hand_over(reduced_of(layout, flat, bytes(rows)), 0.3)
    terms = [e.view(flat) * 0.3 for e, there in zip(layout.entries, rows, strict=True) if there]
    assert model[1].weight.grad is None and model[2].weight.grad is None
    if not terms:
        assert model[0].weight.grad is None
        return
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    assert model[0].weight.grad is not None and torch.equal(model[0].weight.grad, total)


def test_bf16_parameters_get_bf16_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 4).bfloat16(), nn.Linear(4, 2))
    layout = GradientLayout.build(model, [model])
    flat = torch.randn(layout.numel)
    hand_over = GradientHandOver(layout, model)
    hand_over.hand_over(reduced_of(layout, flat, bytes([1, 0, 1, 1])), 0.5)
    weight = model[0].weight
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert torch.equal(weight.grad, (layout.entries[0].view(flat) * 0.5).bfloat16())
    assert model[0].bias.grad is None and model[1].weight.grad.dtype == torch.float32


def test_clipping_is_that_of_torch() -> None:
    model = nn.Linear(50, 40)
    layout = GradientLayout.build(model, [model])
    flat = torch.zeros(layout.numel)
    for entry in layout.entries:
        entry.view(flat).normal_()
    total = float((flat.double() ** 2).sum())
    scale = 1 / 24
    factor = clip_factor(total, scale, 0.5)
    hand_over = GradientHandOver(layout, model)
    hand_over.hand_over(reduced_of(layout, flat), scale)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert math.isclose(float(norm), gradient_norm(total, scale), rel_tol=1e-5)
    expected = [p.grad.clone() for p in model.parameters()]
    hand_over.hand_over(reduced_of(layout, flat), scale * factor)
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, value)
    assert clip_factor(total, scale, None) == 1.0 and clip_factor(total, scale, 1e9) == 1.0
    assert math.isnan(clip_factor(math.nan, scale, 1.0)) and clip_factor(math.inf, scale, 1.0) == 0.0


def test_the_norm_is_in_float64_and_clipping_has_the_epsilon_of_torch() -> None:
    assert gradient_norm(2.0, 1 / 3) == math.sqrt(2.0) * (1 / 3)
    assert clip_factor(1e-12, 1.0, 1e-6) == pytest.approx(0.5)


def test_statistics_are_the_mean_over_the_lanes_that_changed_them() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    layout = GradientLayout.build(model, [model])
    flat = torch.zeros(layout.numel)
    mean = layout.entries[layout.buffers[0]]
    flat[mean.offset : mean.offset + 4] = torch.tensor([3.0, 6.0, 9.0, -0.0])
    flat[mean.offset + 4] = 3.0
    before = model[0].running_var.clone()
    GradientHandOver(layout, model).commit_statistics(reduced_of(layout, flat))
    assert torch.equal(model[0].running_mean, torch.tensor([1.0, 2.0, 3.0, 0.0]))
    assert torch.equal(model[0].running_var, before)  # nobody changed it: count 0
    sums = torch.tensor([5.0, 7.0, 11.0, 13.0])
    flat[mean.offset : mean.offset + 4], flat[mean.offset + 4] = sums, 41.0
    GradientHandOver(layout, model).commit_statistics(reduced_of(layout, flat))
    assert torch.equal(model[0].running_mean, sums / 41) and not torch.equal(sums / 41, sums * (1 / 41))


@pytest.mark.parametrize("ranges", [[], [(0, 1)], [(1, 2)], [(0, 1), (0, 2)]])
def test_a_part_of_a_gradient_is_not_applied_as_if_it_were_all(ranges: list[tuple[int, int]]) -> None:
    model = nn.Linear(BLOCK_ELEMENTS, 2, bias=False)
    layout = GradientLayout.build(model, [model])
    pieces = tuple(
        Piece(a * BLOCK_ELEMENTS, b * BLOCK_ELEMENTS, torch.ones((b - a) * BLOCK_ELEMENTS)) for a, b in ranges
    )
    part = Reduced(1, pieces, bytes([1]) * len(layout.entries), ())
    with pytest.raises(InvariantViolation, match="expected all of a gradient"):
        GradientHandOver(layout, model).hand_over(part, 1.0)


def test_of_a_part_of_a_gradient_the_wanted_elements_have_the_bits_of_all_of_it() -> None:
    model = nn.Sequential(nn.Linear(BLOCK_ELEMENTS, 3, bias=False), nn.Linear(4, 5))
    layout = GradientLayout.build(model, list(model))
    flat, weight = torch.randn(layout.numel), model[0].weight
    whole = GradientHandOver(layout, model)
    whole.hand_over(reduced_of(layout, flat), 0.3)
    expected = weight.grad.view(-1).clone()  # type: ignore[union-attr]
    at = [(k * BLOCK_ELEMENTS, (k + 1) * BLOCK_ELEMENTS) for k in (0, 2, 3)]
    part = Reduced(1, tuple(Piece(a, b, flat[a:b]) for a, b in at), bytes([1]) * 3, ())
    wanted = {weight: [(5, 9), (2 * BLOCK_ELEMENTS + 1, 3 * BLOCK_ELEMENTS)]}
    kept = flat.clone()
    whole.hand_over(part, 0.3, wanted=wanted)
    for first, stop in wanted[weight]:
        assert torch.equal(weight.grad.view(-1)[first:stop], expected[first:stop])  # type: ignore[union-attr]
    assert torch.equal(model[1].weight.grad, layout.entries[1].view(flat) * 0.3) and torch.equal(flat, kept)
    whole.hand_over(part, 0.3, wanted={weight: []})
    assert weight.grad is not None and weight.grad.shape == weight.shape
    for elements in ([(BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS + 1)], [(0, 3 * BLOCK_ELEMENTS)]):
        with pytest.raises(InvariantViolation, match="of them are here"):
            whole.hand_over(part, 0.3, wanted={weight: elements})


def test_gradients_that_come_later_are_there_one_call_after_the_other() -> None:
    model = nn.Sequential(nn.Linear(BLOCK_ELEMENTS, 3, bias=False), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[2].weight = model[1].weight
    untie(model, list(model))
    layout = GradientLayout.build(model, list(model))
    flat, weight = torch.randn(layout.numel), model[0].weight
    everything = [*model[:2].parameters()]
    at_once, later = GradientHandOver(layout, model), GradientHandOver(layout, model)
    at_once.hand_over(reduced_of(layout, flat), 0.3, limit=0.4)
    expected = [p.grad.view(-1).clone() for p in everything]  # type: ignore[union-attr]
    wanted = {p: [(0, p.numel())] for p in everything}
    later.hand_over(reduced_of(layout, flat), 0.3, wanted=wanted, limit=0.4, later=True)
    given = weight.grad.view(-1)  # type: ignore[union-attr]
    assert torch.equal(model[1].weight.grad.view(-1), expected[1]), "of several places, it is made of all"  # type: ignore[union-attr]
    assert not given.any() and not model[1].bias.grad.any()  # type: ignore[union-attr]
    n = BLOCK_ELEMENTS
    later.give({weight: [(7, n), (2 * n, 3 * n)], everything[2]: [(0, 4)]})
    assert torch.equal(given[7:n], expected[0][7:n]) and torch.equal(given[2 * n :], expected[0][2 * n :])
    assert torch.equal(everything[2].grad, expected[2])  # type: ignore[arg-type]
    later.give({weight: [(n, 2 * n)]})
    assert torch.equal(given[n : 2 * n], expected[0][n : 2 * n])
    assert given[:n].count_nonzero() < 2048 > given[2 * n :].count_nonzero(), "what was given before takes memory"
    later.clear()
    assert weight.grad is None and not given.any()
    later.hand_over(reduced_of(layout, flat), 0.3)
    later.give({weight: [(0, n)]})
    assert torch.equal(weight.grad, layout.entries[0].view(flat) * 0.3), "what is all there needs nothing"  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [(1, 1, 1), (0, 1, 0), (1, 0, 1), (0, 0, 1), (0, 0, 0)])
def test_who_gets_a_gradient_is_known_before(rows: tuple[int, ...]) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    model[1].weight = model[0].weight
    untie(model, list(model))
    layout = GradientLayout.build(model, list(model))
    hand_over, reduced = GradientHandOver(layout, model), reduced_of(layout, torch.randn(layout.numel), bytes(rows))
    found = hand_over.present(reduced)
    hand_over.hand_over(reduced, 1.0)
    assert found == {p for p in model.parameters() if p.grad is not None}
