"""Interchange, both ways, with the tools that others use."""

from __future__ import annotations

import errno
import json
import os
import pickle
import tracemalloc
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from everstep.base.errors import CheckpointCorrupt, ConfigError, StoreError
from everstep.checkpoint import interchange
from everstep.checkpoint.interchange import PassingWeights, names_record, read_weights, take_weights
from everstep.checkpoint.interchange_formats import DCP, HF, SAFETENSORS, TORCH, load_weights, write_weights
from everstep.checkpoint.reader import Checkpoint, open_checkpoint
from everstep.checkpoint.store import DirectoryStore
from exchange_cases import Awkward, checkpoint_of, rest, same_bits, trained


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    model, optimizer = trained()
    return checkpoint_of(model, optimizer, tmp_path_factory.mktemp("checkpoint"))


def expected() -> dict[str, torch.Tensor]:
    return trained()[0].state_dict()


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    assert [n for n in wanted if not same_bits(found[n], wanted[n])] == []


def exported(checkpoint: Checkpoint, path: Path, kind: str, optimizer: bool = False) -> Path:
    whole = optimizer or kind in (DCP, TORCH)
    aside = path.parent / "aside"
    read = read_weights(checkpoint, optimizer=optimizer, aside=aside) if whole else PassingWeights(checkpoint)
    write_weights(read, path, kind)
    return path


def test_state_is_the_models_own(checkpoint: Checkpoint) -> None:
    found = read_weights(checkpoint).model
    assert_same(found, expected())
    assert "head.weight" in found and "scratch" not in found


def test_safetensors(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert_same(load_file(exported(checkpoint, tmp_path / "m.safetensors", SAFETENSORS)), expected())


def test_the_memory_of_a_tensor_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(size: int = 0) -> bytearray:
        made.append(size)
        return bytearray(size)

    model = torch.nn.Linear(512, 1024, bias=False)  # eight blocks
    monkeypatch.setattr(interchange, "bytearray", counted, raising=False)
    assert_same(read_weights(checkpoint_of(model, None, tmp_path / "checkpoint")).model, model.state_dict())
    assert made.count(model.weight.nbytes) == 1


def test_tensors_that_are_put_aside_take_no_memory(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 2048, bias=False) for _ in range(4)))
    saved = checkpoint_of(model, None, tmp_path / "checkpoint")
    tracemalloc.start()
    try:
        found = read_weights(saved, aside=tmp_path).model
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < 64 << 20 < sum(tensor.nbytes for tensor in found.values())
    assert_same(found, model.state_dict())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_no_room_aside_is_told(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: Any, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match=f"cannot put tensors aside in {tmp_path}: No space left on device"):
        read_weights(checkpoint, aside=tmp_path)


class Keeper(torch.nn.Module):
    """Has a state of its own."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 0}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_a_model_is_filled_tensor_by_tensor(checkpoint: Checkpoint) -> None:
    model = trained(seed=5)[0]
    PassingWeights(checkpoint).fill(model)
    assert_same(model.state_dict(), expected())
    before = {n: t.clone() for n, t in model.state_dict().items()}
    model.low = torch.nn.Linear(6, 5, dtype=torch.bfloat16)
    del model.scale
    model.more = torch.nn.Parameter(torch.zeros(2))
    model.keeper = Keeper()
    with pytest.raises(ConfigError) as told:
        PassingWeights(checkpoint).fill(model)
    text = str(told.value)
    assert "missing: keeper._extra_state, more; unexpected: scale; " in text
    assert "of another type or shape: low.weight ([6, 6] there, [5, 6] in" in text
    assert torch.equal(model.embed.weight, before["embed.weight"])


def test_torch_save(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert_same(torch.load(exported(checkpoint, tmp_path / "m.pt", TORCH), weights_only=True), expected())


def test_dcp(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = exported(checkpoint, tmp_path / "dcp", DCP)
    model = trained(seed=2, steps=0)[0]
    found = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=path)
    assert_same(found, expected())


@pytest.mark.parametrize("kind", [SAFETENSORS, TORCH, DCP, HF])
def test_what_is_written_has_its_name_once_all_of_it_is_durable(
    checkpoint: Checkpoint, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    sync, rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        sync(fd)
        synced.add(os.fstat(fd).st_ino)

    def renamed(old: Path, new: Path) -> None:
        files = [p for p in old.rglob("*") if p.is_file()] if old.is_dir() else [old]
        assert files and {p.stat().st_ino for p in files} <= synced and tmp_path.stat().st_ino not in synced
        rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    path = exported(checkpoint, tmp_path / "out", kind)
    assert path.exists() and tmp_path.stat().st_ino in synced


@pytest.mark.parametrize("kind", [DCP, TORCH])
def test_optimizer_goes_to_torchs_own_functions(checkpoint: Checkpoint, tmp_path: Path, kind: str) -> None:
    path = exported(checkpoint, tmp_path / "out", kind, optimizer=True)
    loaded = load_weights(path) if kind == DCP else None
    optimizer_part = loaded.optimizer if loaded else torch.load(path, weights_only=True)["optimizer"]
    model, optimizer = trained(seed=3, steps=1)
    before = trained()[1]
    set_optimizer_state_dict(model, optimizer, optimizer_part)
    for mine, theirs in zip(optimizer.param_groups, before.param_groups, strict=True):
        assert mine["lr"] == theirs["lr"]
        for p, q in zip(mine["params"], theirs["params"], strict=True):
            assert all(torch.equal(v, optimizer.state[p][k]) for k, v in before.state[q].items())


@pytest.mark.parametrize("kind", (SAFETENSORS, DCP, TORCH, HF))
def test_there_and_back(checkpoint: Checkpoint, tmp_path: Path, kind: str) -> None:
    path = exported(checkpoint, tmp_path / f"out.{'safetensors' if kind == SAFETENSORS else kind}", kind)
    model, optimizer = trained(seed=4, steps=1)
    scratch = model.scratch.clone()
    told = take_weights(load_weights(path), model, optimizer)
    assert told.endswith("optimizer state fresh")
    assert_same(model.state_dict(), expected())
    assert model.head.weight is model.embed.weight and model.turned.stride() == trained()[0].turned.stride()
    assert torch.equal(model.scratch, scratch)


@pytest.mark.parametrize("kind", [DCP, TORCH])
def test_there_and_back_with_optimizer(checkpoint: Checkpoint, tmp_path: Path, kind: str) -> None:
    path = exported(checkpoint, tmp_path / "out", kind, optimizer=True)
    model, optimizer = trained(seed=4, steps=1)
    optimizer.param_groups[0]["lr"] = 7.0
    take_weights(load_weights(path), model, optimizer)
    wanted_model, wanted = trained()
    for m, o in ((model, optimizer), (wanted_model, wanted)):  # one more step: the same bits come out
        o.zero_grad()
        m.total().backward()
        o.step()
    assert_same(model.state_dict(), wanted_model.state_dict())


def test_plain_torch_optimizer_by_number(tmp_path: Path) -> None:
    source, its_optimizer = trained()
    torch.save({"model": source.state_dict(), "optimizer": its_optimizer.state_dict()}, tmp_path / "m.pt")
    model, optimizer = trained(seed=4, steps=0)
    take_weights(load_weights(tmp_path / "m.pt"), model, optimizer)
    ours, theirs = optimizer.state_dict(), its_optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert all(torch.equal(v, ours["state"][i][k]) for i, s in theirs["state"].items() for k, v in s.items())


def test_hugging_face_folder_is_loaded_by_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=8)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path / "config")
    weights = PassingWeights(checkpoint_of(model, None, tmp_path / "checkpoint"))
    for name, shard in (("one", 1 << 30), ("many", 4096)):
        write_weights(weights, tmp_path / name, HF, hf_config=tmp_path / "config", shard_bytes=shard)
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / name)
        assert_same(loaded.state_dict(), model.state_dict())
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2

    model.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")  # leaves one of the tied names out
    assert json.loads((tmp_path / "theirs" / "model.safetensors.index.json").read_text())
    other = transformers.GPT2LMHeadModel(config)
    take_weights(load_weights(tmp_path / "theirs"), other)
    assert_same(other.state_dict(), model.state_dict())


def test_what_does_not_fit_is_named(checkpoint: Checkpoint) -> None:
    model, optimizer = trained(seed=5)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    weights = read_weights(checkpoint)
    del weights.model["scale"], weights.model["head.weight"]  # the latter may lack: it is tied
    weights.model["low.weight"] = weights.model["low.weight"].float()
    weights.model["low.bias"] = weights.model["low.bias"][:3]
    weights.model["foreign"] = torch.zeros(1)
    with pytest.raises(ConfigError) as told:
        take_weights(weights, model, optimizer)
    text = str(told.value)
    assert "missing: scale;" in text and "unexpected: foreign;" in text and "\n" not in text
    assert "low.weight (float32[6, 6] there, bfloat16[6, 6] in the model)" in text and "low.bias (bfloat16[3]" in text
    assert_same(model.state_dict(), before)


def test_ties_that_differ_are_refused(checkpoint: Checkpoint) -> None:
    weights = read_weights(checkpoint)
    weights.model["head.weight"] = weights.model["head.weight"] + 1
    with pytest.raises(ConfigError, match=r"tied in the model but different there: embed.weight and head.weight"):
        take_weights(weights, Awkward())


def test_optimizer_of_other_groups_is_refused(checkpoint: Checkpoint) -> None:
    weights = read_weights(checkpoint, optimizer=True)
    model = Awkward()
    with pytest.raises(ConfigError, match="has 1 groups"):
        take_weights(weights, model, torch.optim.AdamW(model.parameters()))
    others = torch.optim.AdamW([{"params": [model.embed.weight]}, {"params": [*model.low.parameters(), *rest(model)]}])
    with pytest.raises(ConfigError, match="group 0 holds other parameters"):
        take_weights(weights, model, others)


def test_unusable_paths_are_told_in_a_line(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.safetensors").write_bytes(b"x" * 30)
    (tmp_path / "bad.pt").write_bytes(b"x" * 30)
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"model": Awkward()}, tmp_path / "module.pt")  # pickled code: weights_only refuses it
    for name, words in {
        "empty": "unknown format",
        "none": "there is no",
        "bad.safetensors": "cannot read",
        "bad.pt": "cannot read",
        "list.pt": "expected a state dict",
        "module.pt": "cannot read",
    }.items():
        with pytest.raises(ConfigError, match=words) as told:
            load_weights(tmp_path / name)
        assert "\n" not in str(told.value)
    weights = read_weights(checkpoint, optimizer=True)
    with pytest.raises(ConfigError, match="holds no optimizer state"):
        write_weights(weights, tmp_path / "x", SAFETENSORS)
    with pytest.raises(ConfigError, match="exists already"):
        write_weights(weights, tmp_path / "empty", DCP)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        write_weights(weights, tmp_path / "file" / "x", DCP)
    assert not list(tmp_path.glob(".*partial"))


class Harm:
    """What runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def refused(path: Path, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as told:
        load_weights(path)
    assert "\n" not in str(told.value)


def test_an_index_of_dcp_runs_nothing_and_leads_nowhere(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = exported(checkpoint, tmp_path / "evil" / "dcp", DCP)
    index = pickle.loads((path / ".metadata").read_bytes())
    mark = tmp_path / "mark"
    (tmp_path / "evil" / "x.distcp").touch()
    os.mkfifo(path / "pipe")
    (path / ".metadata").write_bytes(pickle.dumps(Harm(mark)))
    refused(path, r"dcp/\.metadata is refused: it names 'posix\.mkdir', which no index")
    for name in ("../x.distcp", str(tmp_path / "x.distcp"), "..", "gone.distcp", "pipe", ["x"]):
        places = {key: replace(place, relative_path=name) for key, place in index.storage_data.items()}
        (path / ".metadata").write_bytes(pickle.dumps(replace(index, storage_data=places)))
        refused(path, r"\.metadata names .*, which is no file of its directory")
    assert not mark.exists()


def test_what_is_no_tensor_in_dcp_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.zeros(2), "harm": Harm(mark)}, checkpoint_id=tmp_path / "dcp")
    refused(tmp_path / "dcp", "cannot read .* as dcp: 'harm' is neither a tensor, a number nor")
    assert not mark.exists()


def test_an_index_of_shards_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "out.safetensors")
    os.mkfifo(tmp_path / "hf" / "pipe")
    for name in ("../out.safetensors", str(tmp_path / "out.safetensors"), "..", "", "pipe", ["x"], None):
        (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        refused(tmp_path / "hf", "cannot read|which is no file of its folder")
    refused(tmp_path / "hf" / "pipe", "neither a file nor a folder")


def test_altered_checkpoint_is_not_exported(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint_of(model, optimizer, tmp_path)
    (part,) = tmp_path.glob("step-*/part*")
    data = bytearray(part.read_bytes())
    data[4096 + 100] ^= 1
    part.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match="does not match its digest"):
        read_weights(open_checkpoint(DirectoryStore(tmp_path), 5), optimizer=True)
    with pytest.raises(CheckpointCorrupt, match="does not match its digest"):
        exported(open_checkpoint(DirectoryStore(tmp_path), 5), tmp_path / "out", SAFETENSORS)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*partial"))


def test_what_is_no_tensor_in_a_state_dict_has_no_name() -> None:
    class Told(torch.nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {**super().state_dict(*args, **kwargs), "note": "words", "count": 3}

    assert json.loads(names_record(Told(2, 2))) == {"names": {"weight": "weight", "bias": "bias"}}
