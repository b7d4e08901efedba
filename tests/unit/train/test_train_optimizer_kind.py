"""Which optimizers can be divided, as an experiment finds it: all of torch's, and some like those that people write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import optimizers_divided as cases
from everstep.base.errors import ConfigError
from everstep.exact.pieces import calls_of
from everstep.train import optimizer_kind
from everstep.train.optimizer_kind import expected_kind, kind_of, tried_of
from everstep.train.optimizer_trial import AHEAD, far, unfit
from everstep.train.optimizer_update import refuse_in_cell, refuse_undivided
from odd_optimizers import Finite

SHAPES = ((300, 200), (7,), (16, 3, 3, 3), (1000, 70), (1,), ())
ELEMENTS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD")
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")  # those that torch has for CPUs
HOW = {"": {}, "foreach": {"foreach": True}, "loop": {"foreach": False}, "fused": {"fused": True}}


def parameters(dtype: torch.dtype = torch.float32, *, absent: int = 1) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    made[2] = nn.Parameter(made[2].detach().to(memory_format=torch.channels_last))
    for k, parameter in enumerate(made):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if k == absent else torch.empty_like(parameter).copy_(gradient)
    return made


@pytest.mark.parametrize(
    ("name", "how"), [(name, how) for name in ELEMENTS for how in HOW if how != "fused" or name in FUSED]
)
def test_element_wise_ones_can_be_divided_anywhere(name: str, how: str) -> None:
    optimizer = getattr(optim, name)(
        parameters(), **({"lr": 0.1, "momentum": 0.9} if name == "SGD" else {}), **HOW[how]
    )
    kind = kind_of(optimizer, 3)
    assert kind[:2] == ("elements", "") and kind.follows


def test_so_can_those_of_narrow_parameters_and_frozen_ones() -> None:
    narrow = parameters(torch.bfloat16)
    narrow[3].requires_grad_(False)
    narrow[3].grad = None
    assert kind_of(optim.AdamW(narrow, amsgrad=True), 3).divides == "elements"


def test_narrow_parameters_stay_whole_since_the_last_elements_of_a_range_are_rounded_otherwise() -> None:
    """Pieces of these would differ, from whichever step on has such values."""
    torch.manual_seed(0)
    narrow = [nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)) for shape in ((300,), (300, 300))]
    for parameter in narrow:
        parameter.grad = torch.randn_like(parameter)
    assert kind_of(optim.SGD(narrow, lr=0.02, momentum=0.9), 3).divides == "elements"
    assert calls_of(narrow, 64, cut=True) == [{p: [(0, p.numel())]} for p in narrow]


def test_those_that_look_at_whole_parameters_can_be_divided_between_them() -> None:
    kind = kind_of(optim.Adafactor(parameters()), 3)
    assert kind.divides == "matrices" and "(300, 200)" in kind.why
    muon = kind_of(optim.Muon([p for p in parameters() if p.ndim == 2]), 3)
    assert muon.divides == "matrices" and "2D matrix" in muon.why


class Own(optim.Optimizer):
    """An optimizer as people write them. rule: what it does with one group."""

    def __init__(self, params: Any, rule: Callable[[Own, dict[str, Any]], None]) -> None:
        self.rule = rule
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            self.rule(self, group)


def _with_gradients(group: dict[str, Any]) -> list[nn.Parameter]:
    return [p for p in group["params"] if p.grad is not None]


def lion(optimizer: Own, group: dict[str, Any]) -> None:
    for p in _with_gradients(group):
        state = optimizer.state[p]
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        p.sub_(torch.sign(momentum * 0.9 + p.grad * 0.1), alpha=group["lr"])
        state["momentum"] = momentum * 0.99 + p.grad * 0.01


def lamb(optimizer: Own, group: dict[str, Any]) -> None:
    for p in _with_gradients(group):
        update = p.grad / (p.grad.abs() + 1e-6)
        p.sub_(update * (p.norm() / (update.norm() + 1e-6)), alpha=group["lr"])


def clipped(optimizer: Own, group: dict[str, Any]) -> None:
    norm = torch.stack([p.grad.norm() for p in _with_gradients(group)]).norm()
    for p in _with_gradients(group):
        p.sub_(p.grad / norm, alpha=group["lr"])


def noisy(optimizer: Own, group: dict[str, Any]) -> None:
    for p in _with_gradients(group):
        p.sub_(p.grad + 0.01 * torch.randn_like(p), alpha=group["lr"])


def ranked(optimizer: Own, group: dict[str, Any]) -> None:
    for k, p in enumerate(group["params"]):
        if p.grad is not None:
            p.sub_(p.grad, alpha=group["lr"] / (k + 1))


def counting(optimizer: Own, group: dict[str, Any]) -> None:
    group["lr"] *= 1 + len(group["params"])
    for p in _with_gradients(group):
        p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize(
    ("rule", "divides"),
    [(lion, "elements"), (lamb, "matrices"), (clipped, "nothing"), (noisy, "nothing"), (ranked, "nothing")],
)
def test_peoples_own_are_found_out(rule: Callable[..., None], divides: str) -> None:
    kind = kind_of(Own(parameters(), rule), 3)
    assert kind.divides == divides and bool(kind.why) == (divides != "elements")


def test_groups_that_an_update_changes_by_what_is_in_them_cannot_be_divided() -> None:
    kind = kind_of(Own(parameters(), counting), 3)
    assert kind[:2] == ("nothing", "the groups or attributes of the optimizer would differ")


def test_an_update_that_changes_a_group_is_made_at_once() -> None:
    def paced(optimizer: Own, group: dict[str, Any]) -> None:
        group["calls"] = group.get("calls", 0) + 1
        lion(optimizer, group)

    assert kind_of(Own(parameters(), paced), 3)[:3] == ("elements", "", True)
    assert not kind_of(Own(parameters(), lion), 3).at_once


def test_the_size_of_the_state_is_known_by_the_sample() -> None:
    mine = parameters()
    sizes = sum(p.numel() for k, p in enumerate(mine) if k != 1)
    found = kind_of(optim.Adam(mine), 3).state_bytes
    assert found == 8 * sizes + 4 * (len(mine) - 1)
    assert kind_of(optim.SGD(parameters(), lr=0.1), 3).state_bytes == 0


def test_what_cannot_be_tried_cannot_be_divided() -> None:
    assert kind_of(optim.SparseAdam(parameters()), 3).divides == "nothing"
    without = parameters()
    for parameter in without:
        parameter.grad = None
    assert kind_of(optim.Adam(without), 3)[:2] == ("nothing", "no parameter has a gradient")


def test_a_single_parameter_is_cut() -> None:
    (only,) = [p for p in parameters() if p.shape == (300, 200)]
    assert kind_of(optim.AdamW([only]), 3).divides == "elements"
    assert kind_of(optim.Adafactor([only]), 3).divides == "matrices"


def test_nothing_of_the_optimizer_changes() -> None:
    mine = parameters()
    optimizer = optim.Adam(mine)
    optimizer.step()
    before = [p.detach().clone() for p in mine], {k: v.clone() for k, v in optimizer.state[mine[0]].items()}
    assert kind_of(optimizer, 3).divides == "elements"
    assert all(map(torch.equal, before[0], mine))
    assert all(torch.equal(v, optimizer.state[mine[0]][k]) for k, v in before[1].items())
    assert len(optimizer.param_groups[0]["params"]) == len(mine) and set(optimizer.state) <= set(mine)


def test_what_others_hold_of_gradients_and_state_says_nothing() -> None:
    one = cases.Pooled(cases.Lamb, "matrices")
    one.update(0, None, 0, first=False)
    one.gradients(0)
    for parameter, kept in one.optimizer.state.items():
        for value in (parameter.grad, kept["exp_avg"], kept["exp_avg_sq"]):
            if value is not None and value.numel() > 1:
                value.fill_(torch.nan)
    assert kind_of(one.optimizer, 3, dealt=True).divides == "matrices"


class SkipsEmpty(torch.optim.SGD):
    """Keeps nothing for a parameter of no elements."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None if not parameter.numel() else parameter.grad
        return super().step(closure)


def test_an_optimizer_that_skips_a_part_without_elements_is_not_for_a_cell() -> None:
    """No parameter here is so small that one owner has none of it when it is cut."""
    parameters = [nn.Parameter(torch.ones(8, 16)) for _ in range(3)]
    kind = expected_kind(SkipsEmpty(parameters, lr=0.1, momentum=0.9), 1)
    assert (kind.divides, kind.follows) == ("elements", False)
    with pytest.raises(
        ConfigError, match=r"keeps state for a parameter of no elements, too, .* got SkipsEmpty: set cell.fsdp=1"
    ):
        refuse_in_cell(SkipsEmpty(parameters, lr=0.1, momentum=0.9), 1)
    refuse_in_cell(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 1)


def test_a_large_parameter_is_copied_once_and_of_optimizers_of_torch_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_kind, "_LARGEST_ELEMENTS", 100)
    large, small = nn.Parameter(torch.ones(20, 10)), [nn.Parameter(torch.ones(20, 5)) for _ in range(20)]
    own, of_torch = cases.Lion([large, *small]), optim.AdamW([large, *small])

    def tried(optimizer: optim.Optimizer, **known: bool) -> bool:
        return any(p is large for group in tried_of(optimizer, 100, **known) for p in group)

    assert tried(own) and not tried(own, known=True) and not tried(of_torch)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("alloc: can't allocate memory: 9 bytes"),
    ],
)
def test_where_there_is_no_room_for_a_trial_nothing_is_said_of_the_optimizer(error: Exception) -> None:
    """calls: the update in which the memory is used up: of the whole, of a part, and of a longer trial."""
    for calls in (1, 3, 9):
        numbers = iter(range(1, 1000))

        class Hungry(cases.Lion):
            def step(self, closure: Any = None, numbers: Any = numbers, calls: int = calls) -> Any:
                if next(numbers) == calls:
                    raise error
                return super().step()

        with pytest.raises(MemoryError, match=r"no room for copies of some parameters of Hungry"):
            expected_kind(Hungry([nn.Parameter(torch.ones(8, 16)), nn.Parameter(torch.ones(99))]), 3)


def test_gradients_that_never_reach_an_optimizer_are_not_tried_and_a_refusal_says_which_differed() -> None:
    def made() -> optim.Optimizer:
        return Finite([nn.Parameter(torch.ones(8, 16)), nn.Parameter(torch.ones(99))])

    with pytest.raises(ConfigError, match=r"would differ, with gradients that are not finite: on_nonfinite=skip keeps"):
        refuse_undivided(made(), 3, 1)
    assert refuse_undivided(made(), 3, 1, unfit=False).divides == "elements"


def test_large_matrices_have_gradients_in_the_first_updates_of_a_long_trial_alone() -> None:
    small, large = [torch.ones(8, 16), torch.ones(99)], [torch.empty(4096, 4096, device="meta"), torch.ones(99)]
    assert far([small], absent=True).updates == far([small], absent=False).updates == AHEAD
    course = far([large], absent=True)
    assert course.updates == 8 and far([large], absent=False).updates == unfit([[*large, *large]]).updates == 2
    matrix, vector = (
        [course.gradient(k, n, first) is not None for k in range(8)]
        for n, first in enumerate((torch.ones(9, 9), torch.ones(9)))
    )
    assert matrix == [True, True, *[False] * 6] and sum(vector) == 7


def test_what_an_optimizer_prints_in_a_trial_is_not_shown_and_a_long_one_is_announced(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Talks(cases.Lion):
        def step(self, closure: Any = None) -> Any:
            print("an update")
            return super().step()

    optimizer = Talks([nn.Parameter(torch.ones(8, 16)), nn.Parameter(torch.ones(99))])
    with caplog.at_level("INFO", optimizer_kind.log.name):
        assert expected_kind(optimizer, 3).divides == "elements"
    assert capsys.readouterr().out == ""
    (said,) = caplog.records
    assert said.getMessage().startswith("copies of the optimizer Talks make 107 updates several times, of 227 elements")
    optimizer.step()
    assert capsys.readouterr().out == "an update\n"
