"""State: round trips of every optimizer and scheduler, digests, blocks, snapshots, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim import lr_scheduler as lr

from everstep.base.errors import CheckpointCorrupt, ConfigError
from everstep.base.extents import Extents
from everstep.exact.digest import bytes_of, tensor_digest
from everstep.exact.image import BLOCK_BYTES, Image, Outline, StateEntry
from everstep.exact.layout import untie
from everstep.exact.state import ModelState
from odd_optimizers import Whitened


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.wide = nn.Linear(4, 300)
        self.out = nn.Linear(300, 260)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2, 2))
        self.register_buffer("table", torch.arange(7.0), persistent=False)
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.relu(self.wide(self.norm(self.conv(x)).mean((2, 3)))))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2 and p.requires_grad]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.003}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: optim.SGD(m.parameters(), lr=0.05),
    "sgd-momentum": lambda m: optim.SGD(two_groups(m), lr=0.05, momentum=0.9, nesterov=True),
    "sgd-fused": lambda m: optim.SGD(m.parameters(), lr=0.05, momentum=0.9, fused=True),
    "adamw": lambda m: optim.AdamW(two_groups(m), lr=0.01),
    "adamw-loop": lambda m: optim.AdamW(m.parameters(), lr=0.01, foreach=False, amsgrad=True),
    "adamw-foreach": lambda m: optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "adamw-fused": lambda m: optim.AdamW(m.parameters(), lr=0.01, fused=True, amsgrad=True),
    "adamw-tensor-lr": lambda m: optim.AdamW(m.parameters(), lr=torch.tensor(0.01)),
    "adam": lambda m: optim.Adam(m.parameters(), lr=0.01),
    "adafactor": lambda m: optim.Adafactor(m.parameters(), lr=0.01),
    "muon": lambda m: optim.Muon(matrices(m), lr=0.01),
    "rmsprop": lambda m: optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda m: optim.Adagrad(m.parameters(), lr=0.01),
    "adadelta": lambda m: optim.Adadelta(m.parameters(), lr=0.5),
    "adamax": lambda m: optim.Adamax(m.parameters(), lr=0.01),
    "nadam": lambda m: optim.NAdam(m.parameters(), lr=0.01),
    "radam": lambda m: optim.RAdam(m.parameters(), lr=0.01),
    "asgd": lambda m: optim.ASGD(m.parameters(), lr=0.01, t0=2),
    "rprop": lambda m: optim.Rprop(m.parameters(), lr=0.01),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "onecycle": lambda o: lr.OneCycleLR(o, max_lr=0.1, total_steps=40),
    "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=0),
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 0.9**step),
    "multistep": lambda o: lr.MultiStepLR(o, [2, 4, 4], gamma=0.3),
    "sequential": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=3), lr.CosineAnnealingLR(o, 10)], milestones=[3]
    ),
    "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, total_iters=3), lr.ExponentialLR(o, 0.9)]),
    "cyclic": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=3),
}


class Job:
    """A model in training; `steps` is deterministic."""

    def __init__(self, optimizer: str = "adamw", scheduler: str | None = None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer) if scheduler else None
        self.state = ModelState(self.model, self.optimizer, self.scheduler)

    def steps(self, first: int, count: int) -> None:
        for step in range(first, first + count):
            generator = torch.Generator().manual_seed(step)
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(3, 1, 6, 6, generator=generator)).square().mean()
            loss.backward()
            self.optimizer.step()
            if isinstance(self.scheduler, lr.ReduceLROnPlateau):
                self.scheduler.step(loss.item())
            elif self.scheduler is not None:
                self.scheduler.step()


def carried(state: Any) -> tuple[dict[str, Any], list[bytes]]:
    """Manifest and blocks as they arrive at the other end of a wire."""
    manifest = json.loads(json.dumps(state.manifest()))
    return manifest, [bytes(state.read_block(i)) for i in range(state.n_blocks)]


def same_bits(a: Job, b: Job) -> bool:
    def tensors(job: Job) -> Iterator[bytes]:
        yield from (bytes(bytes_of(t)) for t in (*job.model.parameters(), *job.model.buffers()))
        for parameter in job.model.parameters():
            state = job.optimizer.state.get(parameter, {})
            yield repr(sorted(state)).encode()
            for _, value in sorted(state.items()):
                yield bytes(bytes_of(value)) if isinstance(value, torch.Tensor) else repr(value).encode()
        for group in job.optimizer.param_groups:
            yield repr({k: v for k, v in group.items() if k != "params"}).encode()

    return list(tensors(a)) == list(tensors(b))


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [(name, None) for name in OPTIMIZERS]
    + [("sgd-momentum", name) for name in SCHEDULERS]
    + [("adamw-tensor-lr", "onecycle")],
)
def test_a_restored_job_goes_on_with_the_same_bits(optimizer: str, scheduler: str | None) -> None:
    job = Job(optimizer, scheduler)
    job.steps(1, 3)
    manifest, blocks = carried(job.state)
    digest = job.state.state_digest(3)
    fresh, other = Job(optimizer, scheduler, seed=1), Job(optimizer, scheduler, seed=2)
    other.steps(50, 2)  # has state of its own to overwrite
    for joiner in (fresh, other):
        assert joiner.state.state_digest(3) != digest
        joiner.state.load(manifest, blocks.__getitem__)
        assert same_bits(job, joiner)
        assert joiner.state.state_digest(3) == digest
        assert joiner.state.model_digest() == job.state.model_digest()
    job.steps(4, 3)
    for joiner in (fresh, other):
        joiner.steps(4, 3)
        assert same_bits(job, joiner)
        assert joiner.state.state_digest(6) == job.state.state_digest(6) != digest


@pytest.mark.parametrize("how", [lambda q: q, torch.Tensor.contiguous, lambda q: q.contiguous().t()])
@pytest.mark.parametrize("older", [0, 1, 4])
def test_what_an_optimizer_keeps_lies_as_before(how: Callable[[torch.Tensor], torch.Tensor], older: int) -> None:
    """Products of matrices have other bits where strides are other ones. older: updates that a state had which is
    written over."""

    def made(updates: int) -> tuple[nn.Parameter, Whitened]:
        p = nn.Parameter(torch.randn(67, 67, generator=torch.Generator().manual_seed(1)))
        optimizer = Whitened([p], how)
        step(p, optimizer, updates)
        return p, optimizer

    def step(p: nn.Parameter, optimizer: Whitened, updates: int) -> None:
        for _ in range(updates):
            p.grad = p.detach().cos()
            optimizer.step()

    def state(p: nn.Parameter, optimizer: Whitened) -> ModelState:
        model = nn.Module()
        model.weight = p
        return ModelState(model, optimizer)

    p, optimizer = made(2)
    manifest, blocks = carried(state(p, optimizer))
    q, other = made(older)
    state(q, other).load(manifest, blocks.__getitem__)
    for key in ("basis", "more"):
        mine, theirs = optimizer.state[p][key], other.state[q][key]
        mine, theirs = (one if isinstance(one, torch.Tensor) else one[0] for one in (mine, theirs))
        assert mine.stride() == theirs.stride() and torch.equal(mine, theirs)
    assert state(q, other).state_digest(2) == state(p, optimizer).state_digest(2)
    for each in ((p, optimizer), (q, other)):
        step(*each, 2)
    assert torch.equal(p, q)


def test_in_place_where_possible() -> None:
    job, joiner = Job("sgd-momentum"), Job("sgd-momentum", seed=1)
    job.steps(1, 1)
    joiner.steps(7, 1)
    parameter = joiner.model.conv.weight
    before = (parameter.data_ptr(), joiner.optimizer.state[parameter]["momentum_buffer"].data_ptr(), parameter.stride())
    joiner.state.load(*_args(job))
    state = joiner.optimizer.state[parameter]["momentum_buffer"]
    assert (parameter.data_ptr(), state.data_ptr(), parameter.stride()) == before
    fresh = Job("sgd-momentum", seed=2)
    fresh.state.load(*_args(job))
    assert fresh.optimizer.state[fresh.model.conv.weight]["momentum_buffer"].stride() == parameter.stride()


def _args(job: Job) -> tuple[dict[str, Any], Callable[[int], bytes]]:
    manifest, blocks = carried(job.state)
    return manifest, blocks.__getitem__


def test_digests_tell_every_bit() -> None:
    job = Job()
    job.steps(1, 2)
    digest, model = job.state.state_digest(2), job.state.model_digest()
    assert job.state.state_digest(2) == digest != job.state.state_digest(3)

    def flips(tensor: torch.Tensor, in_model: bool) -> None:
        kept = tensor.detach().clone()
        raw = bytes_of(tensor)
        raw[-1] ^= 1
        assert job.state.state_digest(2) != digest
        assert (job.state.model_digest() != model) == in_model
        with torch.no_grad():
            tensor.copy_(kept)
        assert job.state.state_digest(2) == digest

    flips(job.model.out.weight, True)
    flips(job.model.frozen, True)
    flips(job.model.norm.running_var, True)
    flips(job.model.norm.num_batches_tracked, True)
    flips(job.model.table, False)
    flips(job.optimizer.state[job.model.out.bias]["exp_avg_sq"], False)
    flips(job.optimizer.state[job.model.out.bias]["step"], False)
    job.optimizer.param_groups[1]["lr"] = 0.003 * (1 + 2**-52)
    assert job.state.state_digest(2) != digest
    job.optimizer.param_groups[1]["lr"] = 0.003
    with torch.no_grad():
        job.model.out.bias[0] = 0.0
        plus = job.state.model_digest()
        job.model.out.bias[0] = -0.0
        assert job.state.model_digest() != plus
        job.model.out.bias[0] = float("nan")
        nan = job.state.model_digest()
        job.model.out.bias.view(torch.int32)[0] += 1
        assert job.state.model_digest() != nan


def test_every_entry_and_its_type_is_in_the_digests() -> None:
    values = torch.arange(6, dtype=torch.int32)
    assert tensor_digest(values) != tensor_digest(values.view(torch.float32))
    entries = [StateEntry(name, "int32", (6,), 64 * at, 24) for at, name in enumerate("abc")]
    digests = {Image.of_tensors(entries, [values] * 3, {}, Outline()).digest()}
    for at in range(3):
        tensors = [values + (k == at) for k in range(3)]
        digests.add(Image.of_tensors(entries, tensors, {}, Outline()).digest())
    assert len(digests) == 4


def test_digest_does_not_depend_on_units_ties_or_order_of_insertion() -> None:
    def tied() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model

    a, b = tied(), tied()
    optimizers = [optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (a, b)]
    untie(b, list(b))
    states = [ModelState(a, optimizers[0]), ModelState(b, optimizers[1], units=list(b))]
    assert states[0].state_digest(0) == states[1].state_digest(0)
    assert states[0].n_blocks == 1 and states[1].n_blocks == 2
    names = [row[0] for row in states[1].manifest()["entries"]]
    assert names == ["model/0.weight", "model/0.bias", "model/2.bias"]
    fresh = tied()
    ModelState(fresh, optim.SGD(fresh.parameters(), lr=0.2)).load(states[1].manifest(), states[1].read_block)

    class Extra:
        def __init__(self, value: dict[str, int]) -> None:
            self.value = value

        def state_dict(self) -> dict[str, int]:
            return self.value

        def load_state_dict(self, value: dict[str, int]) -> None:
            self.value = value

    one = ModelState(a, extras={"x": Extra({"p": 1, "q": 2})})
    two = ModelState(a, extras={"x": Extra({"q": 2, "p": 1})})
    assert one.state_digest(0) == two.state_digest(0)


def test_corruption_is_found() -> None:
    job = Job()
    job.steps(1, 1)
    manifest, blocks = carried(job.state)
    assert len(blocks) == len(manifest["blocks"]) > 2 and all(len(b) == BLOCK_BYTES for b in blocks)
    broken = list(blocks)
    broken[1] = blocks[1][:100] + bytes([blocks[1][100] ^ 4]) + blocks[1][101:]
    with pytest.raises(CheckpointCorrupt, match="block 1"):
        Job(seed=1).state.load(manifest, broken.__getitem__)
    with pytest.raises(CheckpointCorrupt, match="block 0"):
        Job(seed=1).state.load(manifest, lambda i: blocks[i][:-1])
    edited = json.loads(json.dumps(manifest))
    edited["values"]["groups"][0]["dict"][1][1]["dict"][0][1] = {"f": (0.5).hex()}
    with pytest.raises(CheckpointCorrupt, match="digest"):
        Job(seed=1).state.load(edited, blocks.__getitem__)


def test_foreign_states_are_refused_by_name() -> None:
    job = Job()
    manifest, blocks = carried(job.state)
    small = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="weight"):
        ModelState(small).load(manifest, blocks.__getitem__)
    changed = Job()
    changed.model.out = nn.Linear(300, 261)
    with pytest.raises(ConfigError, match="that is not the model"):
        changed.state.manifest()
    with pytest.raises(ConfigError, match=r"out\.weight"):
        ModelState(changed.model).load(manifest, blocks.__getitem__)
    with pytest.raises(ConfigError, match="scheduler"):
        Job("adamw", "lambda").state.load(manifest, blocks.__getitem__)
    other = Net()
    with pytest.raises(ConfigError, match="groups"):
        ModelState(other, optim.AdamW(other.parameters())).load(manifest, blocks.__getitem__)


def test_refusals_at_construction() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="LBFGS"):
        ModelState(model, optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigError, match="not the model's"):
        ModelState(model, optim.SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(ConfigError, match="thing"):
        ModelState(model, extras={"thing": object()})
    model[1].weight = model[0].weight
    untie(model, list(model))
    with pytest.raises(ConfigError, match="second leaf"):
        ModelState(model, optim.SGD(model.parameters()))


def test_extras_with_tensors_and_buffers_made_late() -> None:
    class Average:
        def __init__(self, value: float) -> None:
            self.shadow = {"w": torch.full((3, 2), value), 1: torch.tensor(value), "1": torch.tensor(-value)}
            self.note: Any = (1, None, value, float("inf"))

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow, "note": self.note}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow, self.note = state["shadow"], state["note"]

    one, two = Net(), Net()
    one.late = torch.randn(3)
    mine, other = Average(2.5), Average(0.0)
    a, b = ModelState(one, extras={"average": mine}), ModelState(two, extras={"average": other})
    b.load(json.loads(json.dumps(a.manifest())), a.read_block)
    assert torch.equal(other.shadow["w"], mine.shadow["w"]) and other.note == mine.note
    assert other.shadow[1].item() == 2.5 and other.shadow["1"].item() == -2.5
    assert torch.equal(two.late, one.late) and a.state_digest(1) == b.state_digest(1)


def test_snapshot_is_taken_while_gradients_are_computed() -> None:
    job = Job("adamw")
    job.steps(1, 2)
    expected, digest = carried(job.state), job.state.state_digest(2)
    snapshot = job.state.clone_snapshot()
    snapshot.start()
    for _ in range(5):  # changes buffers, not parameters
        job.model(torch.randn(3, 1, 6, 6)).sum().backward()
    assert snapshot.wait()
    job.optimizer.step()
    job.optimizer.param_groups[0]["lr"] = 7.0
    assert carried(snapshot) == expected
    assert snapshot._image.digest(2) == digest != job.state.state_digest(2)
    joiner = Job("adamw", seed=4)
    joiner.state.load(snapshot.manifest(), snapshot.read_block)
    assert joiner.state.state_digest(2) == digest
    arena = snapshot._arena
    snapshot.release()
    again = job.state.clone_snapshot()
    assert again._arena is arena
    again.start()
    manifest, blocks = carried(again)
    live_manifest, live_blocks = carried(job.state)
    assert blocks == live_blocks and manifest == live_manifest


def test_a_failing_snapshot_says_so() -> None:
    job = Job()
    snapshot = job.state.clone_snapshot()
    snapshot._later.append((10_000, torch.zeros(1)))
    snapshot.start()
    with pytest.raises(IndexError):
        snapshot.wait()


def _anonymous_mb() -> float:
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith("Anonymous:")) / 1024


def test_a_snapshot_of_some_blocks_takes_memory_for_these_alone() -> None:
    """Of a divided state others hold the rest."""
    model = nn.Module()
    model.register_parameter("p", nn.Parameter(torch.ones(16 << 20)))
    state, there = ModelState(model), Extents.numbered((("", 256),), [0, *range(7, 255, 8), 255])
    before = _anonymous_mb()
    snapshot = state.clone_snapshot(there)
    snapshot.start()
    manifest = snapshot.manifest()
    assert _anonymous_mb() - before < 24
    expected = state.manifest()["blocks"]
    assert {n for n, digest in enumerate(manifest["blocks"]) if digest == expected[n]} == {0, *range(7, 255, 8), 255}
    snapshot.release()
    with torch.no_grad():
        model.p.fill_(2.0)
    again = state.clone_snapshot()
    again.start()
    assert again.manifest()["blocks"] == state.manifest()["blocks"], "whatever was there before"
