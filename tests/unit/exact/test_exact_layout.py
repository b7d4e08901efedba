"""The flat layout: order, alignment, ties, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from everstep.base.errors import ConfigError, InvariantViolation
from everstep.exact.layout import (
    BLOCK_ELEMENTS,
    GradientLayout,
    align_parameters,
    aligned_like,
    dense_stride,
    untie,
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


def test_entries_follow_units_and_begin_at_64_bytes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Linear(7, 3))
    layout = GradientLayout.build(model, list(model))
    assert [e.name for e in layout.entries] == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "2.weight",
        "2.bias",
    ]
    assert [e.unit for e in layout.entries] == [0, 0, 1, 1, 1, 1, 2, 2]
    assert [e.kind for e in layout.entries].count("buffer") == 2
    assert all(e.offset % 16 == 0 for e in layout.entries)
    assert [u.start for u in layout.units] == [0, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS]
    assert layout.numel == 3 * BLOCK_ELEMENTS and layout.n_blocks == 3
    ends = [e.stop for e in layout.entries]
    assert all(stop <= nxt.offset for stop, nxt in zip(ends, layout.entries[1:], strict=False))
    # The bias of 5 elements follows at the next multiple of 16; the statistics' count comes after their 5 elements.
    assert layout.entries[4].stop == layout.entries[4].offset + 6
    assert layout.block_params_stop[1] == layout.units[1].params_stop == layout.entries[3].stop


def test_gaps_and_entries_cover_the_vector_once() -> None:
    model = nn.Sequential(nn.Linear(100, 700), nn.BatchNorm1d(700), nn.Linear(700, 130))
    layout = GradientLayout.build(model, list(model))
    seen = torch.zeros(layout.numel, dtype=torch.int32)
    for e in layout.entries:
        seen[e.offset : e.stop] += 1
    for start, stop in layout.gaps:
        seen[start:stop] += 1
    assert torch.equal(seen, torch.ones_like(seen))


def test_block_params_stop_spans_blocks() -> None:
    model = nn.Sequential(nn.Linear(400, 400), nn.BatchNorm1d(400))
    layout = GradientLayout.build(model, [model])
    assert layout.n_blocks == 3
    assert layout.block_params_stop[:2] == (BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS)
    assert layout.block_params_stop[2] == layout.units[0].params_stop


def test_untie_gives_each_place_its_leaf_on_one_storage() -> None:
    model = Tied()
    units = [model.embed, model.body, model.head]
    with pytest.raises(InvariantViolation, match="untie"):
        GradientLayout.build(model, units)
    before = list(model.parameters())
    assert untie(model, units) == 1
    assert model.head.weight is not model.embed.weight
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert before[0] is model.embed.weight
    layout = GradientLayout.build(model, units)
    assert [e.name for e in layout.entries] == ["embed.weight", "body.weight", "body.bias", "head.weight"]
    assert [e.tied_to for e in layout.entries] == [-1, -1, -1, 0]
    model(torch.tensor([[1, 2]])).sum().backward()
    assert model.head.weight.grad is not None and model.embed.weight.grad is not None
    with torch.no_grad():
        model.embed.weight.add_(1.0)
    assert torch.equal(model.embed.weight, model.head.weight)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_would_miss_places_of_a_tied_parameter_is_refused(kind: str) -> None:
    """Each place has a gradient of its own, and the hook would get the first one's alone."""
    model = Tied()
    handle = getattr(model.head.weight, kind)(lambda gradient: None)
    assert untie(model, [model]) == 0, "one unit: its gradient is whole"
    with pytest.raises(ConfigError, match=r"parameter embed\.weight has a hook on its gradient, .* one unit"):
        untie(model, [model.embed, model.body, model.head])
    handle.remove()
    assert untie(model, [model.embed, model.body, model.head]) == 1


def test_tie_inside_one_unit_stays_one_leaf() -> None:
    model = Tied()
    assert untie(model, [model]) == 0
    layout = GradientLayout.build(model, [model])
    assert [e.name for e in layout.entries] == ["embed.weight", "body.weight", "body.bias"]


def test_frozen_parameters_stay_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    layout = GradientLayout.build(model, [model])
    assert layout.frozen == ("0.weight",)
    assert "0.weight" not in [e.name for e in layout.entries]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_refuses_dtypes_by_name(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(dtype))
    with pytest.raises(ConfigError, match=r"1\.weight"):
        GradientLayout.build(model, [model])


def test_refuses_lazy_uncovered_overlapping_and_foreign() -> None:
    with pytest.raises(ConfigError, match=r"0\.weight"):
        lazy = nn.Sequential(nn.LazyLinear(3))
        GradientLayout.build(lazy, [lazy])
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"1\.weight is in no unit"):
        GradientLayout.build(model, [model[0]])
    with pytest.raises(ConfigError, match="units 0 and 1"):
        GradientLayout.build(model, [model, model[1]])
    with pytest.raises(ConfigError, match="no module of the model"):
        GradientLayout.build(model, [nn.Linear(2, 2)])
    norm = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    with pytest.raises(ConfigError, match=r"1\.running_mean"):
        GradientLayout.build(norm, [norm[0]])
    double = nn.Sequential(nn.BatchNorm1d(2, affine=False).double())
    with pytest.raises(ConfigError, match=r"0\.running_mean"):
        GradientLayout.build(double, [double])


def test_align_moves_only_what_is_off_and_keeps_ties_and_strides() -> None:
    pool = torch.randn(4096)
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    off = pool[1 : 1 + 4 * 4 * 9].view(4, 3, 3, 4).permute(0, 3, 1, 2)
    assert off.data_ptr() % 64 != 0
    model[0].weight.data = off
    model[2].weight = model[1].weight
    model[1].weight.data = pool[2001:2010].view(3, 3)
    kept, value = model[0].weight, off.clone()
    assert align_parameters(model) == 2
    assert model[0].weight is kept and torch.equal(kept, value)
    assert kept.stride() == off.stride() and kept.data_ptr() % 64 == 0
    assert model[1].weight is model[2].weight and model[1].weight.data_ptr() % 64 == 0
    assert align_parameters(model) == 0


def test_dense_stride() -> None:
    x = torch.zeros(2, 3, 4, 5)
    assert dense_stride(x) == (60, 20, 5, 1)
    last = x.to(memory_format=torch.channels_last)
    assert dense_stride(last) == last.stride()
    assert dense_stride(x[:, ::2]) == (40, 20, 5, 1)
    assert dense_stride(torch.zeros(1).expand(3)) == (1,)
    assert aligned_like(last).stride() == last.stride()


def test_fingerprint_tells_layouts_apart() -> None:
    a, b = nn.Linear(3, 4), nn.Linear(4, 3)
    assert GradientLayout.build(a, [a]).fingerprint() == GradientLayout.build(a, [a]).fingerprint()
    assert GradientLayout.build(a, [a]).fingerprint() != GradientLayout.build(b, [b]).fingerprint()


def test_channels_last_entry_view_has_the_parameters_strides() -> None:
    model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    layout = GradientLayout.build(model, [model])
    flat = torch.arange(layout.numel, dtype=torch.float32)
    view = layout.entries[0].view(flat)
    assert view.stride() == model.weight.stride() and view.shape == model.weight.shape
