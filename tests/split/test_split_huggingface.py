"""The examples with models of `transformers`: cut by their hand-written units they keep their bits."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from split_run import CPU, config_of, maker, run_split

from everstep.data.loader import Recipe, fetch
from everstep.train.composition import check_units
from everstep.train.elastic import sample_order

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str, kind: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kind)


@pytest.mark.parametrize(
    ("name", "kind", "cut"),
    [("hf_gpt2", "GPT2", ((0, 1), (1, 3), (3, 4))), ("hf_resnet", "ResNet", ((0, 2), (2, 4), (4, 6)))],
)
def test_models_of_transformers(name: str, kind: str, cut: Any) -> None:
    task = example(name, kind)()
    values = {"lanes": 2, "micro_batch": 2, "steps": 2}
    config = config_of(task, values)
    dataset = task.build_dataset("train")
    batch, _ = fetch(Recipe(dataset, sample_order(config, dataset), task.collate, 0), 1, 0)
    check_units(maker(task, config)(), task.loss, batch, config, CPU)
    model = maker(task, config)().model.eval()
    tokens = batch[:, :-1] if name == "hf_gpt2" else batch[0]
    plain = type(model).__mro__[1] if name == "hf_gpt2" else type(model)
    assert torch.equal(model(tokens).logits, plain.forward(model, tokens).logits)
    one = run_split(task, ((0, cut[-1][1]),), 1, 2, values=values)
    split = run_split(task, cut, 3, 2, values=values, wire=True, recompute=True)
    assert split.whole() == one.whole()
    assert split.losses == one.losses
