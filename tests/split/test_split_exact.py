"""Jobs that are split into stages end with the bits of the unsplit one, in any schedule and topology."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
from split_run import Text, run_split
from torch import nn

from everstep.base.errors import DeterminismError
from everstep.placement.cuts import ModelCut
from everstep.zoo.digits import MLPDigits, ResNet50Digits
from sampling import mostly_longer

MLP: dict[str, Any] = {"lanes": 4, "micro_batch": 4}
DIGITS: dict[str, Any] = {"lanes": 5, "micro_batch": 3, "threads": 1}
TEXT: dict[str, Any] = {
    "lanes": 6,
    "micro_batch": 2,
    "clip_norm": 0.5,
    "task": {"limit_bytes": 60_000, "context": 16, "layers": 4, "width": 32, "heads": 2},
}
CLASSIC: ModelCut = ((0, 1), (1, 4), (4, 8), (8, 14), (14, 18))


class Thin(ResNet50Digits):
    """ResNet-50's units with a sixteenth of the channels."""

    def build_model(self) -> nn.Module:
        import everstep.zoo.resnet as resnet

        widths, resnet.WIDTHS = resnet.WIDTHS, (4, 8, 16, 32)
        try:
            return super().build_model()
        finally:
            resnet.WIDTHS = widths


_unsplit: dict[str, Any] = {}


def same(
    task: Any, name: str, cut: ModelCut, stages: int, values: dict[str, Any], steps: int = 3, **options: Any
) -> None:
    """The split run's whole manifest, digests and losses are those of the unsplit run."""
    key = f"{name} {sorted(values.items())} {steps}"
    if key not in _unsplit:
        one = run_split(task(), ((0, cut[-1][1]),), 1, steps, values=values)
        replica = one.workers[0][0]
        _unsplit[key] = one.whole(), one.losses, (replica.state.model_digest(), replica.state.state_digest(steps))
    whole, losses, digests = _unsplit[key]
    split = run_split(task(), cut, stages, steps, values=values, **options)
    assert split.losses == losses
    assert split.digests(steps) == digests
    assert split.whole() == whole


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_mlp(kind: str) -> None:
    same(MLPDigits, "mlp", ((0, 1), (1, 2), (2, 3)), 3, MLP, kind=kind)


@pytest.mark.parametrize(("kind", "recompute", "wire"), [("gpipe", False, True), ("1f1b", True, False)])
def test_resnet50_in_five_stages(kind: str, recompute: bool, wire: bool) -> None:
    same(Thin, "thin", CLASSIC, 5, DIGITS, kind=kind, recompute=recompute, wire=wire, steps=2)


@pytest.mark.longer
def test_resnet50_at_full_width() -> None:
    same(ResNet50Digits, "resnet50", CLASSIC, 5, {"lanes": 3, "micro_batch": 2}, kind="gpipe", steps=1)


@pytest.mark.parametrize(
    ("kind", "recompute", "precision"),
    mostly_longer(
        [(*kind, precision) for kind in (("gpipe", True), ("1f1b", False)) for precision in ("fp32", "bf16", "fp16")],
        lambda case: case[0] == "gpipe" or case[2] == "fp32",
    ),
)
def test_transformer_in_three_stages(kind: str, recompute: bool, precision: str) -> None:
    """Dropout, tied embeddings, clipping, parameter groups, a schedule."""
    values = {**TEXT, "precision": precision}
    same(Text, "text", ((0, 2), (2, 4), (4, 6)), 3, values, kind=kind, recompute=recompute)


@pytest.mark.parametrize(
    ("kind", "recompute"),
    mostly_longer(
        [("interleaved", False), ("interleaved", True), ("looped_bfs", False), ("looped_bfs", True)],
        lambda case: case[1] == (case[0] == "interleaved"),
    ),
)
def test_several_chunks_per_stage(kind: str, recompute: bool) -> None:
    cut = tuple((k, k + 1) for k in range(6))
    same(Text, "text", cut, 3, TEXT, kind=kind, recompute=recompute)
    same(Text, "text", ((0, 1), (1, 3), (3, 5), (5, 6)), 2, TEXT, kind=kind, recompute=recompute)


def test_several_workers_per_stage() -> None:
    same(Text, "text", ((0, 2), (2, 4), (4, 6)), 3, TEXT, pools=2, wire=True)


class _Doubles(torch.autograd.Function):
    """Identity; where asked to, it draws from a source that cannot be seeded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, random: str) -> torch.Tensor:  # type: ignore[override]
        ctx.random = random
        return x * (1.0 + secrets.randbits(20)) if random == "forward" else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * (1.0 + secrets.randbits(20)) if ctx.random == "backward" else gradient, None


class _Draws(nn.Module):
    def __init__(self, random: str) -> None:
        super().__init__()
        self.random = random

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Doubles.apply(x, self.random)  # type: ignore[no-any-return, no-untyped-call]


class Draws(MLPDigits):
    """Its third unit is not deterministic."""

    random = "forward"

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), _Draws(self.random), nn.Linear(16, 10))

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())


class DrawsInBackward(Draws):
    random = "backward"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("task", "what"), [(Draws, "outputs or buffers"), (DrawsInBackward, "gradients")])
def test_a_stage_that_is_not_deterministic(task: type[Draws], what: str, recompute: bool) -> None:
    with pytest.raises(DeterminismError, match=f"lane 0 of step 1 .* stage 1 and gave different {what}"):
        run_split(task(), ((0, 2), (2, 3), (3, 4)), 3, 1, values=MLP, recompute=recompute)


def test_the_end_of_the_data() -> None:
    """A short lane, and lanes without samples."""
    values = {"lanes": 4, "micro_batch": 200, "epochs": 2}
    same(MLPDigits, "mlp", ((0, 2), (2, 3)), 2, values, steps=4)


class Odd(MLPDigits):
    """What is hard to cut: trees, integers, views, operations in place, a frozen unit, buffers, extra parameters."""

    defaults: ClassVar[dict[str, Any]] = {"lanes": 4, "micro_batch": 4, "steps": 3}

    def build_model(self) -> nn.Module:
        return nn.Sequential(Opens(), Middle(16, True), nn.ReLU(inplace=True).requires_grad_(False), Middle(16, False))

    def units(self, model: nn.Module) -> list[nn.Module]:
        opens, first, relu, second = model.children()
        return [opens, Joined(first), OnFirst(relu), Joined(second), Closes()]

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        params = list(params)
        return torch.optim.AdamW(
            [{"params": params[::-2]}, {"params": params[-2::-2], "lr": torch.tensor(0.01)}], weight_decay=0.1
        )

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        noise = torch.randn(()) * 0.1
        wide = torch.nn.functional.pad(batch[0].flatten(1), (0, 0))
        logits = model(wide + noise)
        return torch.nn.functional.cross_entropy(logits + torch.rand(()), batch[1])


class Opens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 17)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        table = self.linear.weight[:, :1].expand(17, 3)
        return {"x": y[:, 1:], "mask": y > 0, "n": [3, None], "table": (table, y.sum(0)), 7: y.t()}


class Middle(nn.Module):
    def __init__(self, width: int, frozen: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width).requires_grad_(not frozen)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("u", torch.ones(width))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        with torch.no_grad():
            self.u.mul_(self.linear.weight.mean(0)).add_(0.5)
        return self.frozen(self.norm(self.linear(x))) * self.u


class Joined(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tree: Any) -> Any:
        import random

        import numpy as np

        scale = 1 + 0.1 * random.random() + 0.1 * np.random.rand()
        x = self.inner(tree["x"]) * scale + tree["mask"][:, 1:].float() * tree["n"][0]
        return {**tree, "x": x + tree["table"][0].mean() + tree[7].mean()}


class OnFirst(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tree: Any) -> Any:
        return {**tree, "x": self.inner(tree["x"])}


class Closes(nn.Module):
    def forward(self, tree: Any) -> torch.Tensor:
        return tree["x"][:, :10] + tree["table"][1].mean()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cut", [((0, 1), (1, 2), (2, 3), (3, 5)), ((0, 2), (2, 5))])
def test_trees_views_buffers_and_draws(cut: ModelCut, recompute: bool) -> None:
    for kind, wire in (("gpipe", False), ("1f1b", True)):
        same(OddTask, "odd", cut, len(cut), {}, kind=kind, recompute=recompute, wire=wire)


class OddTask(Odd):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.forward = lambda x: self._chain(model, x)  # type: ignore[method-assign]
        return model

    def _chain(self, model: nn.Module, x: Any) -> Any:
        for unit in self._units:
            x = unit(x)
        return x

    def units(self, model: nn.Module) -> list[nn.Module]:
        self._units = super().units(model)
        return self._units
