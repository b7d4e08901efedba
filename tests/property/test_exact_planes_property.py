"""Planes against a naive oracle: element e of the gradient is element e of every plane, whatever the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from everstep.exact.digest import bytes_of, digest_bytes
from everstep.exact.image import BLOCK_BYTES, Plane, plane_at, planes_of, rows_of, runs_of
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout
from everstep.exact.state import ModelState
from sampling import examples

SIZES = st.sampled_from([0, 1, 3, 16, 17, 4_000, 65_535, 65_536, 65_537, 131_072, 140_000])
DTYPES = st.sampled_from([torch.float32, torch.float32, torch.bfloat16])
PARAMETER = st.tuples(SIZES, DTYPES, st.booleans())


class Unit(nn.Module):
    """Parameters of (size, type, whether it is trained), and perhaps a buffer."""

    def __init__(self, parameters: Sequence[tuple[int, torch.dtype, bool]], norm: bool) -> None:
        super().__init__()
        for k, (size, dtype, trained) in enumerate(parameters):
            self.register_parameter(f"p{k}", nn.Parameter(torch.randn(size).to(dtype), requires_grad=trained))
        if norm:
            self.norm = nn.BatchNorm1d(5)


def state_of(units: Sequence[Unit], key: str = "momentum_buffer") -> ModelState:
    model = nn.Sequential(*units)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad] or [nn.Parameter()], lr=0.1)
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter in set(model.parameters()):
            optimizer.state[parameter] = {key: torch.randn_like(parameter), "step": torch.tensor(3.0)}
    if not list(model.parameters()) or not any(p.requires_grad for p in model.parameters()):
        return ModelState(model, units=list(units))
    return ModelState(model, optimizer, units=list(units))


@st.composite
def states(draw: st.DrawFn) -> ModelState:
    torch.manual_seed(draw(st.integers(0, 9)))
    shapes = draw(st.lists(st.tuples(st.lists(PARAMETER, max_size=4), st.booleans()), min_size=1, max_size=3))
    return state_of([Unit(parameters, norm) for parameters, norm in shapes])


def image_of(state: ModelState) -> bytes:
    return b"".join(bytes(state.read_block(i)) for i in range(state.n_blocks))


def elements(plane: Plane, image: bytes, start: int, count: int) -> bytes:
    """What lies at these elements of the grid. A run ends where the next one begins."""
    size, found = plane.itemsize, b""
    ends = [*(at * BLOCK_ELEMENTS for at, _, _ in plane.runs[1:]), 1 << 40]
    for (at, first, n), end in zip(plane.runs, ends, strict=True):
        begin = at * BLOCK_ELEMENTS
        low, high = max(start, begin), min(start + count, begin + n * BLOCK_BYTES // size, end)
        if low < high:
            assert low == start + len(found) // size, "a tensor lies in one run"
            found += image[first * BLOCK_BYTES + (low - begin) * size : first * BLOCK_BYTES + (high - begin) * size]
    return found


@settings(max_examples=examples(60))
@given(state=states())
def test_element_e_of_the_gradient_is_element_e_of_every_plane(state: ModelState) -> None:
    manifest = state.manifest()
    planes = {plane.name: plane for plane in planes_of(manifest)}
    image = image_of(state)
    layout = GradientLayout.build(state.model, list(state.model.children()))
    parameters = dict(state.model.named_parameters())
    in_planes = set()
    for entry in (layout.entries[k] for k in layout.params):
        parameter = parameters[entry.name]
        if not entry.numel:
            continue
        suffix = "" if entry.dtype == "float32" else f":{entry.dtype}"
        kept = state.optimizer.state[parameter]["momentum_buffer"]
        for kind, name, tensor in (
            ("model", f"model/{entry.name}", parameter),
            ("optimizer/momentum_buffer", f"optimizer/{entry.name}/momentum_buffer", kept),
        ):
            plane = planes[kind + suffix]
            assert elements(plane, image, entry.offset, entry.numel) == bytes(bytes_of(tensor))
            in_planes.add(name)
    _check_image(manifest, image)
    rest = planes.get("rest")
    for name, _, _, offset, nbytes in manifest["entries"]:
        if nbytes and name not in in_planes:
            assert rest is not None and rest.start * BLOCK_BYTES <= offset < rest.stop * BLOCK_BYTES, name


def _check_image(manifest: dict[str, Any], image: bytes) -> None:
    """Entries ascend, do not overlap, with zeros between them; planes have all blocks, once, and none in vain."""
    at, used = 0, set()
    for (name, _, _, offset, nbytes), digest in zip(manifest["entries"], manifest["digests"], strict=True):
        assert offset >= at and not any(image[at:offset]), name
        assert digest_bytes(image[offset : offset + nbytes]) == digest
        at = offset + nbytes
        used |= set(range(offset // BLOCK_BYTES, -(-at // BLOCK_BYTES))) if nbytes else set()
    assert not any(image[at:])
    planes, numbers = planes_of(manifest), list(range(len(manifest["blocks"])))
    assert [block for plane in planes for block in plane.grid()] == numbers == sorted(used)
    assert [plane.name for plane in planes] == sorted(plane.name for plane in planes)
    first = 0
    for _, count in manifest["groups"]:
        group = [e[3] // BLOCK_BYTES for e in manifest["entries"][first : first + count] if e[4]]
        assert len({plane_at(planes, block) for block in group}) <= 1
        first += count
    assert first == len(manifest["entries"])


@settings(max_examples=examples(80))
@given(state=states())
def test_runs_of_a_plane_are_those_of_its_grid(state: ModelState) -> None:
    manifest = state.manifest()
    for plane in planes_of(manifest):
        if plane.name != "rest":
            assert (runs_of(((at, block) for block, at in plane.grid().items()), plane.itemsize)) == plane.runs
    assert planes_of({"planes": rows_of(planes_of(manifest))}) == planes_of(manifest)
