"""A checkpoint as other tools see it: the model's tensors under its own names, and the optimizer's by parameter.

Apart from the file formats (`interchange_formats`), because it needs a checkpoint alone, not the model's class. What a
state does not say by itself (further names of tied parameters, buffers that `state_dict` leaves out) is written into
each checkpoint as `application[NAMES]`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everstep.base.errors import CheckpointCorrupt, ConfigError, StoreError
from everstep.base.given import MOST_BYTES
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.reader import Checkpoint
from everstep.checkpoint.tensor_file import Aside, TensorForm, form_of
from everstep.exact.digest import bytes_of
from everstep.exact.extra_state import from_file, is_extra, keepers, to_file, unpack
from everstep.exact.image import BLOCK_BYTES, StateEntry, pieces_of
from everstep.exact.jsonable import decode
from everstep.exact.layout import memory_of

NAMES = "names"
"""The part of `Manifest.application` that `names_record` makes."""
_MODEL = "model/"
_MOST_VALUES = 1 << 22

OnProgress = Callable[[int, int], None]
"""Told how many bytes of how many were read."""


class _Record(msgspec.Struct):
    names: dict[str, str]


_record = msgspec.json.Decoder(_Record)


@dataclass
class Weights:
    """Contents of the formats. model: as `state_dict` has it, extra state as `to_file` makes it. optimizer: as
    `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` has it, by parameter name; None if absent.
    """

    model: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None

    @property
    def forms(self) -> dict[str, TensorForm]:
        return {name: form_of(tensor) for name, tensor in self.model.items()}

    def each(self) -> Iterator[tuple[str, Tensor]]:
        """The model's tensors, one after the other, by their names."""
        yield from self.model.items()


class PassingWeights:
    """The model of a checkpoint, whose tensors are read one by one: nobody has all of them. forms: as `Weights`."""

    optimizer = None

    def __init__(self, checkpoint: Checkpoint, progress: OnProgress = lambda done, total: None) -> None:
        """Raises: as `read_weights`."""
        self._checkpoint, self._progress = checkpoint, progress
        entries = [e for e in checkpoint.manifest.entries if e.name.startswith(_MODEL)]
        own = {e.name.removeprefix(_MODEL): e for e in entries}
        names = _names(checkpoint.manifest, own)
        small = [own[first] for first in {*names.values()} if is_extra(first)]
        self._extra = {name.removeprefix(_MODEL): t for name, t in _passing(small, checkpoint)}
        self._named: dict[str, list[str]] = {}
        self.forms: dict[str, TensorForm] = {}
        for name, first in names.items():
            entry = own[first]
            self._named.setdefault(first, []).append(name)
            extra = to_file(name, unpack(self._extra[first])) if is_extra(first) else None
            self.forms[name] = (entry.dtype, entry.shape) if extra is None else form_of(extra)
        self._entries = [own[first] for first in self._named if first not in self._extra]

    def each(self) -> Iterator[tuple[str, Tensor]]:
        """As `Weights.each`. Raises: CheckpointCorrupt; StoreError."""
        for first, tensor in self._extra.items():
            for name in self._named[first]:
                yield name, to_file(name, unpack(tensor))
        for stored, tensor in _passing(self._entries, self._checkpoint, self._progress):
            for name in self._named[stored.removeprefix(_MODEL)]:
                yield name, tensor

    def fill(self, model: nn.Module) -> None:
        """Copy all of it into a model. Raises: ConfigError naming what does not fit; CheckpointCorrupt; StoreError."""
        modules = dict(keepers(model))
        targets = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        wanted = {name: tuple(t.shape) for name, t in targets.items() if name not in modules}
        given = {name: tuple(shape) for name, (_, shape) in self.forms.items() if name not in modules}
        _refuse(
            missing=sorted((wanted.keys() | modules.keys()) - self.forms.keys()),
            unexpected=sorted(given.keys() - wanted.keys()),
            shapes=[
                f"{name} ({list(given[name])} there, {list(shape)} in the model)"
                for name, shape in wanted.items()
                if given.get(name, shape) != shape
            ],
        )
        for name, tensor in self.each():
            if name in modules:
                modules[name].set_extra_state(from_file(tensor))
            else:
                targets[name].detach().copy_(tensor)


def names_record(model: nn.Module) -> bytes:
    """Facts of the whole model that `export` needs beyond the state, the same in any topology.

    JSON: `names`, what `state_dict` calls each tensor -> the name that the state has it under (the first of a tie).
    """
    firsts: dict[tuple[object, ...], str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        firsts.setdefault(memory_of(tensor), name)
    kept = model.state_dict(keep_vars=True)
    names = {
        name: name if is_extra(name) else firsts[memory_of(t)]
        for name, t in kept.items()
        if is_extra(name) or isinstance(t, Tensor)
    }
    return json.dumps({"names": names}, separators=(",", ":")).encode()


def adapter_names(names: Iterable[str]) -> dict[str, str]:
    """The weights of a model's LoRA adapter among these names of its `state_dict`, and how the package `peft` names
    them in a file; empty if it has none."""
    prefix = "base_model.model."
    return {
        name: prefix + name.removeprefix(prefix).replace(".default.", ".").removesuffix(".default")
        for name in names
        if any(part in name for part in (".lora_A.", ".lora_B.", ".lora_embedding_A.", ".lora_embedding_B."))
    }


def read_weights(
    checkpoint: Checkpoint,
    *,
    optimizer: bool = False,
    progress: OnProgress = lambda done, total: None,
    aside: Path | None = None,
) -> Weights:
    """The model, and if wanted the optimizer's state, of a checkpoint. Tied parameters stand under each of their names.
    aside: a folder; the tensors lie on its disk instead of in memory.

    Raises: CheckpointCorrupt if a byte of it was altered, or what it holds does not fit together. StoreError.
    """
    manifest = checkpoint.manifest
    wanted = [e for e in manifest.entries if e.name.startswith(_MODEL) or optimizer]
    read = _passing(wanted, checkpoint, progress) if aside is None else _put_aside(wanted, checkpoint, progress, aside)
    tensors = dict(read)
    stored = {name.removeprefix(_MODEL): t for name, t in tensors.items() if name.startswith(_MODEL)}
    names = _names(manifest, stored)
    weights = Weights(
        {
            name: to_file(name, unpack(stored[first])) if is_extra(first) else stored[first]
            for name, first in names.items()
        }
    )
    if optimizer:
        weights.optimizer = _optimizer(manifest.state["values"], tensors)
    return weights


def _names(manifest: Manifest, stored: Iterable[str]) -> dict[str, str]:
    """The model's name of each tensor -> the state's."""
    known = set(stored)
    data = manifest.application.get(NAMES)
    if data is None:
        return {name: name for name in stored}
    try:
        names = _record.decode(data).names
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointCorrupt(f"the checkpoint's record of names is not as Everstep writes it: {error!r}") from error
    lost = [first for first in names.values() if first not in known]
    if lost:
        raise CheckpointCorrupt(f"the checkpoint names {lost[0]!r}, but its state does not hold it")
    return names


def _optimizer(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """state by parameter name, and the groups with names for `params`."""
    if "groups" not in values:
        return None
    try:
        loaded = [decode(group, tensors) for group in values["groups"]]
        groups = [{**group["values"], "params": list(group["params"])} for group in loaded]
        return {"state": dict(decode(values["state"], tensors)), "param_groups": groups}
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"the optimizer's state is not as Everstep writes it: {error!r}") from error


def _passing(
    entries: Iterable[StateEntry], checkpoint: Checkpoint, progress: OnProgress = lambda done, total: None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these entries, each in memory of its own, as soon as it is whole."""
    ordered = sorted(entries, key=lambda e: e.offset)
    memory, done = bytearray(), 0
    for k, at, piece in _pieces(ordered, checkpoint, progress):
        entry = ordered[k]
        if at == 0:
            memory = bytearray(entry.nbytes)
        memory[at : at + len(piece)] = piece
        if at + len(piece) == entry.nbytes:
            for empty in ordered[done:k]:
                yield empty.name, tensor_of(empty, bytearray())
            whole, memory, done = memory, bytearray(), k + 1
            yield entry.name, tensor_of(entry, whole)
            del whole
    for empty in ordered[done:]:
        yield empty.name, tensor_of(empty, bytearray())


def _put_aside(
    entries: Iterable[StateEntry], checkpoint: Checkpoint, progress: OnProgress, folder: Path
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these entries, in a file without a name in this folder. Raises: StoreError for a full disk."""
    ordered = sorted(entries, key=lambda e: e.offset)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = Aside(folder)
        begins = [file.room(entry.nbytes) for entry in ordered]
        for k, at, piece in _pieces(ordered, checkpoint, progress):
            file.write(begins[k] + at, piece)
        memory = file.mapped()
    except OSError as error:
        raise StoreError(f"cannot put tensors aside in {folder}: {error.strerror or error}") from None
    for entry, begin in zip(ordered, begins, strict=True):
        yield entry.name, tensor_of(entry, memory[begin : begin + entry.nbytes])


def _pieces(
    ordered: Sequence[StateEntry], checkpoint: Checkpoint, progress: OnProgress
) -> Iterator[tuple[int, int, memoryview]]:
    """The bytes of these entries, which ascend: (number of the entry, where in it, bytes). Every block is read once."""
    needed = sorted({block for e in ordered for block in e.blocks})
    for count, (index, block) in enumerate(zip(needed, checkpoint.read_blocks(needed), strict=True), 1):
        start = index * BLOCK_BYTES
        for k, lo, hi in pieces_of(ordered, index):
            yield k, lo - ordered[k].offset, block[lo - start : hi - start]
        progress(count * BLOCK_BYTES, len(needed) * BLOCK_BYTES)


def tensor_of(entry: StateEntry, memory: bytearray | memoryview) -> Tensor:
    """An entry's tensor, in the memory of its bytes."""
    dtype = getattr(torch, entry.dtype)
    if not memory:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).reshape(entry.shape)


# ---- from others


def size_of(path: Path) -> int:
    """Bytes of a file, or of the files of a folder."""
    return sum(p.stat().st_size for p in (path.iterdir() if path.is_dir() else [path]) if p.is_file())


def refuse_swollen(found: Any, path: Path) -> None:
    """Values that are kept once and named many times are copied later, so what the copies take is counted before.

    Raises: ConfigError if the values are too many or too large for the file, or a tensor is no plain one.
    """
    known: dict[int, tuple[int, int]] = {}

    def sums(thing: Any) -> tuple[int, int]:
        """(number of values, bytes of tensors and texts) in this."""
        if isinstance(thing, Tensor):
            if thing.layout != torch.strided or thing.is_meta or thing.is_quantized or thing.is_nested:
                raise ConfigError(f"{path} holds a sparse, quantised or empty tensor: expected dense numbers")
            return 1, thing.numel() * thing.element_size()
        inner = [*thing, *thing.values()] if isinstance(thing, dict) else thing
        if not isinstance(inner, list | tuple | set):
            return 1, len(thing) if isinstance(thing, str | bytes | bytearray) else 0
        if id(thing) not in known:
            known[id(thing)] = 0, 0  # if it contains itself, what encodes it says so
            each = [sums(one) for one in inner]
            known[id(thing)] = 1 + sum(count for count, _ in each), sum(size for _, size in each)
        return known[id(thing)]

    count, size = sums(found)
    if count > _MOST_VALUES or size > MOST_BYTES + 16 * size_of(path):
        raise ConfigError(
            f"{path} has {size_of(path)} bytes and stands for {count} values and {size} bytes of tensors and texts: "
            f"expected at most {_MOST_VALUES} values, and 16 times its size"
        )


# ---- into a model and its optimizer


_NAMED = 5


def take_weights(weights: Weights, model: nn.Module, optimizer: Optimizer | None = None) -> str:
    """Copies weights into the model, and the optimizer's state too where there is some; returns what was taken.

    A tied parameter may come under any of its names, or several with equal values.

    Raises: ConfigError naming missing, unexpected and mis-shaped tensors; nothing is changed then.
    """
    extras = dict(keepers(model))
    given = {extras[name]: from_file(t) for name, t in weights.model.items() if name in extras}
    named = model.state_dict(keep_vars=True).items()
    targets = {n: t for n, t in named if isinstance(t, Tensor) and n not in extras}
    ties: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in targets.items():
        ties.setdefault(memory_of(tensor), []).append(name)
    found = {name: tensor for name, tensor in weights.model.items() if name not in extras}
    chosen = _choose(found, targets, list(ties.values()))
    state = None if weights.optimizer is None or optimizer is None else _states(weights.optimizer, model, optimizer)
    with torch.no_grad():
        for name, tensor in chosen.items():
            targets[name].detach().copy_(tensor)
        for module, value in given.items():
            module.set_extra_state(value)
    fresh = f", extra state of {len(extras) - len(given)} modules fresh" if len(extras) > len(given) else ""
    if state is None or optimizer is None:
        return f"{len(chosen)} tensors, optimizer state fresh{fresh}"
    groups, per_parameter = state
    optimizer.state.clear()
    for parameter, values in per_parameter.items():
        optimizer.state[parameter] = values
    for group, loaded in zip(optimizer.param_groups, groups, strict=True):
        group.update(loaded)
    return f"{len(chosen)} tensors, optimizer state of {len(per_parameter)} parameters{fresh}"


def _choose(found: Mapping[str, Tensor], targets: Mapping[str, Tensor], ties: list[list[str]]) -> dict[str, Tensor]:
    """One name of each tie, with the tensor to put there."""
    chosen: dict[str, Tensor] = {}
    missing, shapes, apart = [], [], []
    for names in ties:
        here = [name for name in names if name in found]
        if not here:
            missing.append(names[0])
            continue
        tensor, target = found[here[0]], targets[here[0]]
        if tuple(tensor.shape) != tuple(target.shape) or tensor.dtype != target.dtype:
            shapes.append(f"{here[0]} ({_kind(tensor)} there, {_kind(target)} in the model)")
            continue
        if any(bytes_of(found[other]) != bytes_of(tensor) for other in here[1:]):
            apart.append(" and ".join(here))
            continue
        chosen[here[0]] = tensor
    unexpected = sorted(set(found) - set(targets))
    _refuse(missing=missing, unexpected=unexpected, shapes=shapes, apart=apart)
    return chosen


def _refuse(*, missing: list[str], unexpected: list[str], shapes: list[str], apart: Sequence[str] = ()) -> None:
    """Raises: ConfigError if there is any."""
    problems = [
        f"{words}: {_listed(names)}"
        for words, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another type or shape", shapes),
            ("tied in the model but different there", apart),
        )
        if names
    ]
    if problems:
        raise ConfigError(f"the weights do not fit the task's model; {'; '.join(problems)}")


def _states(
    loaded: Mapping[str, Any], model: nn.Module, optimizer: Optimizer
) -> tuple[list[dict[str, Any]], dict[nn.Parameter, dict[str, Any]]]:
    """The groups' values and each parameter's state, by name or (as `Optimizer.state_dict` has it) by number."""
    try:
        states, groups = dict(loaded["state"]), list(loaded["param_groups"])
        theirs = [list(group["params"]) for group in groups]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the optimizer's part is not as torch writes it: no {error}") from None
    by_memory: dict[tuple[object, ...], list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_memory.setdefault(memory_of(parameter), []).append(name)
    parameters: dict[Any, nn.Parameter] = {}
    number = 0
    if len(theirs) != len(optimizer.param_groups):
        raise ConfigError(f"the optimizer has {len(optimizer.param_groups)} groups, the weights' one has {len(theirs)}")
    for k, group in enumerate(optimizer.param_groups):
        allowed: set[Any] = set()
        for parameter in group["params"]:
            keys = [*by_memory.get(memory_of(parameter), []), number]
            parameters |= dict.fromkeys(keys, parameter)
            allowed |= set(keys)
            number += 1
        if set(theirs[k]) - allowed or len(theirs[k]) != len(group["params"]):
            raise ConfigError(f"the optimizer's group {k} holds other parameters than the one of the weights")
    lost = [key for key in states if key not in parameters]
    if lost:
        raise ConfigError(f"the optimizer's part has state for {lost[0]}, which the optimizer does not have")
    values = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return values, {parameters[key]: _own(parameters[key], state) for key, state in states.items()}


def _own(parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state in memory of its own, with the parameter's layout where it has its shape."""
    own: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            own[key] = torch.empty_like(parameter, dtype=value.dtype).detach().copy_(value)
        else:
            own[key] = value.clone() if isinstance(value, Tensor) else value
    return own


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
