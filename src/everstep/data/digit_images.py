"""The 1,797 handwritten digits that come with scikit-learn: real images, with nothing to download.

The split is fixed and stratified: images are sorted by class (keeping the order within a class), and every fifth one is
a test image: 360, and 1,437 to train on.

Source: scikit-learn `load_digits`, a part of the UCI "Optical Recognition of Handwritten Digits" data set.
"""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import Dataset

from everstep.base.errors import ConfigError

CLASSES = 10
SIZE = 8
MEAN, DEVIATION = 0.3058, 0.3762
"""Mean and deviation of the training pixels, on the scale 0 to 1."""


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Images (1, 8, 8) float32, normalised, with their class 0 to 9.

    split: "train" or "test". shift: share (0 to 1) of the training images that are moved by up to one pixel in each
    direction, drawn afresh each time from torch's default generator, which the loader seeds for each sample.

    Raises: ConfigError for another split.
    """

    def __init__(self, split: str, shift: float = 0.0) -> None:
        if split not in ("train", "test"):
            raise ConfigError(f'expected the split "train" or "test", got {split!r}')
        self.shift = shift if split == "train" else 0.0
        table = torch.from_numpy(_table())
        images, classes = table[:, :-1], table[:, -1].long()
        order = torch.sort(classes, stable=True).indices
        chosen = (torch.arange(len(order)) % 5 == 0) == (split == "test")
        order = order[chosen].sort().values
        pixels = images.float().div_(16).sub_(MEAN).div_(DEVIATION)
        self.images = pixels.reshape(-1, 1, SIZE, SIZE)[order].contiguous()
        self.labels = classes[order].tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index]
        if self.shift > 0 and torch.rand(()).item() < self.shift:
            down, right = torch.randint(0, 3, (2,)).tolist()
            padded = functional.pad(image, (1, 1, 1, 1), value=-MEAN / DEVIATION)
            image = padded[:, down : down + SIZE, right : right + SIZE]
        return image, self.labels[index]


def _table() -> Any:
    """(1797, 65) float64: 64 pixels, 0 to 16, and the class.

    Read from scikit-learn's own file, because importing it takes seconds that every restart of a worker would pay.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise ConfigError("the digits come with scikit-learn, which is not installed: pip install scikit-learn")
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        with gzip.open(file, "rt") as text:
            return np.loadtxt(text, delimiter=",")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.concatenate([images, labels[:, None]], axis=1)
