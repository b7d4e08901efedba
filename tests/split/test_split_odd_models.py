"""Models, optimizers and wrappers that are out of the ordinary: each gives the same bits on one worker, on three of
whom one is healed, and in two stages; or it is refused by name, before the start or in the first lane."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any, ClassVar

import pytest
import torch
from split_run import CPU, SplitRun, config_of, maker, run_split
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.data import Dataset

import everstep
from everstep import Task
from everstep.base.errors import CheckpointCorrupt, ConfigError, EverstepError, TaskError
from everstep.checkpoint.tensor_file import Aside
from everstep.exact.extra_state import from_file, pack, unpack
from everstep.exact.topology import select
from everstep.script.unsupported import refuse_elsewhere
from everstep.train.final import _Passed, model_tensors, names_of, write_final
from everstep.train.replica import StageReplica

STEPS = 3
VALUES: dict[str, Any] = {"lanes": 4, "micro_batch": 2}
Optimizer = torch.optim.Optimizer
Make = Callable[[], nn.Module]


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.arange(4.0) * (index % 5 + 1) / 4, torch.tensor(index % 2)


class Odd(Task):
    """Two units: the odd one, and a linear layer."""

    defaults: ClassVar[Mapping[str, Any]] = VALUES

    def __init__(self, make: Make, optimizer: Callable[[list[Any]], Optimizer] | None = None) -> None:
        self.make = make
        self.optimizer = optimizer or (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))

    def build_model(self) -> nn.Module:
        return nn.Sequential(self.make(), nn.Linear(4, 2))

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def build_dataset(self, split: str) -> Points:
        return Points()

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        return self.optimizer(list(params))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


class Keeping(nn.Module):
    """Its extra state takes part in what it computes. keeps: what becomes of it in a forward pass."""

    def __init__(self, keeps: Callable[[Any, Tensor], Any], value: Any) -> None:
        super().__init__()
        self.inner = linear()
        self.keeps, self.value = keeps, value

    def forward(self, x: Tensor) -> Tensor:
        self.value = self.keeps(self.value, x) if self.training else self.value
        kept = self.value if isinstance(self.value, Tensor) else torch.tensor(float(self.value["n"]))
        out: Tensor = self.inner(x) * (1 + 0.01 * kept.sum())
        return out

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def counting() -> nn.Module:
    start = {"n": 0, "seen": [], "h": torch.zeros(3, dtype=torch.bfloat16), "none": None}
    return Keeping(lambda v, x: {**v, "n": v["n"] + 1, "seen": [*v["seen"], v["n"]], "h": v["h"] + 1}, start)


def a_tensor() -> nn.Module:
    return Keeping(lambda v, x: v + 1, torch.zeros(2))


def constant() -> nn.Module:
    return Keeping(lambda v, x: v, {"n": 3, "bytes": b"x", "pair": (1.5, float("inf"))})


def by_lane() -> nn.Module:
    return Keeping(lambda v, x: v + x.sum(), torch.zeros(2))


def pruned() -> nn.Module:
    layer = linear()
    prune.random_unstructured(layer, "weight", 0.5)
    return layer


def frozen() -> nn.Module:
    return nn.Sequential(linear().requires_grad_(False), linear())


def narrow() -> nn.Module:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear().bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x.bfloat16()).float()
            return out

    return Narrow()


def views() -> nn.Module:
    layer, flat = linear(), torch.randn(20)
    layer.weight, layer.bias = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:])
    return layer


def hooked() -> nn.Module:
    layer = linear()
    layer.weight.register_hook(lambda grad: 2 * grad)
    return layer


def listed() -> nn.Module:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.list = nn.ParameterList([torch.randn(4, 4), torch.randn(4)])
            self.dict = nn.ParameterDict({"a": torch.randn(4), "unused": torch.randn(4)})

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.list[0] + self.list[1] * self.dict["a"]

    return Listed()


WORKS: dict[str, tuple[Make, Callable[[list[Any]], Optimizer] | None]] = {
    "extra state that counts": (counting, None),
    "extra state that is a tensor": (a_tensor, None),
    "extra state that stays": (constant, None),
    "spectral_norm": (lambda: nn.utils.spectral_norm(linear()), None),
    "parametrized spectral_norm": (lambda: parametrizations.spectral_norm(linear()), None),
    "weight_norm": (lambda: parametrizations.weight_norm(linear()), None),
    "orthogonal": (lambda: parametrizations.orthogonal(linear()), None),
    "pruned": (pruned, None),
    "frozen": (frozen, None),
    "frozen, and not in the optimizer": (
        frozen,
        lambda p: torch.optim.Adam([x for x in p if x.requires_grad], foreach=True),
    ),
    "groups by hand": (
        linear,
        lambda p: torch.optim.AdamW([{"params": p[1:2], "lr": 0.1, "name": "b"}, {"params": [p[0], *p[2:]]}]),
    ),
    "fused, with a tensor as learning rate": (
        linear,
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), fused=True),
    ),
    "bfloat16": (narrow, None),
    "views of one memory": (views, None),
    "hooks of gradients": (hooked, None),
    "lists of parameters": (listed, None),
    "cumulative BatchNorm": (lambda: nn.Sequential(linear(), nn.BatchNorm1d(4, momentum=None)), None),
    "random": (lambda: nn.Sequential(linear(), nn.Dropout(0.3), nn.RReLU()), None),
}


def three_with_one_healed(task: Task) -> SplitRun:
    """The second worker is a new one after the first step, with the state of the first."""
    config = config_of(task, {"steps": STEPS, **VALUES})
    run = SplitRun(task, config, ((0, 2),), 1, pools=3)
    for step in range(1, STEPS + 1):
        run.step(step)
        if step == 1:
            donor = run.workers[0][0].state
            fresh = StageReplica(maker(task, config)(), config, CPU)
            fresh.state.load(donor.manifest(), donor.read_block)
            fresh.prove_update()
            run.workers[1] = {0: fresh}
    return run


@pytest.mark.parametrize("name", WORKS)
def test_it_gives_the_same_bits_wherever_it_is_computed(name: str) -> None:
    task = Odd(*WORKS[name])
    one = run_split(task, ((0, 2),), 1, STEPS, values=VALUES)
    assert three_with_one_healed(task).digests(STEPS) == one.digests(STEPS)
    stages = run_split(task, ((0, 1), (1, 2)), 2, STEPS, values=VALUES, recompute=True)
    assert stages.digests(STEPS) == one.digests(STEPS)
    state = one.workers[0][0].state
    assert (state.model_digest(), state.state_digest(STEPS)) == one.digests(STEPS)
    if name.startswith("extra"):
        whole = one.whole()
        blocks = [bytes(state.read_block(i)) for i in range(len(whole["blocks"]))]
        fresh = SplitRun(task, config_of(task, {"steps": 9, **VALUES}), ((0, 1), (1, 2)), 2)
        for stage in fresh.workers[0].values():
            needed, where = select(whole, stage.state.names)
            stage.state.load(needed, lambda i, where=where: blocks[where[i]])  # type: ignore[misc]
        assert fresh.whole() == whole


@pytest.mark.parametrize("make", [counting, a_tensor, constant])
def test_extra_state_is_in_the_final_model_and_comes_back(make: Make, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    one = run_split(Odd(make), ((0, 2),), 1, STEPS, values=VALUES)
    replica = one.workers[0][0]
    model = replica.parts.model
    write_final(tmp_path, model_tensors(model), "", "", STEPS)
    found = load_file(tmp_path / "final" / "model.safetensors")
    manifest = replica.state.manifest()
    with closing(Aside(tmp_path)) as aside:
        passed = _Passed(manifest, names_of(model, replica.state), None, aside)
        passed.seen.take([replica.state.read_block(n) for n in range(replica.state.n_blocks)])
        passed.seen.digests()
        collected = {name: one.read() for name, one in passed.tensors().items()}
    assert all(torch.equal(found[name], collected[name]) for name in found) and found.keys() == collected.keys()
    fresh = Odd(make).build_model()
    fresh.load_state_dict({n: from_file(t) if n.endswith("_extra_state") else t for n, t in found.items()})
    assert torch.equal(pack("x", fresh[0].get_extra_state()), pack("x", model[0].get_extra_state()))  # type: ignore[operator, index]
    if make is counting:
        assert fresh[0].value["n"] == STEPS and fresh[0].value["seen"] == [0, 1, 2]  # type: ignore[union-attr, index]


def test_bytes_of_others_are_no_extra_state() -> None:
    for data in (b"", b"\0" * 40, b"\x08\0\0\0\0\0\0\0{}      "):
        with pytest.raises(CheckpointCorrupt, match="extra state"):
            unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))


# ---- what is refused


class Writing(nn.Module):
    """Writes to its weight in the forward pass."""

    def __init__(self, write: Callable[[nn.Linear], object]) -> None:
        super().__init__()
        self.inner = linear()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.inner)
        out: Tensor = self.inner(x)
        return out


class Table(nn.Module):
    """An embedding without the module."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(4 * torch.randn(8, 4))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return functional.embedding(x[:, 1].long().clamp(0, 7), self.weight, **self.how)


class Late(nn.Module):
    """Makes a parameter when it is called first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.late: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.late is None:
            self.late = nn.Parameter(torch.zeros(4))
        out: Tensor = self.inner(x) + self.late
        return out


def melting() -> nn.Module:
    return Writing(lambda layer: layer.weight.requires_grad_(True)).requires_grad_(False)


def stepping() -> nn.Module:
    layer = linear()
    optimizer = torch.optim.SGD([layer.weight], lr=0.1)

    def step(_: Tensor) -> None:
        optimizer.step()

    layer.weight.register_post_accumulate_grad_hook(step)
    return layer


def mismatched() -> nn.Module:
    class Mismatched(Keeping):
        def set_extra_state(self, state: Any) -> None:
            self.value = {"n": 7}

    return Mismatched(lambda v, x: v, {"n": 3})


def half_defined() -> nn.Module:
    class Half(nn.Linear):
        def get_extra_state(self) -> Any:
            return 3

    return Half(4, 4)


def overlapping() -> nn.Module:
    model, flat = nn.Sequential(linear(), linear()), torch.randn(24)
    model[0].weight, model[1].weight = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[8:].view(4, 4))
    return model


def complex_valued() -> nn.Module:
    model = linear()
    model.register_parameter("c", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    return model


def with_buffer(buffer: Tensor) -> nn.Module:
    model = linear()
    model.register_buffer("odd", buffer)
    return model


def meta() -> nn.Module:
    with torch.device("meta"):
        return linear()


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        return super().step(closure)


REFUSED: dict[str, tuple[Make, str]] = {
    "extra state by lane": (by_lane, r"extra state 0\._extra_state ends differently in different micro-batches"),
    "extra state of another kind": (
        lambda: Keeping(lambda v, x: v, {"n": 1, "o": object()}),
        "the extra state of 0 cannot be carried: .*object",
    ),
    "extra state that does not come back": (mismatched, r"0 \(Mismatched\) returns another extra state"),
    "extra state without a way back": (half_defined, r"0 \(Half\) has get_extra_state and no set_extra_state"),
    "max_norm": (lambda: Table(max_norm=1.0), r"parameter 0\.weight was changed while a batch was computed"),
    "sparse": (lambda: Table(sparse=True), r"parameter 0\.weight has a sparse gradient"),
    "clamped": (lambda: Writing(lambda m: m.weight.clamp_(-0.1, 0.1)), r"parameter 0\.inner\.weight was changed"),
    "clamped unseen": (
        lambda: Writing(lambda m: m.weight.data.clamp_(-0.1, 0.1)),
        r"parameter 0\.inner\.weight was changed",
    ),
    "an optimizer in a hook": (stepping, r"parameter 0\.weight was changed"),
    "a parameter made late": (Late, r"parameter 0\.late .* was made in the forward pass"),
    "thawed": (melting, r"parameter 0\.inner\.weight did not require a gradient when training began"),
    "lazy": (lambda: nn.LazyLinear(4), r"0\.weight has no shape yet"),
    "meta": (meta, r"0\.weight is on the meta device"),
    "complex": (complex_valued, r"parameter 0\.c is torch\.complex64"),
    "float64": (lambda: linear().double(), r"parameter 0\.weight is torch\.float64"),
    "overlapping": (overlapping, r"0\.0\.weight and 0\.1\.weight share memory"),
    "expanded": (lambda: with_buffer(torch.zeros(1).expand(4)), r"elements of 0\.odd share memory"),
    "sparse buffer": (lambda: with_buffer(torch.eye(4).to_sparse()), r"0\.odd is torch\.sparse_coo"),
    "quantized": (
        lambda: with_buffer(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)),
        r"0\.odd is quantized",
    ),
    "DataParallel": (lambda: nn.DataParallel(linear()), "0 is wrapped in DataParallel"),
    "scripted": (lambda: torch.jit.script(linear()), r"0 is compiled by torch\.jit"),
}


def join_and_train(model: nn.Module, optimizer: Any) -> None:
    run = everstep.join(model, optimizer, Points(), steps=2, lanes=4, micro_batch=2)
    for step in run:
        for batch in step:
            step.backward(functional.cross_entropy(model(batch[0]), batch[1]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name: str) -> None:
    make, text = REFUSED[name]
    model = Odd(make).build_model()
    with pytest.raises((ConfigError, TaskError), match=text) as error:
        join_and_train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "\n" not in str(error.value)


WRITERS = [name for name in REFUSED if name in ("max_norm", "sparse", "clamped", "clamped unseen", "thawed")]


@pytest.mark.parametrize("name", [*WRITERS, "extra state by lane"])
def test_it_is_refused_in_stages_too(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(EverstepError, match=text):
        run_split(Odd(make), ((0, 1), (1, 2)), 2, 1, values=VALUES)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (torch.optim.LBFGS, "LBFGS evaluates the loss several times"),
        (lambda p: NeedsClosure(p, lr=0.1), "NeedsClosure evaluates the loss several times"),
        (torch.optim.SparseAdam, "SparseAdam takes sparse gradients"),
        (lambda p: torch.optim.Adam(p, capturable=True), "group 0 has capturable=True"),
        (lambda p: torch.optim.SGD(linear().parameters(), lr=0.1), "that is not the model's"),
    ],
)
def test_optimizers_that_cannot_be_used_are_refused(make: Callable[[Any], Optimizer], text: str) -> None:
    model = linear()
    with pytest.raises(ConfigError, match=text):
        join_and_train(model, make(list(model.parameters())))


def test_a_model_elsewhere_than_its_batches_is_refused() -> None:
    """The meta device stands for one that is not the host."""
    with pytest.raises(ConfigError, match=r"expected the model on device cpu, got weight on meta: move it"):
        refuse_elsewhere(nn.Linear(2, 2, device="meta"), torch.device("cpu"))
    refuse_elsewhere(nn.Linear(2, 2), torch.device("cpu"))


def test_an_average_is_not_what_is_trained() -> None:
    model = torch.optim.swa_utils.AveragedModel(linear())
    with pytest.raises(ConfigError, match="give the model itself, and the average as state="):
        join_and_train(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Curious(nn.Module):
    """Counts its calls, in evaluations too: in a buffer, and in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.more = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.more += 1
        out: Tensor = self.inner(x)
        return out

    def get_extra_state(self) -> Any:
        return self.more

    def set_extra_state(self, state: Any) -> None:
        self.more = state


def test_an_evaluation_leaves_no_trace_in_what_forward_passes_change() -> None:
    """Workers share its work, so that each would have counted something else."""
    model = Curious()
    run = everstep.join(model, torch.optim.SGD(model.parameters(), lr=0.1), Points(), steps=3, lanes=4, micro_batch=2)
    for step in run:
        for batch in step:
            step.backward(functional.cross_entropy(model(batch[0]), batch[1]))
        assert (int(model.calls), model.more) == (step.number, step.number)
        run.evaluate(lambda batch: {"n": torch.stack([model(batch[0]).sum(), torch.ones(())])}, Points(), batch_size=4)
        assert (int(model.calls), model.more) == (step.number, step.number)
