"""ResNet 18, 34, 50, 101 and 152 with torchvision's parameter names and shapes, so that its weight files load.

Written here because the model has to be a plain chain of units: `x = unit(x)` over `ResNet.units()` is the whole
forward pass, so that a job can seed, lay out and cut the model by unit.

Source: He et al., "Deep Residual Learning for Image Recognition" (2015), table 1; strides of the bottleneck on its 3x3
convolution, and the initialisation, as in torchvision (version 1.5 of the architecture).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from everstep.base.errors import ConfigError
from everstep.placement.cuts import balance

WIDTHS = (64, 128, 256, 512)
POOLINGS: dict[str, type[nn.Module]] = {"avg": nn.AdaptiveAvgPool2d, "max": nn.AdaptiveMaxPool2d}

LAYERS: dict[int, tuple[int, int, int, int]] = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
"""Residual blocks per stage, by depth; the depths from 50 on have bottleneck blocks."""


class BatchNorm2d(nn.BatchNorm2d):
    """BatchNorm that also takes a lane with one value per channel (one sample, 1x1 maps).

    Such a lane has no variance of its own and torch refuses it. It happens in the last lane of a job that ends in the
    middle of a micro-batch, and is normalised with the running statistics, which it leaves as they are.
    """

    scale: nn.Parameter | None
    shift: nn.Parameter | None

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.register_parameter("scale", None)
        self.register_parameter("shift", None)

    def add_scale(self) -> None:
        """Have a further factor and offset per channel learned after the norm's own (`scale_layers`)."""
        self.scale = nn.Parameter(torch.ones(self.num_features))
        self.shift = nn.Parameter(torch.zeros(self.num_features))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: (N, C, H, W)."""
        found = self._normalised(input)
        if self.scale is None or self.shift is None:
            return found
        return found * self.scale[:, None, None] + self.shift[:, None, None]

    def _normalised(self, input: torch.Tensor) -> torch.Tensor:
        if self.training and self.track_running_stats and input.numel() == input.shape[1]:
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        return super().forward(input)


class Conv2d(nn.Conv2d):
    """A square convolution without bias that becomes one matrix product if, on a CPU, its output is a single pixel.

    Then only some of the kernel's taps meet the image, and torch's convolution spends most of its time converting the
    whole weight to another memory layout and back (measured on one core, 512 channels, 3x3 on 1x1 maps, 32 samples,
    forward and backward: 20 ms, against 6 ms as a product).
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: (N, channels, H, W)."""
        kernel, stride, padding = self.kernel_size[0], self.stride[0], int(self.padding[0])
        height, width = input.shape[-2:]
        last = max(height, width) + 2 * padding - kernel
        if input.device.type != "cpu" or last < 0 or last // stride > 0:
            return super().forward(input)
        rows, columns = min(height, kernel - padding), min(width, kernel - padding)
        taps = [r * kernel + c for r in range(padding, padding + rows) for c in range(padding, padding + columns)]
        weight = self.weight.flatten(2).index_select(2, torch.tensor(taps))
        seen = input[:, :, :rows, :columns]
        return functional.linear(seen.flatten(1), weight.flatten(1))[:, :, None, None]


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut. A unit."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.bn1 = BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, inputs, H, W) -> (N, width, H / stride, W / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return cast(torch.Tensor, self.relu(out + shortcut))


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolutions and a shortcut. A unit."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 1)
        self.bn1 = BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = BatchNorm2d(width)
        self.conv3 = _conv(width, width * self.expansion, 1)
        self.bn3 = BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, inputs, H, W) -> (N, 4 width, H / stride, W / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return cast(torch.Tensor, self.relu(out + shortcut))


class Stem(nn.Module):
    """The model's `conv1`, `bn1`, ReLU and pooling as one unit, which does not own these modules."""

    def __init__(self, conv1: nn.Conv2d, bn1: nn.Module, relu: nn.Module, maxpool: nn.Module) -> None:
        super().__init__()
        self.conv1 = conv1
        self.bn1 = bn1
        self.relu = relu
        self.maxpool = maxpool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, channels, H, W) -> (N, 64, H', W')."""
        return cast(torch.Tensor, self.maxpool(self.relu(self.bn1(self.conv1(x)))))


class ResNetHead(nn.Module):
    """The model's pooling and classifier as one unit, which does not own these modules."""

    def __init__(self, avgpool: nn.Module, fc: nn.Linear) -> None:
        super().__init__()
        self.avgpool = avgpool
        self.fc = fc

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, features, H, W) -> logits (N, classes)."""
        return cast(torch.Tensor, self.fc(torch.flatten(self.avgpool(x), 1)))


class ResNet(nn.Module):
    """A residual network for images.

    small_input: for images of a few pixels: a 3x3 stem of stride 1 without pooling instead of the 7x7 one of
    stride 2. Names stay, and so do all shapes but that of `conv1.weight`. stem_stride overrides the stem's stride.
    include_top: the classifier is torchvision's `fc`; otherwise it is a new one, `classifier`. pooling: "avg" or "max".
    scale_layers: a learned factor and offset per channel after each norm. bn_eps: of the norms.
    """

    def __init__(
        self,
        depth: int,
        classes: int = 1000,
        *,
        channels: int = 3,
        small_input: bool = False,
        stem_stride: int | None = None,
        include_top: bool = True,
        pooling: str = "avg",
        scale_layers: bool = False,
        bn_eps: float = 1e-5,
    ) -> None:
        """Raises: ConfigError for a depth that is not one of the five, another pooling, or an eps that is not > 0."""
        super().__init__()
        if depth not in LAYERS:
            raise ConfigError(f"expected a ResNet depth of {', '.join(map(str, LAYERS))}, got {depth}")
        if pooling not in POOLINGS:
            raise ConfigError(f"task.pooling: expected {' or '.join(POOLINGS)}, got {pooling!r}")
        if not 0 < bn_eps < 1:
            raise ConfigError(f"task.bn_eps: expected a number between 0 and 1, got {bn_eps:g}")
        block: type[BasicBlock | Bottleneck] = Bottleneck if depth >= 50 else BasicBlock
        kernel, stride = (3, 1) if small_input else (7, 2)
        self.conv1 = _conv(channels, 64, kernel, stem_stride or stride)
        self.bn1 = BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_input else nn.MaxPool2d(3, stride=2, padding=1)
        inputs = 64
        for number, (blocks, width) in enumerate(zip(LAYERS[depth], WIDTHS, strict=True), start=1):
            layer = _layer(block, inputs, width, blocks, stride=1 if number == 1 else 2)
            self.add_module(f"layer{number}", layer)
            inputs = width * block.expansion
        self.avgpool = POOLINGS[pooling](1)
        top = nn.Linear(inputs, classes)
        self.add_module("fc" if include_top else "classifier", top)
        for module in self.modules():
            self._init_weights(module)
            if isinstance(module, BatchNorm2d):
                module.eps = bn_eps
                if scale_layers:
                    module.add_scale()
        # in a tuple, where nn.Module does not look: otherwise the state would list their parameters twice
        self._ends = (
            Stem(self.conv1, self.bn1, self.relu, self.maxpool),
            ResNetHead(self.avgpool, top),
        )

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    def units(self) -> list[nn.Module]:
        """Stem, each residual block, head: applied one after the other they are the whole forward pass.

        Blocks are the submodules `layer1.0` and so on. Stem and head wrap `conv1`, `bn1` and `fc` without being
        registered in the model, so the names of its state stay torchvision's.
        """
        stem, head = self._ends
        blocks = [b for n in range(1, 5) for b in cast(Sequence[nn.Module], getattr(self, f"layer{n}"))]
        return [stem, *blocks, head]

    def cuts(self, parts: int) -> list[int] | None:
        """Sizes of the five classic stages: stem, layer1, layer2, layer3, and layer4 with pooling and classifier.

        Any other number of parts: even in blocks, which all cost about the same (their parameters do not).
        """
        costs = [1.0] * (len(self.units()) - 1) + [0.1]
        if parts != 5:
            return [last - first for first, last in balance(costs, parts)] if parts <= len(costs) else None
        blocks = [len(cast(Sequence[nn.Module], getattr(self, f"layer{n}"))) for n in range(1, 5)]
        return [1, *blocks[:3], blocks[3] + 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: images (N, channels, H, W) -> logits (N, classes)."""
        for unit in self.units():
            x = unit(x)
        return x


def _layer(block: type[BasicBlock | Bottleneck], inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    outputs = width * block.expansion
    downsample = None
    if stride != 1 or inputs != outputs:
        downsample = nn.Sequential(_conv(inputs, outputs, 1, stride), BatchNorm2d(outputs))
    first = block(inputs, width, stride, downsample)
    return nn.Sequential(first, *(block(outputs, width) for _ in range(1, blocks)))
