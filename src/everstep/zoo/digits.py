"""Tasks that learn the digits of scikit-learn: ResNets, and a small multilayer perceptron for quick looks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from everstep.data.digit_images import CLASSES, SIZE, Digits
from everstep.zoo.recipe import RESNET_OPTIONS, Classifier, ResNetClassifier, total_steps, warmup_cosine

_TRAIN_SIZE = 1437


class _Digits(Classifier):
    def build_dataset(self, split: str) -> Dataset[Any]:
        return Digits(split, shift=self.option("shift"))

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        steps = total_steps(self.config, _TRAIN_SIZE, int(self.defaults["steps"]))
        return warmup_cosine(optimizer, steps, warmup=0.2)


class ResNet18Digits(_Digits, ResNetClassifier):
    """A ResNet on images of 8x8 pixels: 3x3 stem of stride 2, so that the maps are 4x4, 2x2, 1x1 and 1x1.

    Options: `task.lr`, `task.weight_decay`, `task.shift` (share of the training images that are shifted by a pixel),
    and those of `ResNetClassifier`. The running statistics follow faster than usual, because the job has few and large
    steps.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"lanes": 8, "micro_batch": 32, "steps": 36}
    option_defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 0.05,
        "weight_decay": 5e-4,
        "shift": 0.2,
        **RESNET_OPTIONS,
    }

    def build_model(self) -> nn.Module:
        model = self.built(CLASSES, channels=1, small_input=True, stem_stride=2)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.3
        return model


class ResNet34Digits(ResNet18Digits):
    """`ResNet18Digits` with 34 layers."""

    depth = 34


class ResNet50Digits(ResNet18Digits):
    """`ResNet18Digits` with 50 layers."""

    depth = 50


class ResNet101Digits(ResNet18Digits):
    """`ResNet18Digits` with 101 layers."""

    depth = 101


class ResNet152Digits(ResNet18Digits):
    """`ResNet18Digits` with 152 layers."""

    depth = 152


class MLPDigits(_Digits):
    """Two hidden layers of 64: a job of seconds, for a first look and for tests. Options: `task.lr`, `task.momentum`,
    `task.weight_decay`, `task.shift`."""

    defaults: ClassVar[Mapping[str, Any]] = {"lanes": 8, "micro_batch": 4, "steps": 20}
    option_defaults: ClassVar[Mapping[str, Any]] = {"lr": 0.1, "weight_decay": 0.0, "shift": 0.0, "momentum": 0.9}

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, 64), nn.ReLU()),
            nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
            nn.Linear(64, CLASSES),
        )

    def units(self, model: nn.Module) -> list[nn.Module]:
        """Units: the three layers."""
        return list(model.children())
