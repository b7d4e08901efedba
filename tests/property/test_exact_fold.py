"""`finish` against a naive fold, for random lanes, placements, ranges and absences."""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from everstep.base.ports import Node
from everstep.exact.layout import GradientLayout
from everstep.exact.reduce import NodePart, finish, merge_presence, presence
from everstep.placement.tree import cover, fold
from sampling import examples


@lru_cache(maxsize=1)
def small_layout() -> GradientLayout:
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 50), nn.Linear(50, 3))
    return GradientLayout.build(model, list(model))


def naive(layout: GradientLayout, lanes: dict[int, torch.Tensor], rows: dict[int, bytes], n_lanes: int) -> torch.Tensor:
    out = torch.zeros(layout.numel)
    for i, entry in enumerate(layout.entries):
        values = {k: v[entry.offset : entry.stop] for k, v in lanes.items() if rows[k][i]}
        if values:
            out[entry.offset : entry.stop] = fold(n_lanes, values, torch.add)
    return out


@given(data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_finish_equals_the_naive_fold(data: st.DataObject) -> None:
    layout = small_layout()
    n_lanes = data.draw(st.integers(1, 9))
    worker_of = data.draw(st.lists(st.integers(0, 4), min_size=n_lanes, max_size=n_lanes))
    absent = data.draw(st.sampled_from([0.0, 0.0, 0.3, 0.9]))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    noise = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
    lanes, rows = {}, {}
    for lane in range(n_lanes):
        lanes[lane] = torch.randn(layout.numel, generator=noise) * 10.0 ** float(rng.integers(-6, 6))
        lanes[lane][::7] = -0.0
        rows[lane] = bytes((rng.random(len(layout.entries)) >= absent).astype(np.uint8))
    for start, stop in layout.gaps:
        for value in lanes.values():
            value[start:stop] = 0.0
    expected = naive(layout, lanes, rows, n_lanes)
    parts = []
    for worker in sorted(set(worker_of)):
        for node in cover([k for k in range(n_lanes) if worker_of[k] == worker], n_lanes):
            held = {k: rows[k] for k in range(node.lo, node.hi)}
            row = merge_presence(held.values())
            value = torch.full((layout.numel,), float("nan"))  # what is absent must not be read
            for start, stop in layout.gaps:
                value[start:stop] = 0.0
            for i, entry in enumerate(layout.entries):
                present = {k - node.lo: lanes[k][entry.offset : entry.stop] for k in held if rows[k][i]}
                if present:
                    value[entry.offset : entry.stop] = fold(node.hi - node.lo, present, torch.add)
            parts.append(NodePart(node, value, row))
    order = data.draw(st.permutations(range(len(parts))))
    parts = [parts[k] for k in order]
    cuts = sorted({0, layout.numel, *data.draw(st.lists(st.integers(0, layout.numel), max_size=4))})
    got = torch.full((layout.numel,), float("inf"))
    for start, stop in itertools.pairwise(cuts):
        sliced = [NodePart(p.node, p.tensor[start:stop], p.presence, start) for p in parts]
        finish(layout, n_lanes, sliced, start, stop, got[start:stop])
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
    assert presence(parts) == merge_presence(rows.values())


def test_subtree_shape_is_that_of_the_whole_tree() -> None:
    """The naive fold above folds a node as a tree of its own: that must be the node's shape in any larger tree."""
    for n in range(1, 20):
        for lo in range(n):
            for hi in range(lo + 1, n + 1):
                if cover(range(lo, hi), n) == (Node(lo, hi),):
                    words = {k: f"{k}" for k in range(lo, hi)}
                    whole = fold(n, words, lambda a, b: f"({a}{b})")
                    own = fold(hi - lo, {k - lo: w for k, w in words.items()}, lambda a, b: f"({a}{b})")
                    assert whole == own
