"""An optimizer's update in pieces: the same bits as of the whole, whoever holds which piece, and in how many calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from everstep.base.errors import InvariantViolation
from everstep.exact.pieces import PieceUpdate, calls_of, may_be_cut

SHAPES = ((40, 50), (7,), (16, 3, 3, 3), (500, 3), ())
MAKERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda ps: SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda ps: Adam(ps, amsgrad=True),
    "adamw foreach": lambda ps: AdamW(ps, foreach=True),
    "adamw fused": lambda ps: AdamW(ps, fused=True),
    "adagrad": lambda ps: Adagrad(ps),
    "nadam": lambda ps: NAdam(ps),
    "rmsprop": lambda ps: RMSprop(ps, centered=True, momentum=0.5),
    "groups": lambda ps: AdamW([{"params": ps[:2], "lr": 0.5}, {"params": ps[2:], "weight_decay": 0.2}]),
}


def made(how: str, dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], Optimizer]:
    generator = torch.Generator().manual_seed(5)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    parameters[2] = nn.Parameter(parameters[2].detach().to(memory_format=torch.channels_last))
    return parameters, MAKERS[how](parameters)


def gradients(parameters: Sequence[nn.Parameter], step: int, absent: int = 1) -> None:
    """New ones, of which one is absent in every other step."""
    generator = torch.Generator().manual_seed(step)
    for k, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if k == absent and step % 2 else torch.empty_like(parameter).copy_(gradient)


def facts(parameters: Sequence[Tensor], optimizer: Optimizer) -> list[Any]:
    states = [dict(optimizer.state.get(p, {})) for p in parameters]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [[p.detach() for p in parameters], states, groups]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("most", [64, 1008, 1 << 20])
@pytest.mark.parametrize("how", MAKERS)
def test_several_calls_give_the_bits_of_one(how: str, most: int) -> None:
    (ours, pieced), (theirs, whole) = made(how), made(how)
    for step in range(4):
        gradients(ours, step)
        gradients(theirs, step)
        PieceUpdate(pieced).make(calls_of(ours, most, cut=True))
        whole.step()
    assert same(facts(ours, pieced), facts(theirs, whole))
    assert all(len(group["params"]) for group in pieced.param_groups) and set(pieced.state) <= set(ours)


@pytest.mark.parametrize("how", MAKERS)
def test_owners_with_witnesses_give_the_bits_of_the_whole_together(how: str) -> None:
    (theirs, whole), owners = made(how), [made(how), made(how)]
    for step in range(4):
        gradients(theirs, step)
        whole.step()
        for number, (ours, pieced) in enumerate(owners):
            gradients(ours, step)
            # The last parameter has one element, and everybody updates it.
            held: dict[Tensor, list[tuple[int, int]]] = {ours[0]: [(0, 480), (992, 2000)] if number else [(480, 992)]}
            held |= {p: [(0, p.numel())] if k % 2 == number or k == 3 else [] for k, p in enumerate(ours[1:])}
            PieceUpdate(pieced).make([held])
    (first, a), (second, b) = owners
    for place, parameter in enumerate(theirs):
        for tensors in ({"": (first[place], second[place], parameter)}, _states(place, whole, a, b)):
            for key, (left, right, expected) in tensors.items():
                if place == 0 and expected.shape == parameter.shape:
                    left, right, expected = left.flatten(), right.flatten(), expected.flatten()
                    left = torch.cat([right[:480], left[480:992], right[992:]])
                elif expected.shape == parameter.shape:
                    left = left if (place - 1) % 2 == 0 or place == 4 else right
                else:
                    assert same(left, right), (place, key)
                assert same(left, expected), (place, key)


def _states(place: int, *optimizers: Optimizer) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    whole, a, b = ([p for group in o.param_groups for p in group["params"]][place] for o in optimizers)
    expected, first, second = (o.state.get(p, {}) for o, p in zip(optimizers, (whole, a, b), strict=True))
    assert list(expected) == list(first) == list(second)
    return {k: (first[k], second[k], v) for k, v in expected.items() if isinstance(v, Tensor)}


def test_gradient_and_state_of_other_strides_are_put_in_the_order_of_the_parameter() -> None:
    (ours, pieced), (theirs, whole) = made("sgd"), made("sgd")
    for step in range(3):
        for parameters in (ours, theirs):
            gradients(parameters, step)
            parameters[2].grad = torch.full(parameters[2].shape, 0.1).cumsum(0)  # contiguous, and so is its momentum
        (PieceUpdate(pieced).make(calls_of(ours, 64, cut=True))) if step else pieced.step()
        whole.step()
    assert same(facts(ours, pieced), facts(theirs, whole))


def test_state_is_made_where_it_is_told_to_be_and_stays_there() -> None:
    parameters, optimizer = made("adam")
    places: list[Tensor] = []

    def make(like: Tensor) -> Tensor:
        places.append(torch.zeros_like(like))
        return places[-1]

    for step in range(3):
        gradients(parameters, step)
        PieceUpdate(optimizer, make).make(calls_of(parameters, 512, cut=True))
    kept = {v.data_ptr() for state in optimizer.state.values() for k, v in state.items() if k != "step"}
    assert len(places) == 3 * len(parameters) + 1  # a single element looks like a step
    assert kept <= {place.data_ptr() for place in places}


def test_hooks_and_schedules_run_once_and_see_whole_parameters() -> None:
    parameters, optimizer = made("adam")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen: list[tuple[str, list[tuple[int, ...]]]] = []

    def look(word: str) -> Callable[..., None]:
        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            seen.append((word, [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]))

        return hook

    optimizer.register_step_pre_hook(look("before"))
    optimizer.register_step_post_hook(look("after"))
    gradients(parameters, 1)
    PieceUpdate(optimizer).make(calls_of(parameters, 512, cut=True))
    schedule.step()
    assert seen == [("before", list(SHAPES)), ("after", list(SHAPES))]
    assert optimizer.param_groups[0]["lr"] == 0.0005 and len(optimizer._optimizer_step_pre_hooks) == 1


def test_an_update_that_fails_leaves_groups_and_hooks() -> None:
    parameters, optimizer = made("adam")
    optimizer.register_step_post_hook(lambda *of: None)
    gradients(parameters, 0)
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        PieceUpdate(optimizer).make(calls_of(parameters, 512, cut=True))
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in parameters]
    assert len(optimizer._optimizer_step_post_hooks) == 1 and set(optimizer.state) <= set(parameters)


def test_attributes_of_a_parameter_are_those_of_its_leaves() -> None:
    class Marked(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(parameter.mark)

    parameter = nn.Parameter(torch.zeros(64))
    parameter.mark = 3.0  # type: ignore[attr-defined]
    PieceUpdate(Marked([parameter], lr=1.0)).make([{parameter: [(0, 16), (32, 64)]}])
    assert parameter.tolist() == [3.0] * 16 + [0.0] * 16 + [3.0] * 32


def test_what_is_not_one_range_of_memory_is_not_cut() -> None:
    wide = nn.Parameter(torch.zeros(8, 32)[:, ::2])
    assert not may_be_cut(wide) and may_be_cut(nn.Parameter(torch.zeros(4, 4).t()))
    assert calls_of([wide], 16, cut=True) == [{wide: [(0, 128)]}]
    wide.grad = torch.zeros(8, 16)
    with pytest.raises(InvariantViolation, match="without holes"):
        PieceUpdate(SGD([wide], lr=0.1)).make([{wide: [(0, 64)]}])


def test_calls_hold_no_more_than_they_may_and_everything_once() -> None:
    sizes = (100, 40, 0, 1000, 16)
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    for most, cut in ((160, True), (160, False), (16, True), (5000, True)):
        calls = calls_of(parameters, most, cut)
        for parameter, size in zip(parameters, sizes, strict=True):
            ranges = [one for call in calls for one in call.get(parameter, [])]
            assert ranges[0][0] == 0 and ranges[-1][1] == size
            assert [stop for _, stop in ranges[:-1]] == [first for first, _ in ranges[1:]]
            assert cut or len(ranges) == 1
        totals = [sum(stop - first for ranges in call.values() for first, stop in ranges) for call in calls]
        assert all(total <= most or (not cut and len(call) == 1) for total, call in zip(totals, calls, strict=True))
