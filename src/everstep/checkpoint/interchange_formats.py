"""The file formats of others, written and read with their own public tools: one safetensors file, a Hugging Face
folder, a `torch.distributed.checkpoint` directory, and what `torch.save` makes of a state dict.

Apart from `interchange`: nothing here knows of checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from everstep.base.errors import ConfigError, StoreError
from everstep.base.given import bounded_memory, open_given, read_json
from everstep.base.hub_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from everstep.checkpoint.interchange import PassingWeights, Weights, adapter_names, refuse_swollen, size_of
from everstep.checkpoint.tensor_file import TensorFile, TensorForm, bytes_in
from everstep.exact.extra_state import from_file, is_extra, to_file

SAFETENSORS, HF, DCP, TORCH = "safetensors", "hf", "dcp", "torch"
WITH_OPTIMIZER = (DCP, TORCH)
SHARD_BYTES = 5_000_000_000
_MOST_INDEX_BYTES = 256 << 20
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def write_weights(
    weights: Weights | PassingWeights,
    path: Path,
    kind: str,
    *,
    hf_config: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    beside: Mapping[str, bytes] | None = None,
) -> list[Path]:
    """Writes one of these formats to a path that does not exist yet; returns the files. All of it appears at once.
    safetensors and Hugging Face's are written tensor by tensor; the others take `Weights` alone.

    hf_config: config.json, or a folder with one, that is copied beside. shard_bytes: of a Hugging Face shard.
    beside: further files of a Hugging Face folder; with the config of an adapter, the adapter's weights alone are
    written.

    Raises: ConfigError if the path is taken or the format cannot hold what is asked for; StoreError.
    """
    if weights.optimizer is not None and kind not in WITH_OPTIMIZER:
        raise ConfigError(f"--format {kind} holds no optimizer state: use one of {', '.join(WITH_OPTIMIZER)}")
    if path.exists():
        raise ConfigError(f"{path} exists already: choose another --to")
    writer: dict[str, Callable[[Any, Path], None]] = {
        SAFETENSORS: lambda w, p: _write_files(w, {p: {name: name for name in w.forms}}),
        TORCH: lambda w, p: torch.save(_nested(w, _as_state_dict(_apart(w.model))), p),
        DCP: _write_dcp,
        HF: lambda w, p: _write_hf(w, p, hf_config, shard_bytes, beside or {}),
    }
    with _appearing(path) as partial:
        writer[kind](weights, partial)
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def save_torch(content: Mapping[str, Any], path: Path) -> None:
    """Write what torch.load reads, in place of an older file. Raises: StoreError."""
    with _appearing(path) as partial:
        torch.save(dict(content), partial)


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A path beside this one, which takes its name at the end, or is removed."""
    partial = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        for file in [p for p in partial.rglob("*") if p.is_file()] if partial.is_dir() else [partial]:
            _sync(file)
        os.rename(partial, path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None
    except RuntimeError as error:  # what torch.save and DCP make of a full disk
        if "PytorchStreamWriter" not in str(error) and "file write failed" not in str(error):
            raise
        raise StoreError(f"cannot write {path}: {str(error).splitlines()[0]}") from None
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with suppress(OSError):
                partial.unlink()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors that share no memory: ties are written once for each name."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        where = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if where in seen else tensor.contiguous()
        seen.add(where)
    return found


def _as_state_dict(model: dict[str, Tensor]) -> dict[str, Any]:
    """Extra state as `load_state_dict` wants it."""
    return {name: from_file(tensor) if is_extra(name) else tensor for name, tensor in model.items()}


def _nested(weights: Weights, model: dict[str, Any]) -> dict[str, Any]:
    """The state dict itself, or {"model", "optimizer"} where there is an optimizer's."""
    return model if weights.optimizer is None else {"model": model, "optimizer": weights.optimizer}


def _write_dcp(weights: Weights, path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it saves in a single process, which is meant
        save(_nested(weights, weights.model), storage_writer=FileSystemWriter(path), no_dist=True)


def _write_hf(
    weights: Weights | PassingWeights, path: Path, config: Path | None, shard_bytes: int, beside: Mapping[str, bytes]
) -> None:
    path.mkdir()
    for name, content in beside.items():
        (path / name).write_bytes(content)
    forms = weights.forms
    shards = _shards(forms, shard_bytes)
    if ADAPTER_CONFIG in beside:
        _write_files(weights, {path / ADAPTER_WEIGHTS: adapter_names(forms)})
    elif len(shards) == 1:
        _write_files(weights, {path / _SINGLE: {name: name for name in forms}})
    else:
        files = {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, 1)}
        where = {name: file for file, shard in files.items() for name in shard}
        _write_files(weights, {path / file: {name: name for name in shard} for file, shard in files.items()})
        index = {"metadata": {"total_size": sum(map(bytes_in, forms.values()))}, "weight_map": where}
        (path / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    if config is not None:
        source = config / "config.json" if config.is_dir() else config
        if not source.is_file():
            raise ConfigError(f"there is no {source}: --hf-config takes a config.json, or a folder with one")
        shutil.copyfile(source, path / "config.json")


def _write_files(weights: Weights | PassingWeights, wanted: Mapping[Path, Mapping[str, str]]) -> None:
    """wanted: by file, names of tensors and what they are called there."""
    with ExitStack() as stack:
        files: dict[str, tuple[TensorFile, str]] = {}
        for path, names in wanted.items():
            file = stack.enter_context(TensorFile(path, {names[name]: weights.forms[name] for name in names}))
            files |= {name: (file, called) for name, called in names.items()}
        for name, tensor in weights.each():
            if name in files:
                file, called = files[name]
                file.put(called, tensor)


def _shards(forms: Mapping[str, TensorForm], limit_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, form in forms.items():
        nbytes = bytes_in(form)
        if shards[-1] and size + nbytes > limit_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


# ---- reading


def detect(path: Path) -> str:
    """Which format lies at a path.

    Raises: ConfigError if there is nothing, or nothing known.
    """
    if path.is_dir():
        if (path / ".metadata").is_file():
            return DCP
        if (path / _INDEX).is_file() or (path / _SINGLE).is_file():
            return HF
        raise ConfigError(
            f"{path} has an unknown format: expected model.safetensors (or its index), or .metadata of "
            "torch.distributed.checkpoint"
        )
    if not path.is_file():
        raise ConfigError(f"there is no {path}" if not path.exists() else f"{path} is neither a file nor a folder")
    return SAFETENSORS if path.suffix == ".safetensors" else TORCH


def load_weights(path: Path) -> Weights:
    """Weights at a path, in whichever of the formats.

    Nothing that it says is executed, and it leads to no file outside of a directory that is one.

    Raises: ConfigError, naming what cannot be read and why.
    """
    kind = detect(path)
    reader = {SAFETENSORS: _read_safetensors, HF: _read_hf, TORCH: _read_torch, DCP: _read_dcp}[kind]
    size = size_of(path)
    with bounded_memory(size) as most, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return reader(path)
        except ConfigError:
            raise
        except Exception as error:  # four foreign readers, each with errors of its own
            said = " ".join(str(error).split())[:200] or type(error).__name__
            if isinstance(error, MemoryError) or "allocate" in said:
                said = f"it has {size} bytes and takes more than {most} of memory: expected tensors that are not packed"
            elif isinstance(error, RecursionError):
                said = "it is nested too deeply: expected a state dict"
            raise ConfigError(f"cannot read {path} as {kind}: {said}") from error


def _read_safetensors(path: Path) -> Weights:
    with open_given(path, links=True) as given, safe_open(f"/proc/self/fd/{given.fileno()}", framework="pt") as file:
        return Weights({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def _read_hf(path: Path) -> Weights:
    index = path / _INDEX
    if not index.is_file():
        return _read_safetensors(path / _SINGLE)
    where = read_json(index, _MOST_INDEX_BYTES, links=True)["weight_map"]
    weights = Weights()
    for shard in sorted(set(where.values())):
        if not isinstance(shard, str) or Path(shard).name != shard or not (path / shard).is_file():
            raise ConfigError(f"{index} names {str(shard)[:100]!a}, which is no file of its folder")
        weights.model |= _read_safetensors(path / shard).model
    lacking = sorted(set(where) - set(weights.model))
    if lacking:
        raise ConfigError(f"{index} names {lacking[0]}, which is in none of its shards")
    return weights


def _read_torch(path: Path) -> Weights:
    return _from_nested(torch.load(path, map_location="cpu", weights_only=True), path)


def _from_nested(loaded: Any, path: Path) -> Weights:
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{path} holds a {type(loaded).__name__}; expected a state dict (names -> tensors)")
    inner = loaded.get("model")
    model, optimizer = (inner, loaded.get("optimizer")) if isinstance(inner, Mapping) else (loaded, None)
    kept = {str(name): v for name, v in model.items() if isinstance(v, Tensor) or is_extra(str(name))}
    refuse_swollen([kept, optimizer], path)
    if not kept:
        raise ConfigError(f"{path} holds no tensors; expected a state dict (names -> tensors)")
    return Weights({name: to_file(name, v) if is_extra(name) else v.detach() for name, v in kept.items()}, optimizer)


def _read_dcp(path: Path) -> Weights:
    from everstep.checkpoint.interchange_dcp import read_dcp

    return _from_nested(read_dcp(path), path)
