"""Loops around `join` in this process: what they may give it, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler, TensorDataset

import everstep
from everstep.base.errors import ConfigError, TaskError
from everstep.observe.events import read_events
from everstep.train.run import Run, Step

GENERATOR = torch.Generator().manual_seed(3)
DATA = TensorDataset(torch.randn(48, 4, generator=GENERATOR), torch.randint(0, 2, (48,), generator=GENERATOR))


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def joined(model: nn.Module, optimizer: Any = None, data: Any = DATA, **config: Any) -> Run:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return everstep.join(model, optimizer, data, **{"lanes": 4, "micro_batch": 2, "steps": 3, **config})


def trained(run: Run, batch: Callable[[Step, Any, Any], Any] | None = None) -> list[float]:
    """Losses of the steps."""
    found = []
    for step in run:
        for x, y in step:
            if batch is None:
                step.backward(cross_entropy(run.model(x), y))
            else:
                batch(step, x, y)
        found.append(step.loss)
    return found


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, weights(one), weights(other)))


# ---- data


def test_a_loader_trains_as_its_dataset_does() -> None:
    one, other = network(), network()
    trained(joined(one))
    trained(joined(other, data=DataLoader(DATA, batch_size=8, shuffle=True), micro_batch=None))
    assert equal(one, other)


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    seen: list[torch.Tensor] = []

    def batch(step: Step, x: Any, y: Any) -> None:
        seen.append(x)
        step.backward(cross_entropy(model(x), y))

    model = network()
    trained(joined(model, data=DataLoader(DATA, batch_size=8), micro_batch=None, verify_every=0), batch)
    assert torch.equal(torch.cat(seen[1:]), DATA.tensors[0][:24])  # the first lane is computed twice


def test_accumulation_is_as_many_lanes_more() -> None:
    one, other = network(), network()
    trained(joined(one, lanes=8))
    trained(joined(other, data=DataLoader(DATA, batch_size=8, shuffle=True), micro_batch=None, accumulate=2))
    assert equal(one, other)


def test_a_loader_is_evaluated_as_its_dataset_is() -> None:
    model = network()
    run = joined(model)
    found = []

    def hits(batch: Any) -> dict[str, torch.Tensor]:
        return {"hits": torch.tensor([float((model(batch[0]).argmax(1) == batch[1]).sum()), float(len(batch[1]))])}

    for step in run:
        for x, y in step:
            step.backward(cross_entropy(model(x), y))
        found += [run.evaluate(hits, DATA, batch_size=9), run.evaluate(hits, DataLoader(DATA, 9, shuffle=True))]
    assert found[0] == found[1] and found[-1] == found[-2]


def test_batches_of_an_evaluation_lie_as_those_of_the_training_do() -> None:
    """Bits depend on it: where a collate cuts a batch out of a tensor, it would lie anywhere."""
    model = network()
    run = joined(model)

    def first(x: torch.Tensor) -> dict[str, torch.Tensor]:
        assert x.data_ptr() % 64 == 0 and x.shape == (8, 4)
        return {"first": torch.stack([x[0, 0].double(), torch.ones((), dtype=torch.float64)])}

    for step in run:
        for x, y in step:
            step.backward(cross_entropy(model(x), y))
    run.evaluate(first, DATA, batch_size=8, collate=lambda samples: torch.zeros(9, 5)[1:, 1:])


class Shaken(Dataset[Any]):
    """Drawn by a generator of its own, which no rehearsal sees where a library draws."""

    own = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> Any:
        return DATA[index][0] + torch.rand(4, generator=self.own), DATA[index][1]


def test_samples_that_differ_whenever_they_are_read_are_refused_unless_the_job_is_inexact(tmp_path: Path) -> None:
    told = "the dataset gives another sample 0 when it is read again"
    given = {"data": Shaken(), "rehearse": False}
    with pytest.raises(ConfigError, match=rf"{told} \(a transform .* numerics.changed=warn"):
        trained(joined(network(), run_dir=tmp_path / "refused", **given))
    trained(joined(network(), run_dir=tmp_path / "warned", **given, **{"numerics.changed": "warn"}))
    assert [e["reason"] for e in read_events(tmp_path / "warned/events.jsonl") if e["kind"] == "warning"] == [told]


class Failing(Dataset[Any]):
    """Gives zeros for the first sample if it is read again."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> Any:
        self.reads += not index
        return DATA[index] if index or self.reads == 1 else (torch.zeros(4), DATA[0][1])


def test_a_sample_that_one_life_reads_otherwise_does_not_end_a_job_that_has_trained(tmp_path: Path) -> None:
    settings = {"run_dir": tmp_path, "rehearse": False, "checkpoint.disk.every_steps": 1}
    trained(joined(network(), **settings))
    trained(joined(network(), data=Failing(), **settings, steps=4))
    told = [e["reason"] for e in read_events(tmp_path / "events.jsonl") if e["kind"] == "warning"]
    assert told[-1:] == ["the dataset gives another sample 0 when it is read again"]
    with pytest.raises(ConfigError, match="gives another sample 0"):
        trained(joined(network(), data=Failing(), **{**settings, "run_dir": tmp_path / "fresh"}))


# ---- several losses


def plainly(model: nn.Module, batch: Callable[[Any, Any], Any], steps: int = 3) -> None:
    """As a loop without Everstep trains, on the samples of a job of one lane of 8."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = [i for n in range(steps) for i in samples(joined(network(), lanes=1, micro_batch=8), n + 1)]
    for n in range(steps):
        items = [DATA[i] for i in order[8 * n : 8 * n + 8]]
        optimizer.zero_grad()
        batch(torch.stack([x for x, _ in items]), torch.stack([y for _, y in items]))
        optimizer.step()


def test_several_losses_of_a_batch_are_added_up() -> None:
    one, other = network(), network()

    def batch(step: Step, x: Any, y: Any) -> None:
        step.backward(cross_entropy(one(x), y))
        step.backward(one(x).square().mean())

    def plain(x: Any, y: Any) -> None:
        cross_entropy(other(x), y).backward()
        other(x).square().mean().backward()

    losses = trained(joined(one, lanes=1, micro_batch=8), batch)
    plainly(other, plain)
    assert equal(one, other)
    again = network()
    first = trained(joined(again, lanes=1, micro_batch=8), lambda s, x, y: s.backward(cross_entropy(again(x), y)))
    assert losses[0] > first[0]


def test_the_lanes_of_several_losses_fold_as_those_of_one() -> None:
    """Statistics are those after the last forward pass, whichever lane is the last of its node."""
    models = [nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def twice(step: Step, x: Any, y: Any) -> None:
        step.backward(cross_entropy(models[0](x), y))
        step.backward(models[0](x).sum() * 0.0)

    def once(step: Step, x: Any, y: Any) -> None:
        loss = cross_entropy(models[1](x), y)
        models[1](x)
        step.backward(loss + 0.0)

    trained(joined(models[0], steps=1), twice)
    trained(joined(models[1], steps=1), once)
    assert all(map(torch.equal, models[0].state_dict().values(), models[1].state_dict().values()))


def test_losses_of_one_batch_share_a_weight() -> None:
    def batch(step: Step, x: Any, y: Any) -> None:
        step.backward(model(x).sum(), weight=2)
        step.backward(model(x).sum(), weight=3)

    model = network()
    with pytest.raises(TaskError, match="called for one batch with the weights 2 and 3"):
        trained(joined(model), batch)


# ---- several optimizers, and what goes with them


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.g = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.d = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def losses(self, x: Any) -> tuple[Any, Any]:
        made = self.g(x)
        return (self.d(x) - self.d(made.detach())).mean(), self.d(made).square().mean()


def optimizers(pair: Pair) -> dict[str, torch.optim.Optimizer]:
    return {"d": torch.optim.Adam(pair.d.parameters(), lr=0.02), "g": torch.optim.SGD(pair.g.parameters(), lr=0.1)}


def schedulers(given: dict[str, torch.optim.Optimizer]) -> dict[str, Any]:
    return {name: torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for name, one in given.items()}


@pytest.mark.parametrize("by_name", [True, False])
def test_each_optimizer_gets_its_gradients_and_all_are_stepped_at_the_end(by_name: bool) -> None:
    one, other = Pair(), Pair()
    given, own = optimizers(one), optimizers(other)
    slower, own_slower = schedulers(given), schedulers(own)

    def batch(step: Step, x: Any, y: Any) -> None:
        d_loss, g_loss = one.losses(x)
        step.backward(d_loss, optimizer="d" if by_name else given["d"])
        step.backward(g_loss, optimizer="g" if by_name else given["g"])

    run = joined(one, given, lanes=1, micro_batch=8, steps=4, scheduler=slower)
    chosen = [samples(run, n + 1) for n in range(4)]
    trained(run, batch)
    for indices in chosen:
        d_loss, g_loss = other.losses(torch.stack([DATA[i][0] for i in indices]))
        d_loss.backward(inputs=list(other.d.parameters()))
        g_loss.backward(inputs=list(other.g.parameters()))
        for name in own:
            own[name].step()
            own[name].zero_grad()
            own_slower[name].step()
    assert equal(one, other)
    assert given["d"].param_groups[0]["lr"] == own["d"].param_groups[0]["lr"] == 0.005


def test_an_optimizer_that_is_alone_has_its_name() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for given, name in (({"all": optimizer}, "all"), ([optimizer], "0")):
        trained(joined(model, given, steps=1), lambda s, x, y, n=name: s.backward(model(x).sum(), optimizer=n))
    with pytest.raises(TaskError, match=r"expected one that join was given \(all\), got other"):
        trained(joined(model, {"all": optimizer}), lambda s, x, y: s.backward(model(x).sum(), optimizer="other"))


def test_optimizers_that_cannot_be_several_are_refused() -> None:
    pair, other = Pair(), network()
    every = torch.optim.SGD(pair.parameters(), lr=0.1)
    given: Any
    for given, words in (
        ([every, torch.optim.SGD(pair.g.parameters(), lr=0.1)], "the optimizers 0 and 1 hold the same parameter"),
        ({"g": every, "d": pair.d}, "optimizer d: expected a torch.optim.Optimizer, got Sequential"),
        ([], "expected at least one optimizer, got an empty collection"),
    ):
        with pytest.raises(ConfigError, match=words):
            everstep.join(pair, given, DATA, lanes=4, micro_batch=2, steps=1)
    foreign = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(other.parameters(), lr=0.1), 1)
    with pytest.raises(ConfigError, match="StepLR drives an optimizer that join was not given"):
        joined(pair, optimizers(pair), scheduler=foreign)
    with pytest.raises(ConfigError, match="zero: the state of one optimizer alone"):
        joined(pair, optimizers(pair), zero={"stage": 1})
    wrapped = type("AcceleratedOptimizer", (), {"__module__": "accelerate.optimizer"})()
    with pytest.raises(ConfigError, match="AcceleratedOptimizer: accelerate's prepare has wrapped the optimizer"):
        joined(pair, wrapped)
    with pytest.raises(ConfigError, match=r"state: expected objects by name .* got list"):
        joined(pair, every, state=[1, 2])
    with pytest.raises(TaskError, match=r"expected one that join was given \(d, g\), got SGD"):
        trained(joined(pair, optimizers(pair)), lambda s, x, y: s.backward(pair.losses(x)[0], optimizer=every))


def test_schedulers_of_one_optimizer_are_stepped_in_turn() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    kinds = torch.optim.lr_scheduler
    plateau = kinds.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    given = [kinds.StepLR(optimizer, 2, 0.5), kinds.ExponentialLR(optimizer, 0.9), plateau]
    run = joined(model, optimizer, steps=4, scheduler=given)
    rates = []
    for step in run:
        for x, y in step:
            step.backward(cross_entropy(model(x), y))
        plateau.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.72, 0.0324, 0.002916, 0.00013122])


class Level(Sampler[int]):
    """The samples below a level."""

    level = 16

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.level))


class Growing(Dataset[Any]):
    size = 48

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return DATA[index % 48]


def loader(data: Any = DATA, **more: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=8, **more)


def grow(data: Any) -> None:
    (data.dataset if isinstance(data, DataLoader) else data).size += 8


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], None], str]] = {
    "length": (Growing, grow, "had 48 samples when the job began, and has 56 now"),
    "length behind a loader": (lambda: loader(Growing(), shuffle=True), grow, "had 48 samples .* has 56 now"),
    "collate": (loader, lambda data: setattr(data, "collate_fn", list), "the collate_fn of the DataLoader has changed"),
    "batch size": (loader, lambda data: setattr(data.batch_sampler, "batch_size", 4), "the batch_size of the DataLoa"),
    "order": (
        lambda: loader(sampler=Level()),
        lambda data: setattr(data.sampler, "level", 24),
        "the order of the sampler of the DataLoader has changed since join has read it, with no effect on the job: let",
    ),
    "sampler": (
        lambda: loader(shuffle=True),
        lambda data: setattr(data.batch_sampler, "sampler", SequentialSampler(DATA)),
        "the order of the sampler of the DataLoader has changed",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_was_read_before_the_loop_is_not_changed_in_it(what: str) -> None:
    make, change, text = CHANGES[what]
    model, data = network(), make()
    run = joined(model, data=data, epochs=3, steps=None, micro_batch=None if isinstance(data, DataLoader) else 2)
    done = []
    with pytest.raises(TaskError, match=text):
        for step in run:
            if step.number == 2:
                change(data)
            for x, y in step:
                step.backward(cross_entropy(model(x), y))
            done.append(step.number)
    assert done == ([1, 2] if what == "order" else [1, 2, 3, 4, 5, 6] if what == "sampler" else [1])


@pytest.mark.parametrize("make", [make for make, _, _ in CHANGES.values()], ids=list(CHANGES))
def test_what_was_read_may_be_read_again(make: Callable[[], Any]) -> None:
    data = make()
    size = None if isinstance(data, DataLoader) else 2
    assert len(trained(joined(network(), data=data, epochs=3, steps=None, micro_batch=size))) in (6, 18)


def test_elements_of_the_gradient_are_clipped() -> None:
    one, other = network(), network()
    trained(joined(one, lanes=1, micro_batch=8, clip_value=0.01))

    def plain(x: Any, y: Any) -> None:
        cross_entropy(other(x), y).backward()
        torch.nn.utils.clip_grad_value_(other.parameters(), 0.01)

    plainly(other, plain)
    assert equal(one, other)


def test_a_schedule_that_counts_epochs_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    run = joined(model, optimizer, scheduler=scheduler, steps=300)
    assert "StepLR is stepped once per update, 300 times in this job" in capsys.readouterr().err
    assert ["StepLR" in remark for remark in run.remarks] == [True]
    run.close()


def test_a_scaler_that_is_switched_off_does_no_harm() -> None:
    model, scaler = network(), torch.amp.GradScaler("cpu", enabled=False)

    def batch(step: Step, x: Any, y: Any) -> None:
        step.backward(scaler.scale(cross_entropy(model(x), y)))
        scaler.update()

    assert len(trained(joined(model), batch)) == 3


def test_a_scaler_is_refused_by_name() -> None:
    model, scaler = network(), torch.amp.GradScaler("cpu")
    with pytest.raises(TaskError, match=r"a GradScaler was used in the loop: .* give join\(precision='fp16'"):
        trained(joined(model), lambda step, x, y: step.backward(scaler.scale(cross_entropy(model(x), y))))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for call in (lambda: scaler.unscale_(opt), lambda: scaler.step(opt), lambda: scaler.update(torch.ones(()))):
        with pytest.raises(TaskError, match=r"a GradScaler was used in the loop: .* give join\(precision='fp16'"):
            trained(joined(model), lambda step, x, y, call=call: (step.backward(cross_entropy(model(x), y)), call()))
    assert scaler.scale(torch.ones(())) == 65536.0
    with pytest.raises(ConfigError, match=r"state\['scaler'\] is a GradScaler: .* give join\(precision='fp16'"):
        joined(model, state={"scaler": scaler})
    joined(model, state={"scaler": torch.amp.GradScaler("cpu", enabled=False)}).close()


# ---- values that are logged


def test_logged_values_are_means_over_the_global_batch(tmp_path: Path) -> None:
    model, hits, run_dir = network(), [0.0], tmp_path / "run"
    metrics = []

    def batch(step: Step, x: Any, y: Any) -> None:
        out = model(x)
        step.backward(cross_entropy(out, y))
        step.log(accuracy=((out.argmax(1) == y).sum(), len(y)), ones=(1, 1))
        step.log(ones=(2.0, 1))

    run = joined(model, run_dir=run_dir, rehearse=False)
    for step in run:
        with torch.no_grad():
            hits[0] = sum(float((model(DATA[i][0]).argmax() == DATA[i][1]).sum()) for i in samples(run, step.number))
        for x, y in step:
            batch(step, x, y)
        assert step.metrics == {"accuracy": hits[0] / 8, "ones": 1.5}
        metrics.append(step.metrics)
        run.log(share=step.number / 4)
        run.log(number=step.number)
    run.log(last=7)
    events = read_events(run_dir / "events.jsonl")
    assert [e["metrics"] for e in events if e["kind"] == "step_committed"] == metrics
    told = {e["step"]: e["metrics"] for e in events if e["kind"] == "logged"}
    assert told == {
        1: {"share": 0.25, "number": 1},
        2: {"share": 0.5, "number": 2},
        3: {"share": 0.75, "number": 3, "last": 7},
    }


def samples(run: Run, number: int) -> list[int]:
    return [
        i for lane in range(run._session.view.order.lanes) for _, i in run._session.view.order.samples(number, lane)
    ]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1.0, r"step.log\(value=...\): expected \(sum, count\) over the batch, got 1.0: give e.g."),
        (torch.ones(3), r"got Tensor of shape \(3,\)"),
        (("a", 1), r"got \('a', 1\)"),
    ],
)
def test_what_is_no_sum_and_count_is_refused(value: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        trained(joined(network()), lambda step, x, y: step.log(value=value))


def test_each_log_has_its_place() -> None:
    run = joined(network())
    with pytest.raises(TaskError, match=r"step.log was called outside"):
        for step in run:
            step.log(x=(1, 2))
    with pytest.raises(TaskError, match=r"run.log\(x=...\): expected a number, got \(1, 2\)"):
        joined(network()).log(x=(1, 2))
    with pytest.raises(TaskError, match="expected at most 32 names"):
        joined(network()).log(**{f"n{i}": i for i in range(40)})
    with pytest.raises(TaskError, match="expected a name of 1 to 60 printable characters"):
        joined(network()).log(**{"a\n": 1})
