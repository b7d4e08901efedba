"""Models from Hugging Face config directories: counted as transformers counts them, other kinds refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.cli.main import run_command
from everstep.cli.plan_config_dir import shape_of_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "num_key_value_heads": 2,
    "intermediate_size": 176,
    "max_position_embeddings": 128,
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100}
GPT2 |= {"n_positions": 128}


def write(folder: Path, config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "norms"),
    [
        (LLAMA, 0),
        ({**LLAMA, "tie_word_embeddings": True}, 0),
        ({**LLAMA, "model_type": "mistral", "sliding_window": None}, 0),
        ({**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, 0),
        (GPT2, 2 * 64),  # the last norm, which the paper's formula leaves out
    ],
)
def test_counted_as_transformers_counts(config: dict[str, Any], norms: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    where = write(tmp_path / "m", config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(where))
    shape, assumed = shape_of_config(where)
    assert shape.parameters + norms == sum(p.numel() for p in model.parameters())
    assert shape.sequence == 128 and "config.json allows 128" in assumed[0]


def test_each_question_takes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = write(tmp_path / "m", GPT2)
    counts = []
    for options in (["memory", where], *([name, "--model", where, "--gpus", "4"] for name in ("time", "recommend"))):
        assert run_command(["plan", *options, "--json"]) == 0
        counts.append(json.loads(capsys.readouterr().out)["parameters"])
    assert len(set(counts)) == 1 and counts[0] == shape_of_config(where)[0].parameters


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "cannot read"),
        ("[]", "expected a model's config with model_type"),
        ({**LLAMA, "model_type": "qwen2", "num_experts": 8}, "of mixtures of experts mixtral is planned"),
        ({**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "from 1 to 2, got 3"),
        (
            {**LLAMA, "model_type": "t5"},
            "expected a model_type of llama, mistral, mixtral, phi3, qwen2, gpt2, gpt_neox, opt",
        ),
        ({**LLAMA, "hidden_size": -4}, "hidden_size: expected a whole number"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size: expected a whole number"),
        ({**LLAMA, "head_dim": 64}, "expected a hidden size of heads x head_dim (256), got 64"),
        ({**LLAMA, "num_key_value_heads": 3}, "expected a divisor of 4, got 3"),
        ({"model_type": "llama"}, "expected hidden_size or n_embd or d_model, found none"),
    ],
)
def test_what_it_cannot_plan_is_one_line(
    config: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", "time", "--model", write(tmp_path / "m", config), "--gpus", "8"]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


def test_a_place_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "time", "--model", "./nowhere", "--gpus", "8"]) == 2
    assert "cannot read nowhere: No such file" in capsys.readouterr().err
