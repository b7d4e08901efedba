"""The ready tasks: all load by name, cover their parameters with units, and learn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from everstep.base.config import Config, load_config
from everstep.base.errors import ConfigError
from everstep.data.loader import LaneLoader, Recipe
from everstep.exact.layout import GradientLayout, untie
from everstep.exact.seeding import UnitSeeder, seed_all
from everstep.order.cursor import SampleOrder
from everstep.train.task import Task
from everstep.zoo import registry
from everstep.zoo.recipe import options, total_steps, warmup_cosine
from everstep.zoo.resnet import ResNet
from everstep.zoo.transformer import Transformer, TransformerConfig


def made(name: str, *arguments: str, **config: Any) -> Task:
    kind = registry.load(name)
    task = kind(*arguments)
    task.config = load_config([("the task", kind.defaults), ("the test", config)])
    return task


def train(task: Task, steps: int) -> list[float]:
    """Plain single-process training over lanes; the losses per unit of weight."""
    config: Config = task.config
    torch.set_num_threads(1)
    seed_all(config.seed)
    model = task.build_model()
    dataset = task.build_dataset("train")
    optimizer = task.build_optimizer(list(model.parameters()))
    scheduler = task.build_scheduler(optimizer)
    seeder = UnitSeeder(task.units(model), config.seed)
    order = SampleOrder(config.seed, len(dataset), config.lanes, config.micro_batch, config.steps, config.epochs)
    loads = LaneLoader(Recipe(dataset, order, task.collate, config.seed), config.loader)
    losses = []
    for step in range(1, steps + 1):
        total = weights = 0.0
        for lane in range(config.lanes):
            batch, samples = loads.batch(step, lane)
            seeder.begin_lane(step, lane)
            loss = task.loss(model, batch)
            value, weight = loss if isinstance(loss, tuple) else (loss * len(samples), torch.tensor(len(samples)))
            value.backward()
            seeder.end_lane()
            total, weights = total + value.item(), weights + weight.item()
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / weights
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        losses.append(total / weights)
    return losses


def test_every_name_loads() -> None:
    assert {"resnet18-digits", "resnet50-digits", "resnet18-folder", "transformer-text"} <= set(registry.names())
    for name in registry.names():
        kind = registry.load(name)
        assert issubclass(kind, Task)
        load_config([(name, kind.defaults)])
    with pytest.raises(ConfigError, match="did you mean 'resnet18-digits'"):
        registry.load("resnet18-digit")


@pytest.mark.parametrize("name", ["mlp-digits", "resnet18-digits", "resnet50-digits", "transformer-text"])
def test_units_hold_every_parameter(name: str) -> None:
    task = made(name, **({"task": {"limit_bytes": 100_000}} if name == "transformer-text" else {}))
    model = task.build_model()
    units = task.units(model)
    assert {id(p) for unit in units for p in unit.parameters()} == {id(p) for p in model.parameters()}
    untie(model, units)
    layout = GradientLayout.build(model, units)
    assert layout.numel >= sum(p.numel() for p in model.parameters())


def test_the_perceptron_learns() -> None:
    losses = train(made("mlp-digits"), 20)
    assert losses[-1] < 0.5 * losses[0]


def test_the_resnet_learns() -> None:
    losses = train(made("resnet18-digits", lanes=2, steps=6), 6)
    assert losses[-1] < 0.8 * losses[0]


def test_metrics_are_sums_and_counts() -> None:
    task = made("mlp-digits")
    model = task.build_model().eval()
    test = task.build_dataset("test")
    samples = [test[i] for i in range(30)]
    with torch.no_grad():
        whole = task.metrics(model, task.collate(samples))
        parts = [task.metrics(model, task.collate(samples[i : i + 10])) for i in (0, 10, 20)]
    for name in ("loss", "accuracy"):
        assert whole[name].dtype == torch.float64
        assert whole[name][1] == 30
        torch.testing.assert_close(sum(p[name] for p in parts), whole[name], rtol=1e-5, atol=1e-5)


SMALL = {"limit_bytes": 200_000, "context": 32, "layers": 2, "width": 32, "heads": 2}


def test_the_language_model_learns_the_users_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 500)
    losses = train(made("transformer-text", str(tmp_path / "text.txt"), task=SMALL, lanes=2, steps=40), 40)
    assert losses[0] > 0.9 * math.log(256)
    assert losses[-1] < 0.7 * losses[0]


def test_the_language_model_counts_tokens() -> None:
    task = made("transformer-text", task=SMALL)
    model = task.build_model().eval()
    dataset = task.build_dataset("train")
    batch = task.collate([dataset[0], dataset[1], dataset[2]])
    total, weight = task.loss(model, batch)
    assert weight.item() == 3 * 32
    logits = model(batch[:, :-1])
    expected = -logits.log_softmax(-1).gather(-1, batch[:, 1:, None]).sum()
    torch.testing.assert_close(total, expected)
    assert task.metrics(model, batch)["loss"][1] == 96


def test_the_language_model_sees_no_future_and_ties_its_embedding() -> None:
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(50, context=16, layers=2, width=32, heads=4)).eval()
    tokens = torch.randint(0, 50, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 50
    a, b = model(tokens), model(changed)
    torch.testing.assert_close(a[:, :10], b[:, :10])
    assert not torch.allclose(a[:, 10:], b[:, 10:])
    assert model.head.weight is model.embedding.tokens.weight
    units = model.units()
    assert any(p is model.head.weight for p in units[0].parameters())
    assert any(p is model.head.weight for p in units[-1].parameters())
    assert untie(model, units) == 1
    tied = [e for e in GradientLayout.build(model, units).entries if e.tied_to >= 0]
    assert len(tied) == 1


def test_the_language_model_is_the_chain_of_its_units() -> None:
    model = Transformer(TransformerConfig(256)).eval()
    tokens = torch.randint(0, 256, (2, 20))
    x = tokens
    for unit in model.units():
        x = unit(x)
    assert torch.equal(x, model(tokens))


def test_the_size_of_the_default_model() -> None:
    with torch.device("meta"):
        model = Transformer(TransformerConfig(256))
    assert sum(p.numel() for p in model.parameters()) == 842_496


def test_byte_pairs_are_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    task = made("transformer-text", task={**SMALL, "tokenizer": "bpe", "vocabulary": 300, "limit_bytes": 50_000})
    assert task.build_model().config.vocabulary == 300
    with pytest.raises(ConfigError, match="bytes or bpe, got 'words'"):
        made("transformer-text", task={**SMALL, "tokenizer": "words"}).build_model()


def test_pictures_learn_and_start_from_weights(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for label, colour in (("blue", (0, 0, 200)), ("red", (200, 0, 0))):
        (tmp_path / "data" / label).mkdir(parents=True)
        for i in range(10):
            image.new("RGB", (20, 20), colour).save(tmp_path / "data" / label / f"{i}.png")
    other = ResNet(18, 1000, small_input=True)
    save_file(other.state_dict(), tmp_path / "weights.safetensors")
    settings = {"size": 16, "weights": str(tmp_path / "weights.safetensors")}
    task = made("resnet18-folder", str(tmp_path / "data"), task=settings, lanes=2, micro_batch=4, epochs=1)
    model = task.build_model()
    assert model.fc.out_features == 2
    assert torch.equal(model.layer3[0].conv1.weight, other.layer3[0].conv1.weight)
    assert all(math.isfinite(loss) for loss in train(task, 2))
    task.config = load_config([("the test", {"task": {**settings, "size": 200}})])
    with pytest.raises(ConfigError, match=r"another architecture: conv1\.weight"):
        task.build_model()


def test_pictures_without_a_path_say_how_to_name_one() -> None:
    with pytest.raises(ConfigError, match="resnet50-folder:PATH"):
        made("resnet50-folder").build_model()


def test_options_are_checked() -> None:
    config = load_config([("the test", {"task": {"lr": "1e-2", "layers": "3"}})])
    assert options(config, {"lr": 1.0, "layers": 2, "path": ""}) == {"lr": 0.01, "layers": 3, "path": ""}
    for given, message in (
        ({"layer": 1}, r"task\.layers"),
        ({"lr": "fast"}, "float"),
        ({"layers": 1.5}, "whole number"),
    ):
        with pytest.raises(ConfigError, match=message):
            options(load_config([("the test", {"task": given})]), {"lr": 1.0, "layers": 2})


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("mlp-digits", {"lr": -1}, r"task\.lr: expected at least 0, got -1"),
        ("mlp-digits", {"lr": "nan"}, r"task\.lr: expected a finite number, got nan"),
        ("mlp-digits", {"weight_decay": "inf"}, r"task\.weight_decay: expected a finite number, got inf"),
        ("transformer-text", {"dropout": 2}, r"task\.dropout: expected 0 to 1, got 2"),
        ("transformer-text", {"width": 0}, r"task\.width: expected at least 1, got 0"),
        ("transformer-text", {"context": 0}, r"task\.context: expected at least 1, got 0"),
        ("transformer-text", {"context": -5}, r"task\.context: expected at least 0, got -5"),
    ],
)
def test_a_number_out_of_range_is_refused_by_its_option(name: str, given: dict[str, Any], said: str) -> None:
    task = made(name, task=given)
    with pytest.raises(ConfigError, match=said):
        task.build_optimizer(task.build_model().parameters())


def test_the_schedule_follows_steps_and_epochs() -> None:
    assert total_steps(None, 100, 17) == 17
    assert total_steps(load_config([("t", {"steps": 9})]), 10_000, 17) == 9
    assert total_steps(load_config([("t", {"epochs": 2, "lanes": 4, "micro_batch": 5})]), 99, 17) == 10
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = warmup_cosine(optimizer, 10, 0.2)
    rates = []
    for _ in range(14):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:3] == [1.0, 2.0, 2.0]
    assert rates[3:11] == sorted(rates[3:11], reverse=True)
    assert rates[10:] == pytest.approx([0.02] * 4)
