"""Tasks that learn the classes of the user's own pictures with a ResNet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from everstep.base.errors import ConfigError
from everstep.checkpoint.interchange_formats import load_weights
from everstep.data.folder import PictureFolder
from everstep.zoo.recipe import RESNET_OPTIONS, ResNetClassifier, total_steps, warmup_cosine

_NOT_IN_FILES = ("num_batches_tracked", ".scale", ".shift")


class ResNet18Folder(ResNetClassifier):
    """A ResNet on the user's pictures. path: a folder with one folder of pictures per class (see `PictureFolder`).

    Options: `task.path`, `task.size` (side of the squares that pictures are resized to, in pixels), `task.weights` (to
    start from: a safetensors file with torchvision's names, or its `.pth`; the classifier is used if it has as many
    classes, and `task.include_top` is true), `task.lr`, `task.weight_decay`, and those of `ResNetClassifier`.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"lanes": 8, "micro_batch": 8, "epochs": 10}
    option_defaults: ClassVar[Mapping[str, Any]] = {
        "path": "",
        "size": 224,
        "weights": "",
        "lr": 0.025,
        "weight_decay": 1e-4,
        **RESNET_OPTIONS,
    }

    def __init__(self, path: str = "") -> None:
        self.path = path
        self._train: PictureFolder | None = None

    def _pictures(self, split: str) -> PictureFolder:
        path = self.path or self.option("path")
        if not path:
            raise ConfigError(f"expected a folder of pictures: resnet{self.depth}-folder:PATH, or --set task.path=PATH")
        if split == "train":
            self._train = self._train or PictureFolder(path, split, self.option("size"))
            return self._train
        return PictureFolder(path, split, self.option("size"))

    def build_model(self) -> nn.Module:
        size = self.option("size")
        model = self.built(len(self._pictures("train").classes), small_input=size <= 64)
        if self.option("weights"):
            start_from(model, self.option("weights"))
        return model

    def build_dataset(self, split: str) -> Dataset[Any]:
        return self._pictures(split)

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        size = len(self._pictures("train"))
        return warmup_cosine(optimizer, total_steps(self.config, size, otherwise=100), warmup=0.1)


class ResNet34Folder(ResNet18Folder):
    """`ResNet18Folder` with 34 layers."""

    depth = 34


class ResNet50Folder(ResNet18Folder):
    """`ResNet18Folder` with 50 layers."""

    depth = 50


class ResNet101Folder(ResNet18Folder):
    """`ResNet18Folder` with 101 layers."""

    depth = 101


class ResNet152Folder(ResNet18Folder):
    """`ResNet18Folder` with 152 layers."""

    depth = 152


def start_from(model: nn.Module, path: str) -> None:
    """Load weights from a safetensors file or one of torchvision's (`.pth`). A classifier of another size, or one that
    the model does not have, is left out. Raises: ConfigError if it cannot be read or is of another architecture."""
    try:
        weights = load_weights(Path(path)).model
    except Exception as error:
        expected = "a safetensors file, or torchvision's .pth"
        raise ConfigError(f"task.weights: expected {expected}, got {path}: {error}") from error
    own = model.state_dict()
    for name in ("fc.weight", "fc.bias"):
        if name in weights and (name not in own or weights[name].shape != own[name].shape):
            del weights[name]
    fresh = {n for n in own if n.startswith(("fc.", "classifier.")) or n.endswith(_NOT_IN_FILES)}
    wrong = [n for n in own if n in weights and weights[n].shape != own[n].shape]
    missing = [n for n in own if n not in weights and n not in fresh]
    if wrong or missing or set(weights) - set(own):
        some = (wrong + missing + sorted(set(weights) - set(own)))[0]
        raise ConfigError(f"task.weights: {path} is of another architecture: {some} differs or is missing")
    model.load_state_dict(weights, strict=False)
