"""`hf:DIR`: units, weights, tokens and adapters of models of `transformers`, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import everstep
from everstep.base.config import load_config
from everstep.base.errors import ConfigError, TaskError

transformers = pytest.importorskip("transformers")

from everstep.checkpoint.interchange import adapter_names  # noqa: E402
from everstep.cli import evaluate  # noqa: E402
from everstep.cli.probe import check_metric  # noqa: E402
from everstep.data import tokenised  # noqa: E402
from everstep.train.final import model_tensors, write_final  # noqa: E402
from everstep.train.trainer import EarlyStop, train  # noqa: E402
from everstep.zoo import decoder_units, huggingface  # noqa: E402
from everstep.zoo.hub_directory import keep_hub_files  # noqa: E402
from everstep.zoo.huggingface import HuggingFace  # noqa: E402
from everstep.zoo.recipe import READY_METRICS  # noqa: E402
from hub_models import CONFIGS, made, text, with_tokenizer  # noqa: E402


def task_of(folder: Path | str, **options: Any) -> HuggingFace:
    task = HuggingFace(str(folder))
    given = {f"task.{name.replace('__', '.')}": value for name, value in options.items()}
    task.config = load_config([("defaults", task.defaults), ("test", given)])
    return task


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(text(tmp_path))


@pytest.mark.parametrize("name", CONFIGS)
def test_units_compute_what_the_model_does(tmp_path: Path, data: str, name: str) -> None:
    """With the weights of the files, to the bit, and with gradients."""
    folder = made(tmp_path / "model", name)
    task = task_of(folder, data=data)
    ours, theirs = task.build_model().eval(), transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert not task.whole and len(task.units(ours)) == 4
    batch = torch.stack([task.build_dataset("train")[k] for k in range(2)])
    assert torch.equal(ours(input_ids=batch[:, :-1]).logits, theirs(input_ids=batch[:, :-1]).logits)
    loss, weight = task.loss(ours, batch)
    assert weight == 32
    loss.backward()
    task.loss(theirs, batch)[0].backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    assert all(torch.equal(p.grad, expected[name]) for name, p in ours.named_parameters())


def test_fresh_weights_by_the_seed(tmp_path: Path, data: str) -> None:
    """A config alone: the same for the same seed, of the architecture's own scale."""
    folder = made(tmp_path / "model", "gpt2")
    first, second = (dict(task_of(folder / "config.json", data=data).build_model().named_parameters()) for _ in "ab")
    assert all(torch.equal(p, second[name]) for name, p in first.items())
    scale = [first[f"transformer.h.0.attn.{name}.weight"].std().item() for name in ("c_attn", "c_proj")]
    assert scale == pytest.approx([0.02, 0.01], rel=0.15)
    assert "fresh weights" in task_of(folder / "config.json", data=data).notes()[0]


def test_an_architecture_without_known_units_stays_whole(tmp_path: Path, data: str) -> None:
    folder = made(tmp_path / "model", "gpt_neox")
    task = task_of(folder, data=data)
    model, expected = task.build_model(), transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert len(task.units(model)) == 1 and "cannot be split" in task.notes()[-1]
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    task.config = load_config([("defaults", task.defaults), ("test", {"meta_init": True})])
    with pytest.raises(ConfigError, match="meta_init"):
        task.build_model()


def test_units_that_compute_otherwise_are_not_used(tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_units.DecoderHead, "forward", lambda self, carried: self.lm_head(carried[0]))
    assert HuggingFace(str(made(tmp_path / "model", "llama"))).whole


def test_final_is_read_by_transformers(tmp_path: Path, data: str) -> None:
    folder = with_tokenizer(made(tmp_path / "model", "llama"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    task = task_of(folder, data=data)
    keep_hub_files(str(folder), task.config.task, tmp_path)
    tensors = model_tensors(task.build_model())
    write_final(tmp_path, tensors, "m", "s", 1)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final").state_dict()
    assert all(torch.equal(loaded[name], one.read()) for name, one in tensors.items())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "final")
    assert tokenizer("w1 w2")["input_ids"] == [1, 2]
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    with pytest.raises(ConfigError, match="has changed since the job began"):
        keep_hub_files(str(folder), task.config.task, tmp_path)


@pytest.mark.parametrize(
    ("name", "modules"),
    [("llama", ""), ("llama", "embed_tokens,q_proj"), ("gpt2", "wte"), ("gpt2", ""), ("gpt_neox", "")],
)
def test_adapter(tmp_path: Path, data: str, name: str, modules: str) -> None:
    """Only the adapter is trained; it begins as nothing, and peft reads what is written."""
    peft = pytest.importorskip("peft")
    folder = made(tmp_path / "model", name)
    task = task_of(folder, data=data, lora={"rank": 2, "modules": modules})
    model, base = task.build_model().eval(), transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.arange(12).unsqueeze(0)
    assert torch.equal(model(input_ids=tokens).logits, base(input_ids=tokens).logits)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in n for n in trained)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if ".lora_B." in n or ".lora_embedding_A." in n:
                p.fill_(0.1)
    assert not torch.equal(model(input_ids=tokens).logits, base(input_ids=tokens).logits)
    keep_hub_files(str(folder), task.config.task, tmp_path)
    tensors = model_tensors(model)
    write_final(tmp_path, tensors, "m", "s", 1)
    assert not (tmp_path / "final" / "config.json").exists()
    read = peft.PeftModel.from_pretrained(base, tmp_path / "final")
    assert torch.equal(read(input_ids=tokens).logits, model(input_ids=tokens).logits)
    assert len(adapter_names(tensors)) == len(trained)


def test_adapters_that_cannot_be_made(tmp_path: Path, data: str) -> None:
    pytest.importorskip("peft")
    folder = made(tmp_path / "model", "llama")
    for options in ({"lora__rank": -1}, {"lora__rank": 2, "lora__modules": "q_proj,nope"}, {"lora__rank": "x"}):
        with pytest.raises(ConfigError, match=r"task\.lora"):
            task_of(folder, data=data, **options).build_model()


@pytest.mark.parametrize("by_command", [False, True])
@pytest.mark.parametrize(("micro_batch", "most"), [(2, 1), (1, 2), (0, 0)])
def test_an_evaluation_takes_few_samples_at_once(
    tmp_path: Path, data: str, by_command: bool, micro_batch: int, most: int
) -> None:
    """Their logits are what a job of a large vocabulary takes most of its memory for. None at once is refused."""
    task = task_of(made(tmp_path / "model", "llama"), data=data, context=8)
    task.config = replace(task.config, micro_batch=micro_batch, eval_every=1)
    assert task.evaluation_batch() == 64
    seen: list[int] = []

    def metrics(self: HuggingFace, model: Any, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        seen.append(len(batch))
        return {"n": torch.ones(2)}

    refused = nullcontext() if most else pytest.raises(TaskError, match=r"HuggingFace\.evaluation_batch: .* got 0")
    with pytest.MonkeyPatch.context() as patch, refused:
        patch.setattr(HuggingFace, "metrics", metrics)
        patch.setattr(huggingface, "_LOGITS_AT_ONCE", most * 8 * 256)
        if by_command:
            patch.setattr(evaluate, "make_task", lambda spec: task)
            patch.setattr(evaluate, "_config", lambda task, source: task.config)
            given = evaluate.WeightsGiven(pytest.fail, lambda: task.build_model().state_dict())
            evaluate.evaluate_task(f"hf:{tmp_path / 'model'}", tmp_path, given)
        else:
            model, samples = task.build_model(), task.build_dataset("train")
            optimizer = task.build_optimizer(model.parameters())
            train(
                task,
                everstep.join(model, optimizer, samples, lanes=1, micro_batch=2, steps=1),
                EarlyStop(task.config.early_stop),
            )
    assert len(task.build_dataset("test")) == 38 and seen == ([2] * 19 if most else [])


def test_a_metric_of_early_stop_that_there_is_not(tmp_path: Path, data: str) -> None:
    """It is known though no process makes the whole model before the start."""
    task = task_of(made(tmp_path / "model", "llama"), data=data)
    stops = {name: replace(task.config.early_stop, metric=name) for name in ("los", "loss", "accuracy")}
    for name, stop in stops.items():
        task.config = replace(task.config, early_stop=stop)
        with pytest.raises(ConfigError, match="loss, accuracy") if name == "los" else nullcontext():
            check_metric(task)
    found = task.metrics(task.build_model(), task.collate([task.build_dataset("test")[0]]))
    assert tuple(found) == READY_METRICS


# ---- the data


def test_text_through_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time the tokens come from the cache; a damaged cache is made again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = with_tokenizer(made(tmp_path / "model", "llama"))
    (tmp_path / "words").write_text("w5 w6 w7 w8\n" * 100)
    first = task_of(folder, data=str(tmp_path / "words")).build_dataset("train")
    assert first[0][:5].tolist() == [5, 6, 7, 8, 5]
    (kept,) = (tmp_path / "cache" / "everstep").iterdir()
    kept.write_bytes(kept.read_bytes()[:-8] + b"\1" * 8)
    again = task_of(folder, data=str(tmp_path / "words")).build_dataset("train")
    assert len(again) == len(first) and all(torch.equal(again[k], first[k]) for k in range(len(first)))


def test_a_text_is_tokenised_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces end with a line, wherever the text was read in parts; few are tokenised at once."""
    for name, value in {"_SCANNED": 7, "_PIECE": 10, "_PIECES_AT_ONCE": 2}.items():
        monkeypatch.setattr(tokenised, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = "Füße, 時間\nund eine lange Zeile\na\nb\nc\n\n\nd\ne\nno more lines".encode() + b"\xff\xe6\x99"
    (tmp_path / "text").write_bytes(data)
    calls: list[list[str]] = []

    def tokenizer(pieces: list[str], **options: bool) -> dict[str, list[list[int]]]:
        calls.append(pieces)
        return {"input_ids": [[ord(letter) for letter in piece] for piece in pieces]}

    numbers = tokenised.read_tokens(str(tmp_path / "text"), 0, lambda: (tokenizer, {}))["train"].numbers
    text = data.decode("utf-8", errors="replace")
    assert [chr(number) for number in numbers] == list(text) and numbers.dtype == np.int32
    assert [len(pieces) for pieces in calls] == [2, 1]
    assert calls == [["Füße, 時間\nund eine lange Zeile\n", "a\nb\nc\n\n\nd\ne\n"], ["no more lines��"]]


def test_token_files_and_windows(tmp_path: Path) -> None:
    """Windows of training and test together are all windows, in order, once each."""
    folder = made(tmp_path / "model", "llama")
    numbers = (np.arange(1000) % 251).astype(np.uint16)
    np.save(tmp_path / "tokens.npy", numbers)
    numbers.tofile(tmp_path / "tokens.bin")
    for name in ("tokens.npy", "tokens.bin"):
        task = task_of(folder, data=str(tmp_path / name), context=10)
        train, test = task.build_dataset("train"), task.build_dataset("test")
        windows = [train[k] for k in range(len(train))] + [test[k] for k in range(len(test))]
        assert (len(train), len(test)) == (94, 5) and len({tuple(w.tolist()) for w in windows}) == 99
        assert train[0].tolist() == list(range(10, 21)) and test[1][0] == 200


def test_rows_of_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [[1, 2, 3], [4, 5], list(range(6, 90))]
    parts = {"train": datasets.Dataset.from_dict({"input_ids": rows}), "test": datasets.Dataset.from_dict({"x": [1]})}
    parts["test"] = datasets.Dataset.from_dict({"input_ids": [list(range(50))]})
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "rows"))
    task = task_of(made(tmp_path / "model", "llama"), data=str(tmp_path / "rows"), context=4)
    assert task.build_dataset("train")[1].tolist() == [5, 6, 7, 8, 9] and len(task.build_dataset("test")) == 12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "nothing to learn from"),
        ({"data": "/nowhere"}, "No such file"),
        ({"data": "out.npy"}, "token 299 is out of the vocabulary"),
        ({"data": "floats.npy"}, "whole numbers in one dimension"),
        ({"data": "objects.npy"}, "no readable token file"),
        ({"data": "odd.bin"}, "no readable token file"),
        ({"data": "out.npy", "context": 17}, "expected 0 to 16"),
        ({"data": "out.npy", "foo": 1}, "no option 'task.foo'"),
    ],
)
def test_data_that_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    np.save(tmp_path / "out.npy", np.arange(300))
    np.save(tmp_path / "floats.npy", np.ones(300))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    if "data" in options:
        options = {**options, "data": os.path.join(tmp_path, options["data"])}
    folder = made(tmp_path / "model", "llama")
    with pytest.raises(ConfigError, match=said):
        if options.get("context"):
            np.save(tmp_path / "out.npy", np.arange(200))
        task_of(folder, **options).build_dataset("train")


# ---- directories that are refused


def settings(**changed: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text()) | changed
        (folder / "config.json").write_text(json.dumps({k: v for k, v in found.items() if v is not None}))

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        save_file(change(found), folder / "model.safetensors")

    return rewrite


def written(name: str, content: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(content)


def link(target: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(target)

    return change


def index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "there is no config.json"),
    "torn config": (lambda d: (d / "config.json").write_text("{"), "cannot be read"),
    "no type": (settings(model_type=None), "expected a model_type"),
    "unknown": (settings(model_type="foo"), "no architecture 'foo'"),
    "no causal head": (settings(model_type="t5"), "no causal language model"),
    "own code": (settings(auto_map={"AutoModel": "m.M"}, model_type="foo"), "code of its own .* write a Task"),
    "a kernel from elsewhere": (settings(_attn_implementation="some/kernel"), "asks for code from 'some/kernel'"),
    "a kernel instead of a package": (
        settings(attn_implementation="flash_attention_2"),
        "asks for code from 'flash_att",
    ),
    "own code, not needed": (settings(auto_map={"AutoModel": "m.M"}), "transformers has llama, too: remove auto_map"),
    "own code of the tokenizer": (
        lambda d: (
            (d / "tokenizer_config.json").write_text('{"auto_map": {"A": "b"}}')
            and (d / "tokenizer.json").write_text("{}")
        ),
        "code of its own",
    ),
    "vocabulary missing": (
        written("tokenizer_config.json", "{}"),
        "'tokenizer_config.json' is there, but no vocabulary.* or task.data as a file of tokens",
    ),
    "vocabulary of tiktoken": (written("qwen.tiktoken", "IQ== 0"), "'qwen.tiktoken' is there, but no vocabulary"),
    "vocabulary of another name": (written("source.spm", "x"), "'source.spm' is there, but no vocabulary"),
    "torn sentencepiece": (written("sentencepiece.bpe.model", "x"), "its tokenizer cannot be read"),
    "torn tekken": (written("tekken.json", "{}"), "its tokenizer cannot be read"),
    "empty vocabulary": (
        lambda d: settings(model_type="gemma", head_dim=8)(d) or written("vocab.json", "{}")(d),
        "vocabulary of its tokenizer is empty",
    ),
    "odd heads": (settings(num_attention_heads=3), "not valid for llama"),
    "activation that there is not": (
        settings(hidden_act="nope"),
        "config.json makes no LlamaForCausalLM: KeyError: 'nope'",
    ),
    "padding outside the vocabulary": (settings(pad_token_id=999), "makes no LlamaForCausalLM: .* within num_emb"),
    "no heads": (settings(num_key_value_heads=0), "makes no LlamaForCausalLM: ZeroDivisionError"),
    "quantised": (settings(quantization_config={"quant_method": "gptq"}), "quantised"),
    "small vocabulary": (settings(vocab_size=100), "too small for bytes"),
    "layers": (settings(num_hidden_layers=10**10), "expected 0 to 10000 layers in config.json, got 10000000000"),
    "layers of lists": (settings(model_type="qwen2", num_hidden_layers=10**10), "expected 0 to 10000 layers"),
    "layers within": (settings(text_config={"n_layer": -1}), "expected 0 to 10000 layers in config.json, got -1"),
    "adapter": (lambda d: (d / "adapter_config.json").write_text("{}"), "holds an adapter"),
    "incomplete": (
        weights(lambda w: {k: v for k, v in w.items() if k != "model.norm.weight"}),
        "incomplete: model.norm.weight",
    ),
    "more layers than the config": (settings(num_hidden_layers=1), "the model has no 'model.layers.1"),
    "other shape": (settings(intermediate_size=33), r"is \[32, 16\] in the files, \[33, 16\] by the config"),
    "whole numbers": (weights(lambda w: {k: v.to(torch.int8) for k, v in w.items()}), "is I8"),
    "torn": (lambda d: os.truncate(d / "model.safetensors", 3000), "cannot be read"),
    "pickle": (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "save_pretrained"),
    "device": (link("/dev/zero"), "not a regular file"),
    "link to nothing": (link("nothing"), "No such file"),
    "index that leads away": (index, "incomplete: model.safetensors.index.json names"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_directories_that_are_refused(tmp_path: Path, data: str, case: str) -> None:
    folder = made(tmp_path / "model", "llama")
    change, said = REFUSED[case]
    change(folder)
    with pytest.raises(ConfigError, match=said) as refused:
        task = task_of(folder, data=data)
        task.build_dataset("train")
        task.build_model()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("changed", [{"hidden_act": "nope"}, {"pad_token_id": 999}])
def test_a_config_alone_that_makes_no_model_is_refused(tmp_path: Path, data: str, changed: dict[str, Any]) -> None:
    folder = made(tmp_path / "model", "llama")
    settings(**changed)(folder)
    with pytest.raises(ConfigError, match="makes no LlamaForCausalLM"):
        task_of(folder / "config.json", data=data).build_model()


def test_weights_of_a_model_in_one_piece_are_looked_at_before_the_start(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=256, is_decoder=True, **sizes)
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path / "model")
    HuggingFace(str(tmp_path / "model"))
    weights(lambda w: {k: v for k, v in w.items() if "output.dense.weight" not in k})(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"are incomplete: bert.encoder.layer.0.attention.output.dense.weight is in"):
        HuggingFace(str(tmp_path / "model"))
    narrow = made(tmp_path / "narrow", "gpt_neox")
    weights(lambda w: {k: v.to(torch.int8) if "dense.weight" in k else v for k, v in w.items()})(narrow)
    with pytest.raises(ConfigError, match=r"attention.dense.weight' is I8: expected F64"):
        HuggingFace(str(narrow))
    other = made(tmp_path / "other", "llama")
    settings(model_type="bert", is_decoder=True)(other)
    with pytest.raises(ConfigError, match=r"are incomplete: bert.embeddings.word_embeddings.weight is in none"):
        HuggingFace(str(other))


def test_positions_that_are_counted_from_the_padding(tmp_path: Path, data: str) -> None:
    """The longest context is shorter than the table of positions by those that no token has."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.RobertaConfig(vocab_size=256, max_position_embeddings=18, is_decoder=True, **sizes)
    transformers.RobertaForCausalLM(config).save_pretrained(tmp_path / "model")
    task = task_of(tmp_path / "model", data=data)
    batch = task.build_dataset("train")[0].unsqueeze(0)
    assert batch.shape == (1, 17)
    task.loss(task.build_model(), batch)[0].backward()
    with pytest.raises(ConfigError, match="expected 0 to 16"):
        task_of(tmp_path / "model", data=data, context=17).build_dataset("train")


def test_an_encoder_is_refused(tmp_path: Path, data: str) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=256, **sizes)
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="sees the tokens that it is to predict"):
        task_of(tmp_path / "model", data=data).build_model()


def test_links_to_regular_files_are_followed(tmp_path: Path, data: str) -> None:
    folder = made(tmp_path / "model", "llama")
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    os.symlink(folder, tmp_path / "link")
    assert "fresh" not in " ".join(task_of(tmp_path / "link", data=data).notes())
    task_of(tmp_path / "link", data=data).build_model()
