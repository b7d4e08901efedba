"""Common parts of the ready tasks: options, the number of steps, and the learning rate's course."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from everstep.base.config import dotted
from everstep.base.errors import ConfigError, did_you_mean
from everstep.exact.shard_vocabulary import VocabularyLogits
from everstep.order.cursor import SampleOrder
from everstep.train.task import Task
from everstep.zoo.resnet import ResNet

RESNET_OPTIONS: Mapping[str, Any] = {
    "num_classes": 0,
    "include_top": True,
    "pooling": "avg",
    "scale_layers": False,
    "bn_eps": 1e-5,
    "momentum": 0.9,
}
"""Options of each `ResNetClassifier`, with their defaults."""
_RANGES: Mapping[str, tuple[int, float]] = {
    **dict.fromkeys(("lr", "weight_decay", "limit_bytes", "num_classes", "context", "lora.rank"), (0, math.inf)),
    **dict.fromkeys(("layers", "width", "heads", "size", "vocabulary"), (1, math.inf)),
    **dict.fromkeys(("dropout", "warmup", "shift"), (0, 1)),
    "lora.alpha": (0, math.inf),
}
"""Least and largest value of options by name; the other numbers only have to be finite."""
READY_METRICS = ("loss", "accuracy")
"""Of all ready tasks, by `classification_metrics`."""


class ReadyTask(Task):
    """A task with options of its own, `lr` and `weight_decay` among them: `option_defaults`."""

    option_defaults: ClassVar[Mapping[str, Any]] = {}

    def option(self, name: str) -> Any:
        """Value of one of the task's own options."""
        return options(self.config, self.option_defaults)[name]


class Classifier(ReadyTask):
    """Pictures in, classes out, cross-entropy, SGD. Batches are (images, labels)."""

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        groups = decay_groups(params, self.option("weight_decay"))
        momentum = self.option("momentum")
        if not 0 <= momentum < 1:
            raise ConfigError(f"task.momentum: expected a number from 0 to below 1, got {momentum:g}")
        return SGD(groups, lr=self.option("lr"), momentum=momentum, nesterov=momentum > 0)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Metrics loss and accuracy."""
        images, labels = batch
        return classification_metrics(model(images), labels)


class ResNetClassifier(Classifier):
    """A classifier whose model is a `ResNet` of `depth` layers.

    Options of all of them: `task.num_classes` (0: as many as the data has), `task.include_top`, `task.pooling`,
    `task.scale_layers`, `task.bn_eps` (as `ResNet` takes them), `task.momentum` (of SGD).
    """

    depth: ClassVar[int] = 18

    def built(self, classes: int, **more: Any) -> ResNet:
        """The model, as the options say. classes: of the data. Raises: ConfigError for options that do not fit."""
        wanted = self.option("num_classes")
        if wanted and wanted < classes:
            raise ConfigError(f"task.num_classes: expected at least {classes}, the classes of the data, got {wanted}")
        named = {name: self.option(name) for name in ("include_top", "pooling", "scale_layers", "bn_eps")}
        return ResNet(self.depth, wanted or classes, **named, **more)

    def units(self, model: nn.Module) -> list[nn.Module]:
        """Units: stem, residual blocks, head."""
        return model.units()  # type: ignore[operator, no-any-return]

    def cuts(self, model: nn.Module, parts: int) -> list[int] | None:
        """Sizes of the five classic stages."""
        return model.cuts(parts)  # type: ignore[operator, no-any-return]


def options(config: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A task's own options: `defaults`, overridden by the config's `task.NAME`. Text becomes the default's type.

    Raises: ConfigError for an option that the task does not have, or of the wrong type.
    """
    chosen = dict(defaults)
    for name, value in dotted(getattr(config, "task", None) or {}).items():
        if name not in defaults:
            hint = did_you_mean(name, defaults, "'task.{}'")
            raise ConfigError(f"this task has no option 'task.{name}' (it has {', '.join(sorted(defaults))}){hint}")
        kind = type(defaults[name])
        if kind is bool:
            if str(value).lower() not in ("true", "false"):
                raise ConfigError(f"task.{name}: expected true or false, got {value!r}")
            chosen[name] = str(value).lower() == "true"
            continue
        try:
            chosen[name] = kind(float(value)) if kind is int and float(value).is_integer() else kind(value)
        except (TypeError, ValueError):
            raise ConfigError(f"task.{name}: expected {kind.__name__}, got {value!r}") from None
        if kind is int and chosen[name] != float(value):
            raise ConfigError(f"task.{name}: expected a whole number, got {value!r}")
        if kind in (int, float):
            _check_range(name, chosen[name])
    return chosen


def _check_range(name: str, value: float) -> None:
    """Raises: ConfigError for a number that no task can use."""
    if not math.isfinite(value):
        raise ConfigError(f"task.{name}: expected a finite number, got {value}")
    least, most = _RANGES.get(name, (-math.inf, math.inf))
    if not least <= value <= most:
        wanted = f"at least {least}" if most == math.inf else f"{least} to {most}"
        raise ConfigError(f"task.{name}: expected {wanted}, got {value:g}")


def total_steps(config: Any, dataset_size: int, otherwise: int) -> int:
    """The job's last step, from its config; `otherwise` if there is no config (a task used by itself)."""
    if config is None:
        return otherwise
    if config.epochs is None and config.steps is not None:
        return int(config.steps)
    return SampleOrder(0, dataset_size, config.lanes, config.micro_batch, config.steps, config.epochs).total_steps


def warmup_cosine(optimizer: Optimizer, steps: int, warmup: float) -> LambdaLR:
    """Schedule of the optimizer's learning rate: its factor rises to 1 over the first `warmup` (0 to 1) of the steps,
    then falls to 1 % along half a cosine, and stays there if the job goes on.

    Source: Loshchilov and Hutter, "SGDR" (2017), without restarts.
    """
    rising = max(1, round(warmup * steps))

    def factor(done: int) -> float:
        if done < rising:
            return (done + 1) / rising
        along = min(1.0, (done - rising) / max(1, steps - rising))
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * along))

    return LambdaLR(optimizer, factor)


def decay_groups(params: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: weight decay for matrices and kernels, none for norms and biases."""
    params = [p for p in params if p.requires_grad]
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]


def token_loss(logits: torch.Tensor | VocabularyLogits, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, summed over tokens. logits: (N, T, words), or shards of them; targets: (N, T) int64."""
    if isinstance(logits, VocabularyLogits):
        return logits.loss(targets)
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def classification_metrics(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """loss and accuracy as tensor([sum, count]), float64. logits: (N, classes); labels: (N,) int64."""
    count = labels.numel()
    loss = functional.cross_entropy(logits.float(), labels, reduction="sum").double().item()
    right = int((logits.argmax(1) == labels).sum())
    return {
        "loss": torch.tensor([loss, count], dtype=torch.float64),
        "accuracy": torch.tensor([right, count], dtype=torch.float64),
    }
