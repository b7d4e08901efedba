"""What tasks that tell pictures apart share: pictures in, classes out, cross-entropy, SGD."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from everstep.train.task import Task
from everstep.zoo.recipe import classification_metrics, decay_groups, options


class Classifier(Task):
    """Batches are (images, labels). option_defaults: of the task's own options, `lr` and `weight_decay` among them."""

    option_defaults: ClassVar[Mapping[str, Any]] = {}

    def option(self, name: str) -> Any:
        """One of the task's own options."""
        return options(self.config, self.option_defaults)[name]

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        groups = decay_groups(params, self.option("weight_decay"))
        return SGD(groups, lr=self.option("lr"), momentum=0.9, nesterov=True)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """loss and accuracy."""
        images, labels = batch
        return classification_metrics(model(images), labels)


class ResNetClassifier(Classifier):
    """One whose model is a `ResNet` of `depth` layers."""

    depth: ClassVar[int] = 18

    def units(self, model: nn.Module) -> list[nn.Module]:
        """Stem, residual blocks, head."""
        return model.units()  # type: ignore[operator, no-any-return]

    def cuts(self, model: nn.Module, parts: int) -> list[int] | None:
        """The five classic stages."""
        return model.cuts(parts)  # type: ignore[operator, no-any-return]
