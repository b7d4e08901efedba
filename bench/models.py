"""The models of the benchmarks, as tasks: the same objects serve Everstep and its peers.

`Synthetic` data: what is measured is the step, not the loading.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.utils.data import Dataset

import everstep
from everstep.exact.shard_plan import shard_model
from everstep.exact.shard_sums import ShardMesh
from everstep.zoo.recipe import token_loss
from everstep.zoo.resnet import ResNet
from everstep.zoo.shard_plans import transformer_plan
from everstep.zoo.transformer import Block, Transformer, TransformerConfig


class RandomImages(Dataset[Any]):
    """Fixed random images, 3 x 32 x 32, with labels."""

    def __init__(self, size: int = 4096, classes: int = 10) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(512, 3, 32, 32, generator=generator)
        self.labels = torch.randint(classes, (512,), generator=generator)
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index % 512], self.labels[index % 512]


class RandomTokens(Dataset[Any]):
    """Fixed random windows of tokens."""

    def __init__(self, length: int, vocabulary: int, size: int = 4096) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (256, length + 1), generator=generator)
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[index % 256]


class ResNet18(everstep.Task):
    """ResNet-18 on small images: 11M parameters."""

    defaults: ClassVar[dict[str, Any]] = {"lanes": 8, "micro_batch": 8, "steps": 20}

    def build_model(self) -> nn.Module:
        return ResNet(18, classes=10, small_input=False)

    def build_dataset(self, split: str) -> Dataset[Any]:
        return RandomImages()

    def units(self, model: nn.Module) -> list[nn.Module]:
        return model.units()  # type: ignore[operator, no-any-return]

    def build_optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


class SmallTransformer(everstep.Task):
    """A causal transformer, 0.9M parameters."""

    defaults: ClassVar[dict[str, Any]] = {"lanes": 8, "micro_batch": 4, "steps": 40}
    shape = TransformerConfig(vocabulary=256, layers=4, width=128, heads=4, context=64, dropout=0.0)

    def build_model(self) -> nn.Module:
        return Transformer(self.shape)

    def build_dataset(self, split: str) -> Dataset[Any]:
        return RandomTokens(self.shape.context, self.shape.vocabulary)

    def units(self, model: nn.Module) -> list[nn.Module]:
        return model.units()  # type: ignore[operator, no-any-return]

    def build_optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=3e-4)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        targets = batch[:, 1:]
        return token_loss(model(batch[:, :-1]), targets) / targets.numel()

    def parallelize(self, model: nn.Module, mesh: ShardMesh) -> None:
        shard_model(model, transformer_plan(self.shape), mesh)


class Transformer25M(SmallTransformer):
    """A causal transformer, 25M parameters."""

    defaults: ClassVar[dict[str, Any]] = {"lanes": 8, "micro_batch": 1, "steps": 12}
    shape = TransformerConfig(vocabulary=256, layers=8, width=512, heads=8, context=64, dropout=0.0)


class TinyTransformer(SmallTransformer):
    """A causal transformer, 0.1M parameters: what is measured with it are fixed costs."""

    defaults: ClassVar[dict[str, Any]] = {"lanes": 8, "micro_batch": 1, "steps": 200}
    shape = TransformerConfig(vocabulary=256, layers=2, width=64, heads=2, context=32, dropout=0.0)


class DeepTransformer(SmallTransformer):
    """Ten units with hardly any parameters: for pipelines whose compute is a timed wait."""

    defaults: ClassVar[dict[str, Any]] = {"lanes": 8, "micro_batch": 1, "steps": 12}
    shape = TransformerConfig(vocabulary=64, layers=8, width=16, heads=2, context=8, dropout=0.0)


class _Wait(torch.autograd.Function):
    """Computes nothing, and takes its time: so long forward, twice as long backward."""

    @staticmethod
    def forward(ctx: Any, seconds: float, x: torch.Tensor) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *found: torch.Tensor) -> tuple[None, torch.Tensor]:
        time.sleep(2 * ctx.seconds)
        return None, found[0]


class _WaitingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(cast(torch.Tensor, _Wait.apply(WaitingTransformer.wait_s, x)))  # type: ignore[no-untyped-call]


class WaitingTransformer(TinyTransformer):
    """Four small blocks, each of which waits: so that few cores stand for many devices."""

    defaults: ClassVar[dict[str, Any]] = {"lanes": 8, "micro_batch": 1, "steps": 12}
    shape = TransformerConfig(vocabulary=64, layers=4, width=32, heads=2, context=16, dropout=0.0)
    wait_s = 0.025

    def build_model(self) -> nn.Module:
        model = Transformer(self.shape)
        for block in model.blocks:
            block.__class__ = _WaitingBlock
        return model


MODELS: dict[str, type[everstep.Task]] = {
    "resnet18": ResNet18,
    "transformer-small": SmallTransformer,
    "transformer-25m": Transformer25M,
    "transformer-tiny": TinyTransformer,
    "transformer-deep": DeepTransformer,
    "transformer-waiting": WaitingTransformer,
}
