"""ResNets have torchvision's names, shapes and arithmetic, and are chains of their units."""

from __future__ import annotations

import copy
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from everstep.base.config import load_config
from everstep.base.errors import ConfigError
from everstep.zoo.digits import ResNet18Digits
from everstep.zoo.pictures import start_from
from everstep.zoo.resnet import BatchNorm2d, Conv2d, ResNet

PUBLISHED = {
    18: (11_689_512, 122),
    34: (21_797_672, 218),
    50: (25_557_032, 320),
    101: (44_549_160, 626),
    152: (60_192_808, 932),
}
"""Parameters with 1000 classes, and entries of the state, of torchvision's models."""


@pytest.mark.parametrize("depth", PUBLISHED)
def test_sizes_are_those_published(depth: int) -> None:
    with torch.device("meta"):
        model = ResNet(depth)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[depth][0]
    assert len(model.state_dict()) == PUBLISHED[depth][1]


def expected_shapes(depth: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of torchvision's state, written down from its rules and not from our code."""
    blocks = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}[depth]
    deep = depth >= 50
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, out: int, into: int, kernel: int) -> None:
        shapes[f"{name}.weight"] = (out, into, kernel, kernel)

    def norm(name: str, width: int) -> None:
        for part in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{name}.{part}"] = (width,)
        shapes[f"{name}.num_batches_tracked"] = ()

    conv("conv1", 64, 3, 7)
    norm("bn1", 64)
    into = 64
    for layer, count in enumerate(blocks):
        width = 64 * 2**layer
        out = width * 4 if deep else width
        for block in range(count):
            at = f"layer{layer + 1}.{block}"
            for i, (o, n, k) in enumerate(
                [(width, into, 1), (width, width, 3), (out, width, 1)]
                if deep
                else [(width, into, 3), (width, width, 3)]
            ):
                conv(f"{at}.conv{i + 1}", o, n, k)
                norm(f"{at}.bn{i + 1}", o)
            if block == 0 and (into != out or layer > 0):
                conv(f"{at}.downsample.0", out, into, 1)
                norm(f"{at}.downsample.1", out)
            into = out
    shapes["fc.weight"], shapes["fc.bias"] = (1000, into), (1000,)
    return shapes


@pytest.mark.parametrize("depth", PUBLISHED)
def test_names_and_shapes_are_those_of_torchvision(depth: int) -> None:
    with torch.device("meta"):
        model = ResNet(depth)
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == expected_shapes(depth)


def test_small_images_change_the_stem_only() -> None:
    with torch.device("meta"):
        small, large = ResNet(18, small_input=True).state_dict(), ResNet(18).state_dict()
    assert list(small) == list(large)
    assert [n for n in small if small[n].shape != large[n].shape] == ["conv1.weight"]


@pytest.mark.parametrize(("depth", "options"), [(18, {"small_input": True}), (50, {}), (18, {})])
def test_the_forward_pass_is_the_chain_of_units(depth: int, options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model = ResNet(depth, 10, **options).eval()
    units = model.units()
    held = {id(p) for unit in units for p in unit.parameters()}
    assert held == {id(p) for p in model.parameters()}
    assert sum(1 for unit in units for _ in unit.parameters()) == len(held), "each parameter is in one unit"
    called: list[int] = []
    for number, unit in enumerate(units):
        unit.register_forward_pre_hook(lambda *_, number=number: called.append(number))
    images = torch.randn(2, 3, 32, 32)
    logits = model(images)
    assert called == list(range(len(units)))
    x = images
    for unit in units:
        x = unit(x)
    assert torch.equal(x, logits)
    assert logits.shape == (2, 10)


def test_the_architecture_is_that_of_the_layers_called_one_by_one() -> None:
    torch.manual_seed(0)
    m = ResNet(18, 10).eval()
    x = torch.randn(2, 3, 64, 64)
    y = functional.max_pool2d(functional.relu(m.bn1(m.conv1(x))), 3, 2, 1)
    assert y.shape == (2, 64, 16, 16)
    y = m.layer4(m.layer3(m.layer2(m.layer1(y))))
    assert y.shape == (2, 512, 2, 2)
    torch.testing.assert_close(m.fc(y.mean((2, 3))), m(x))
    assert m.layer2[0].conv1.stride == (2, 2)
    with torch.device("meta"):
        deeper = ResNet(50, 10)
    assert deeper.layer2[0].conv2.stride == (2, 2)
    assert deeper.layer2[0].conv1.stride == (1, 1)


def test_a_copy_has_units_of_its_own() -> None:
    model = ResNet(18, 10, small_input=True)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.conv1.weight.zero_()
        other.fc.bias.fill_(7)
    assert not other.units()[0].conv1.weight.any()
    assert other.units()[-1].fc is other.fc
    assert model.units()[0].conv1.weight.any()
    assert "conv1" in dict(model.named_children())
    assert all("_ends" not in name for name in model.state_dict())


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (1, 1), (1, 2), (7, 2)])
def test_single_pixel_convolutions_are_convolutions(kernel: int, stride: int) -> None:
    torch.manual_seed(0)
    layer = Conv2d(5, 6, kernel, stride=stride, padding=kernel // 2, bias=False)
    for height in (1, 2, 3, 4):
        for width in (1, 2, 4):
            x = torch.randn(3, 5, height, width, requires_grad=True)
            grads = []
            outs = []
            for form in (layer, lambda x: functional.conv2d(x, layer.weight, None, stride, kernel // 2)):
                out = form(x)
                grads.append(torch.autograd.grad(out.square().sum(), (x, layer.weight)))
                outs.append(out)
            torch.testing.assert_close(outs[0], outs[1])
            torch.testing.assert_close(grads[0], grads[1])


def test_a_lane_of_one_sample_with_one_pixel_uses_the_running_statistics() -> None:
    norm = BatchNorm2d(4)
    x = torch.randn(1, 4, 1, 1)
    assert torch.equal(norm.train()(x), norm.eval()(x))
    assert norm.num_batches_tracked == 1
    assert torch.equal(norm.running_mean, torch.zeros(4))
    plain = nn.BatchNorm2d(4)
    y = torch.randn(2, 4, 1, 1)
    assert torch.equal(norm.train()(y), plain.train()(y))
    assert ResNet(18, 10, channels=1, small_input=True).train()(torch.randn(1, 1, 8, 8)).shape == (1, 10)


def test_an_unknown_depth_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"18, 34, 50, 101, 152, got 20"):
        ResNet(20)


def test_the_options_of_the_ready_tasks() -> None:
    task = ResNet18Digits()
    chosen = {"num_classes": 12, "include_top": "false", "pooling": "max", "scale_layers": "true", "bn_eps": "0.01"}
    task.config = load_config([("test", {"task": {**chosen, "momentum": 0.5}, "steps": 1})])
    model = task.build_model()
    names = dict(model.named_parameters())
    assert names["classifier.weight"].shape == (12, 512) and "fc.weight" not in names
    assert names["layer1.0.bn1.scale"].shape == (64,)
    assert model.layer1[0].bn1.eps == 0.01 and isinstance(model.avgpool, nn.AdaptiveMaxPool2d)  # type: ignore[union-attr,index]
    optimizer = task.build_optimizer(model.parameters())
    assert optimizer.param_groups[0]["momentum"] == 0.5
    x = torch.randn(4, 1, 8, 8)
    assert model(x).shape == (4, 12)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"pooling": "sum"}, "task.pooling: expected avg or max, got 'sum'"),
        ({"num_classes": 9}, "task.num_classes: expected at least 10"),
        ({"bn_eps": 0}, "task.bn_eps: expected a number between 0 and 1"),
        ({"scale_layers": "perhaps"}, "task.scale_layers: expected true or false"),
    ],
)
def test_options_that_do_not_fit(option: dict[str, Any], said: str) -> None:
    task = ResNet18Digits()
    task.config = load_config([("test", {"task": option, "steps": 1})])
    with pytest.raises(ConfigError, match=re.escape(said)):
        task.build_model()


def test_weights_in_the_format_of_torchvision(tmp_path: Path) -> None:
    other, model, bare = ResNet(18, 5, small_input=True), ResNet(18, 7), ResNet(18, 7, include_top=False)
    torch.save(ResNet(18, 1000).state_dict(), tmp_path / "resnet18.pth")
    weights = torch.load(tmp_path / "resnet18.pth", weights_only=True)
    for net in (model, bare):
        start_from(net, str(tmp_path / "resnet18.pth"))
        assert torch.equal(net.state_dict()["layer4.1.conv2.weight"], weights["layer4.1.conv2.weight"])
    with pytest.raises(ConfigError, match="another architecture: conv1"):
        start_from(other, str(tmp_path / "resnet18.pth"))
    (tmp_path / "hostile.pth").write_bytes(pickle.dumps({"conv1.weight": os.system}))
    with pytest.raises(ConfigError, match=r"task\.weights"):
        start_from(model, str(tmp_path / "hostile.pth"))
