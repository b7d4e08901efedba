"""Calls of a plain training loop are named where they are made; before and after the loop they are what they were."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_
from torch.optim import lr_scheduler as lr

import everstep
from everstep.base.errors import ConfigError, TaskError
from everstep.script.unsupported import refuse_unsupported, schedule_of_epochs

DATA = [(torch.full((4,), float(i % 5)), torch.tensor(i % 2)) for i in range(64)]
Act = Callable[[nn.Module, torch.optim.Optimizer, Any], object]


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(
    inside: Act | None = None, after: Act | None = None, backward: Any = None, schedule: Any = None
) -> tuple[nn.Module, Any]:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = (schedule or (lambda one: lr.StepLR(one, 2)))(optimizer)
    for step in everstep.join(model, optimizer, DATA, micro_batch=2, steps=4, scheduler=scheduler):
        for batch in step:
            (backward or step.backward)(loss_of(model, batch))
            if inside is not None:
                inside(model, optimizer, scheduler)
        if after is not None:
            after(model, optimizer, scheduler)
    return model, optimizer


BATCH = (torch.ones(2, 4), torch.tensor([0, 1]))
BESIDE: list[tuple[str, Act]] = [
    ("zero_grad.. was called in the loop: remove it", lambda m, o, s: o.zero_grad()),
    ("zero_grad.. was called in the loop: remove it", lambda m, o, s: m.zero_grad()),
    ("optimizer.step.. was called in the loop: remove it", lambda m, o, s: o.step()),
    ("gradient clipping was called in the loop: .*clip_norm", lambda m, o, s: clip_grad_norm_(m.parameters(), 1.0)),
    (
        "gradient clipping was called in the loop: .*clip_norm",
        lambda m, o, s: torch.nn.utils.clip_grad_value_(m.parameters(), 1.0),
    ),
    ("gradient clipping was called in the loop: .*clip_norm", lambda m, o, s: clip_grad_value_(m.parameters(), 1.0)),
    (
        "gradient clipping was called in the loop: .*clip_norm",
        lambda m, o, s: clip_grads_with_norm_(m.parameters(), 1.0, torch.tensor(2.0)),
    ),
    (
        r"backward.inputs=.* of trained parameters, was called in the loop: write step.backward",
        lambda m, o, s: loss_of(m, BATCH).backward(inputs=list(m.parameters())),
    ),
    (
        r"backward.. was called in the loop: write step.backward",
        lambda m, o, s: torch.autograd.backward(loss_of(m, BATCH)),
    ),
]


@pytest.mark.parametrize(("text", "act"), BESIDE)
@pytest.mark.parametrize("where", ["inside", "after"])
def test_what_belongs_to_another_loop_is_named(text: str, act: Act, where: str) -> None:
    with pytest.raises(TaskError, match=text):
        train(**{where: act})


def clip_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.clamp_(-1e-3, 1e-3)


def no_more_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def test_gradients_that_are_used_after_the_batches_are_refused() -> None:
    with pytest.raises(TaskError, match=r"\.grad of a .* outside the step's batches, .*clip_norm.*step_pre_hook"):
        train(after=lambda m, o, s: clip_by_hand(m))
    train(after=lambda m, o, s: no_more_gradients(m))  # they are None there


def test_a_hook_of_the_optimizer_sees_and_changes_the_gradients() -> None:
    torch.manual_seed(0)
    model, seen = nn.Linear(4, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = copy.deepcopy(model)

    def clip(*_: Any) -> None:
        seen.append(all(parameter.grad is not None for parameter in model.parameters()))
        clip_by_hand(model)

    optimizer.register_step_pre_hook(clip)
    for step in everstep.join(model, optimizer, DATA, micro_batch=2, steps=3):
        for batch in step:
            step.backward(loss_of(model, batch))
    assert all(seen) and 0 < (model.weight - before.weight).abs().max() <= 3e-3 + 1e-6


class Clips(torch.optim.SGD):
    """Clips in its own step."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        clip_grad_norm_(parameters, 0.1)
        torch.nn.utils.clip_grad_value_(parameters, 0.05)
        return super().step()


def test_an_optimizer_may_clip_in_its_own_step() -> None:
    before = nn.Linear(4, 2).requires_grad_(False)
    model = nn.Linear(4, 2)
    before.load_state_dict(model.state_dict())
    for step in everstep.join(model, Clips(model.parameters(), lr=1.0), DATA, micro_batch=2, steps=4):
        for batch in step:
            step.backward(loss_of(model, batch))
    moved = (model.weight - before.weight).abs().max()
    assert 0 < moved <= 4 * 0.05 + 1e-6


class Halves:
    """A scheduler of the user's own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.param_groups[0]["lr"] /= 2

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr.StepLR(o, 2),
    "sequential": lambda o: lr.SequentialLR(o, [lr.LinearLR(o), lr.CosineAnnealingLR(o, 4)], [1]),
    "chained": lambda o: lr.ChainedScheduler([lr.LinearLR(o), lr.ExponentialLR(o, 0.9)]),
    "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 4),
    "several": lambda o: [lr.CosineAnnealingWarmRestarts(o, 4), lr.ChainedScheduler([lr.ExponentialLR(o, 0.9)])],
    "own": Halves,
}


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("where", ["inside", "after"])
def test_a_scheduler_of_the_job_is_stepped_by_the_job_alone(kind: str, where: str) -> None:
    def step(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        (scheduler[0] if isinstance(scheduler, list) else scheduler).step()

    before = [one.step for one in (lr.LRScheduler, lr.SequentialLR, lr.CosineAnnealingWarmRestarts, Halves)]
    with pytest.raises(TaskError, match=r"scheduler.step\(\) was called in the loop: remove it"):
        train(**{where: step}, schedule=SCHEDULES[kind])
    assert before == [one.step for one in (lr.LRScheduler, lr.SequentialLR, lr.CosineAnnealingWarmRestarts, Halves)]
    assert "step" not in vars(lr.StepLR)


def test_a_part_of_the_jobs_scheduler_is_not_stepped_by_the_loop() -> None:
    with pytest.raises(TaskError, match=r"scheduler.step\(\) was called in the loop: remove it"):
        train(after=lambda m, o, s: s._schedulers[1].step(), schedule=SCHEDULES["sequential"])


def test_the_loop_may_step_a_scheduler_of_its_own_of_the_same_kind() -> None:
    other = lr.StepLR(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0), 1)
    train(after=lambda m, o, s: other.step())
    assert other.last_epoch == 4


def test_a_loop_may_say_where_in_its_cycle_a_schedule_is() -> None:
    rates: list[float] = []

    def place(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        scheduler.step((len(rates) + 1) / 3)
        rates.append(optimizer.param_groups[0]["lr"])

    train(after=place, schedule=SCHEDULES["restarts"])
    alone = SCHEDULES["restarts"](optimizer := torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1))
    for number, rate in enumerate(rates, 1):
        alone.step(number / 3)
        assert optimizer.param_groups[0]["lr"] == rate


@pytest.mark.parametrize("backward", [lambda loss: loss.backward(), lambda loss: torch.autograd.backward(loss)])
def test_the_loss_goes_through_the_step(backward: Any) -> None:
    with pytest.raises(TaskError, match=r"step\.backward\(loss\)"):
        train(backward=backward)


def test_gradients_of_other_things_are_the_users_own() -> None:
    def of_an_input(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        given = torch.ones(4, requires_grad=True)
        model(given).sum().backward(inputs=[given])
        assert given.grad is not None

    train(after=of_an_input)


def test_a_model_may_be_saved_and_copied_in_the_loop() -> None:
    """A file of it is read where Everstep is not installed, and a copy is a model like any other."""

    def keep(model: nn.Module, optimizer: Any = None, scheduler: Any = None) -> None:
        file = io.BytesIO()
        torch.save(model, file)
        assert b"everstep" not in file.getvalue()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            loss_of(other, BATCH).backward(inputs=list(other.parameters()))
            other.zero_grad()
            state = torch.default_generator.get_state()
            given = other(BATCH[0])
            assert torch.equal(state, torch.default_generator.get_state())
            assert torch.equal(given, model(BATCH[0]))

    model, _ = train(inside=keep, after=keep)
    keep(model)
    assert not model._forward_pre_hooks


def test_outside_the_loop_everything_is_as_it_was() -> None:
    def patched() -> list[Any]:
        return [torch.Tensor.backward, vars(torch.autograd).copy(), vars(torch.nn.utils.clip_grad).copy()]

    before = patched()
    model, optimizer = train()
    assert before == patched() and "grad" not in vars(nn.Parameter)
    assert "zero_grad" not in vars(model) and "zero_grad" not in vars(optimizer)
    optimizer.zero_grad()
    loss_of(model, DATA[0]).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()


MODEL = nn.Linear(4, 2)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)
WRONG: list[tuple[Any, Any, Any, str]] = [
    (3, SGD, None, "expected a torch.nn.Module as the model, got int"),
    (MODEL, [SGD, torch.optim.SGD(MODEL.parameters(), lr=1.0)], None, "the optimizers 0 and 1 hold the same parameter"),
    (MODEL, None, None, "expected one optimizer, got nothing"),
    ([MODEL], SGD, None, "expected a torch.nn.Module as the model, got list: put them into one .torch.nn.ModuleDict"),
    (MODEL, SGD, 3, "expected a scheduler with step"),
    (
        MODEL,
        SGD,
        type("Stateless", (), {"step": len, "state_dict": dict})(),
        "load_state_dict.., got Stateless: add them",
    ),
    (MODEL, SGD, type("ByEpoch", (Halves,), {"step": lambda self, epoch: None})(SGD), "ByEpoch.step needs an argument"),
    (nn.Embedding(4, 2, sparse=True), SGD, None, "the model .Embedding. has sparse gradients.*sparse=False"),
    (
        nn.Sequential(nn.EmbeddingBag(4, 2, max_norm=1.0)),
        SGD,
        None,
        "0 .EmbeddingBag. has max_norm=1: .*leave",
    ),
]


def test_a_task_has_one_optimizer_and_a_scheduler_that_counts_steps() -> None:
    with pytest.raises(ConfigError, match="expected one optimizer, got list: give one optimizer with several"):
        refuse_unsupported(MODEL, [SGD, SGD], None)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau needs a metric"):
        refuse_unsupported(MODEL, SGD, torch.optim.lr_scheduler.ReduceLROnPlateau(SGD))


def test_what_the_file_of_weights_cannot_hold_is_refused_before_the_start() -> None:
    for kept in (False, True):
        model = nn.Sequential(nn.Linear(2, 2))
        model[0].register_buffer("c", torch.zeros(2, dtype=torch.complex128), persistent=kept)
        with (
            pytest.raises(ConfigError, match=r"0\.c has dtype complex128, which safetensors files cannot hold")
            if kept
            else contextlib.nullcontext()
        ):
            refuse_unsupported(model, torch.optim.SGD(model.parameters()), None)


def cycle(steps: int, *, after: int = 0) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    found: Any = lr.OneCycleLR(optimizer, 0.2, total_steps=steps)
    if after:
        found = lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer), found], [after])
    return optimizer, found


def test_a_schedule_that_ends_before_the_job_is_refused_before_the_start() -> None:
    optimizer, short = cycle(6)
    loader: Any = torch.utils.data.DataLoader(DATA, batch_size=16, shuffle=True, drop_last=True)  # type: ignore[arg-type]
    wanted = "OneCycleLR has total_steps=6, but the job's last step is 8, and .* total_steps=8, or the job steps=6"
    with pytest.raises(ConfigError, match=wanted):
        everstep.join(MODEL, optimizer, loader, scheduler=short, epochs=2)
    optimizer, short = cycle(6, after=3)
    with pytest.raises(ConfigError, match=r"stepped 7 times: give it total_steps=7, or the job steps=9"):
        everstep.join(MODEL, optimizer, DATA, scheduler=short, steps=10)


@pytest.mark.parametrize(("steps", "after"), [(4, 0), (2, 2)])
def test_a_schedule_may_end_with_the_job(steps: int, after: int) -> None:
    optimizer, schedule = cycle(steps, after=after)
    for step in everstep.join(MODEL, optimizer, DATA, micro_batch=2, steps=4, scheduler=schedule):
        for batch in step:
            step.backward(loss_of(MODEL, batch))
    inner = schedule._schedulers[1] if after else schedule
    assert inner.last_epoch == steps
    with pytest.raises(ValueError, match="Tried to step"):
        schedule.step()


@pytest.mark.parametrize(("model", "optimizer", "scheduler", "text"), WRONG)
def test_what_cannot_be_trained_is_refused_before_the_start(
    model: Any, optimizer: Any, scheduler: Any, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        everstep.join(model, optimizer, DATA, scheduler=scheduler, steps=1)


def test_a_pass_of_the_jobs_own_may_be_called_through_a_mode_of_torch() -> None:
    """`torch.set_default_device` and the like have torch call `torch.autograd.backward` from a file of its own."""
    with torch.device("cpu"):
        train()


@pytest.mark.parametrize(
    ("scheduler", "epochs", "steps", "said"),
    [
        (lambda o: lr.StepLR(o, 30), 90, 90 * 500, "gamma=0.1 makes the learning rate nothing"),
        (lambda o: lr.StepLR(o, 30 * 500), 90, 90 * 500, ""),
        (lambda o: lr.ExponentialLR(o, 0.9), None, 90 * 500, "gamma=0.9 makes the learning rate nothing"),
        (lambda o: lr.ExponentialLR(o, 0.9999), 90, 90 * 500, ""),
        (lambda o: lr.ExponentialLR(o, 1.1), 90, 10**9, ""),
        (lambda o: lr.CosineAnnealingLR(o, 90), 90, 90 * 500, "it is over after 90 steps, the number of epochs"),
        (
            lambda o: lr.SequentialLR(o, [lr.LinearLR(o), lr.CosineAnnealingLR(o, 85)], [5]),
            *(90, 90 * 500),
            "SequentialLR is stepped once per update, 45000 times in this job, and it is over after 90 steps",
        ),
        (lambda o: lr.CosineAnnealingLR(o, 90), 90, 90, ""),
        (lambda o: lr.MultiStepLR(o, [60, 30]), 90, 90 * 500, "its milestones (30, 60) look like those of 90 epochs"),
        (lambda o: lr.MultiStepLR(o, [60, 30]), 90, 90 * 4, ""),
        (lambda o: lr.MultiStepLR(o, [60, 30]), None, 500, ""),
        (lambda o: lr.LambdaLR(o, lambda n: 0.0), 90, 90 * 500, ""),
    ],
)
def test_a_schedule_that_counts_epochs_is_told(scheduler: Any, epochs: int | None, steps: int, said: str) -> None:
    one = scheduler(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    remark = schedule_of_epochs(one, epochs, steps)
    assert said in remark and ("if step.epochs_over: scheduler.step()" in remark) == bool(said)
