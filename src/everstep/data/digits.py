"""The 1,797 handwritten digits that come with scikit-learn: real images, with nothing to download.

The split is fixed and stratified: sorted by class (keeping the order within a class), every fifth image is a test
image: 360, and 1,437 to train on.

Source: scikit-learn `load_digits`, a part of the UCI "Optical Recognition of Handwritten Digits" data set.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.utils.data import Dataset

from everstep.base.errors import ConfigError

CLASSES = 10
SIZE = 8
MEAN, DEVIATION = 0.3058, 0.3762
"""Of the training pixels, on the scale 0 to 1."""


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Images (1, 8, 8) float32, normalised, with their class 0 to 9.

    split: "train" or "test". augment: shift each image by up to one pixel in each direction, drawn from torch's
    default generator (which the loader seeds for each sample); by default the training images.

    Raises: ConfigError for another split.
    """

    def __init__(self, split: str, augment: bool | None = None) -> None:
        from sklearn.datasets import load_digits

        if split not in ("train", "test"):
            raise ConfigError(f'expected the split "train" or "test", got {split!r}')
        self.augment = split == "train" if augment is None else augment
        images, labels = load_digits(return_X_y=True)
        classes = torch.from_numpy(labels).long()
        order = torch.sort(classes, stable=True).indices
        chosen = (torch.arange(len(order)) % 5 == 0) == (split == "test")
        order = order[chosen].sort().values
        pixels = torch.from_numpy(images).float().div_(16).sub_(MEAN).div_(DEVIATION)
        self.images = pixels.reshape(-1, 1, SIZE, SIZE)[order].contiguous()
        self.labels = classes[order].tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index]
        if self.augment:
            down, right = torch.randint(0, 3, (2,)).tolist()
            padded = functional.pad(image, (1, 1, 1, 1), value=-MEAN / DEVIATION)
            image = padded[:, down : down + SIZE, right : right + SIZE]
        return image, self.labels[index]
