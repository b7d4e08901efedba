"""Finishing the tree: refusals, norms, ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from everstep.base.errors import InvariantViolation
from everstep.base.ports import Node, Piece, Reduced
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout, untie
from everstep.exact.reduce import NodePart, block_norms, finish, merge_presence, tied_terms
from everstep.placement.tree import total_sumsq


@pytest.fixture
def layout() -> GradientLayout:
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    return GradientLayout.build(model, [model])


def test_refuses_what_does_not_cover(layout: GradientLayout) -> None:
    ones = bytes([1]) * len(layout.entries)
    part = NodePart(Node(0, 2), torch.zeros(layout.numel), ones)
    out = torch.zeros(layout.numel)
    with pytest.raises(InvariantViolation):
        finish(layout, 4, [part], 0, layout.numel, out)
    with pytest.raises(InvariantViolation):
        finish(layout, 2, [part], 0, layout.numel - 1, out)
    with pytest.raises(InvariantViolation):
        finish(layout, 2, [part._replace(presence=b"\1")], 0, layout.numel, out)
    with pytest.raises(InvariantViolation, match="reach"):
        finish(layout, 2, [part._replace(tensor=torch.zeros(10))], 0, layout.numel, out)


def test_minus_zero_survives_an_absent_partner(layout: GradientLayout) -> None:
    ones, zeros = bytes([1]) * len(layout.entries), bytes(len(layout.entries))
    left = NodePart(Node(0, 1), torch.full((layout.numel,), -0.0), ones)
    right = NodePart(Node(1, 2), torch.zeros(layout.numel), zeros)
    out = torch.ones(layout.numel)
    finish(layout, 2, [left, right], 0, layout.numel, out)
    assert torch.signbit(out).all()
    finish(layout, 2, [left._replace(presence=zeros), right], 0, layout.numel, out)
    assert torch.equal(out.view(torch.int32), torch.zeros(layout.numel, dtype=torch.int32))


def test_block_norms_leave_running_statistics_and_padding_out(layout: GradientLayout) -> None:
    data = torch.full((layout.numel,), float("nan"))
    generator = torch.Generator().manual_seed(1)
    total = 0.0
    for i in layout.params:
        e = layout.entries[i]
        data[e.offset : e.stop] = torch.randn(e.numel, generator=generator)
        total += float((data[e.offset : e.stop].double() ** 2).sum())
    for start, stop in layout.gaps:
        data[start:stop] = 0.0
    norms = block_norms(layout, data, 0)
    assert norms.dtype == np.float64 and norms.shape == (layout.n_blocks,)
    assert math.isclose(total_sumsq(norms), total, rel_tol=1e-12)
    for k in range(layout.n_blocks):
        part = block_norms(layout, data[k * BLOCK_ELEMENTS : (k + 1) * BLOCK_ELEMENTS], k * BLOCK_ELEMENTS)
        assert part[0].tobytes() == norms[k].tobytes()
    data[5] = float("inf")
    assert total_sumsq(block_norms(layout, data, 0)) == math.inf
    data[5] = float("nan")
    assert math.isnan(total_sumsq(block_norms(layout, data, 0)))


def test_tied_places_count_as_one_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model[2].weight = model[0].weight
    untie(model, list(model))
    layout = GradientLayout.build(model, list(model))
    flat = torch.zeros(layout.numel)
    parts = [torch.randn(16) for _ in range(3)]
    for entry, part in zip(layout.entries, parts, strict=True):
        flat[entry.offset : entry.stop] = part
    pieces = (Piece(0, 5, flat[:5]), Piece(5, layout.numel, flat[5:]))
    reduced = Reduced(1, pieces, bytes([1, 1, 1]), ((0, 3),))
    total = total_sumsq(block_norms(layout, flat, 0)) + total_sumsq(tied_terms(layout, reduced))
    assert math.isclose(total, float(((parts[0] + parts[1] + parts[2]).double() ** 2).sum()), rel_tol=1e-6)
    reduced = Reduced(1, pieces, bytes([1, 1, 0]), ((0, 3),))
    assert math.isclose(
        total_sumsq(tied_terms(layout, reduced)), 2 * float((parts[0] * parts[1]).double().sum()), rel_tol=1e-5
    )


def test_merge_presence() -> None:
    assert merge_presence([b"\0\1\0", b"\1\0\0"]) == b"\1\1\0"
    assert merge_presence([b"\0\1"]) == b"\0\1"
    assert merge_presence([]) == b""
