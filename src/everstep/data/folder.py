"""The user's own pictures: a folder with one folder per class, listed in sorted order on every machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from everstep.base.errors import ConfigError, TaskError

ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
"""Means and deviations per channel, on the scale 0 to 1: those that torchvision's weights expect."""
_TEST_EVERY = 5


class PictureFolder(Dataset[tuple[torch.Tensor, int]]):
    """Pictures (3, size, size) float32, normalised, with the number of their class: the classes' names, sorted.

    path: has `train` and `test` (or `val`) folders with a folder for each class in them, or a folder for each class
    itself; then every fifth picture of a class is for testing. split: "train" or "test". augment: training pictures
    are cropped (half of the area or more) and mirrored at random, with torch's default generator, which the loader
    seeds for each sample; otherwise the middle square is taken.

    Raises: ConfigError if Pillow is missing, or there are no pictures.
    """

    def __init__(self, path: str, split: str, size: int = 224, augment: bool = True) -> None:
        try:
            import PIL.Image
        except ImportError:
            raise ConfigError("reading pictures needs Pillow: pip install 'everstep[images]'") from None
        self._image = PIL.Image
        if split not in ("train", "test"):
            raise ConfigError(f'expected the split "train" or "test", got {split!r}')
        self.size = size
        self.augment = augment and split == "train"
        self.classes, self.files = _listing(Path(path), split)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Raises: TaskError naming the file that cannot be read."""
        file, label = self.files[index]
        try:
            with self._image.open(file) as picture:
                pixels = self._square(picture.convert("RGB"))
        except Exception as error:
            raise TaskError(f"{file} is not a readable picture ({type(error).__name__}: {error})") from error
        return pixels, label

    def _square(self, picture: Any) -> torch.Tensor:
        """A square part of the picture, resized, as a normalised tensor."""
        width, height = picture.size
        side = min(width, height)
        left, top, mirror = (width - side) // 2, (height - side) // 2, False
        if self.augment:
            side = max(1, round(side * float(torch.empty(()).uniform_(0.5**0.5, 1.0))))
            left = int(torch.randint(0, width - side + 1, ()))
            top = int(torch.randint(0, height - side + 1, ()))
            mirror = bool(torch.randint(0, 2, ()))
        box = (left, top, left + side, top + side)
        picture = picture.resize((self.size, self.size), self._image.Resampling.BILINEAR, box=box)
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(self.size, self.size, 3).permute(2, 0, 1).float().div_(255)
        pixels = (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]
        return (pixels.flip(2) if mirror else pixels).contiguous()


def _listing(root: Path, split: str) -> tuple[list[str], list[tuple[Path, int]]]:
    """(names of the classes, (file, class) of each picture)."""
    if not root.is_dir():
        raise ConfigError(f"expected a folder with one folder of pictures per class, got {root}, which is no folder")
    apart = (root / "train").is_dir()
    classes = _folders(root / "train" if apart else root)
    places = ("train",) if split == "train" else ("test", "val")
    base = next((root / p for p in places if (root / p).is_dir()), root / places[0]) if apart else root
    files: list[tuple[Path, int]] = []
    for label, name in enumerate(classes):
        found = _pictures(base / name)
        if not apart:
            found = [f for i, f in enumerate(found) if (i % _TEST_EVERY == _TEST_EVERY - 1) == (split == "test")]
        files += [(f, label) for f in found]
    if not files:
        raise ConfigError(
            f"expected pictures for the split {split!r} in {base}, in one folder per class, got none: they may end in "
            f"{', '.join(sorted(ENDINGS))}"
        )
    return classes, files


def _folders(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def _pictures(folder: Path) -> list[Path]:
    found = folder.rglob("*") if folder.is_dir() else ()
    return sorted((p for p in found if p.is_file() and p.suffix.lower() in ENDINGS), key=lambda p: p.as_posix())
