"""An update that the processes of one worker make together: each updates ranges of the parameters' elements.

What the optimizer keeps for each element lies in the memory that they share, once; what it keeps once for a parameter
follows at each of them. Parameters that cannot be cut are updated by the head alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everstep.base.errors import ConfigError, check
from everstep.exact import state_memory
from everstep.exact.digest import bytes_of
from everstep.exact.divisible import divisible, kept_like
from everstep.exact.layout import ALIGN_BYTES, round_up
from everstep.exact.pieces import Ranges
from everstep.parallel.cell_memory import SharedPlace
from everstep.placement.ranks import update_ranges
from everstep.train.cell_store import CellStore, give_back

_FLOAT = 4
DealtRanges = Sequence[Sequence[tuple[int, int]]]
"""Ranges of each of the parameters that the processes divide."""
KeptForEach = list[dict[str, list[Any]]]
"""What is kept for each divided parameter, by key: where it lies in shared memory; or a small tensor; or a value."""


class CellUpdate:
    """One process's part of the updates. pieces: what it updates, of all or of what was dealt to its worker."""

    def __init__(
        self, optimizer: Optimizer, store: CellStore, ranks: int, undivided: Collection[int] = frozenset()
    ) -> None:
        """undivided: ids of parameters that the head updates alone."""
        self._optimizer, self._store = optimizer, store
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        self._divided: list[Tensor] = [p for p in everything if divisible(p) and id(p) not in undivided]
        self._number = {id(p): number for number, p in enumerate(self._divided)}
        self._places: dict[tuple[int, str], int] = {}
        self._used = 0
        self._shares = update_ranges([_whole(p) for p in self._divided], ranks)
        own = {id(p) for p in self._divided}
        self._alone = [p for p in everything if id(p) not in own] if store.rank == 0 else []
        self._mine: list[tuple[Tensor, list[tuple[int, int]]]] = []
        self.pieces: Ranges = {}
        self._taken: DealtRanges | None = None
        self.take([_whole(p) for p in self._divided])

    def shares(self, model: nn.Module) -> dict[int, list[list[tuple[int, int]]]]:
        """What each rank has of the parameters, by their addresses: of the divided ones what it updates, and as much of
        the model's frozen ones, which nobody updates."""
        found = {p.data_ptr(): self._runs_of(number) for number, p in self._numbered}
        frozen = {p.data_ptr(): p.numel() for p in model.parameters() if not p.requires_grad and divisible(p)}
        frozen = {at: numel for at, numel in frozen.items() if at not in found}
        dealt = update_ranges([[(0, numel)] for numel in frozen.values()], len(self._shares))
        return found | {at: [one[number] for one in dealt] for number, at in enumerate(frozen)}

    def _runs_of(self, number: int) -> list[list[tuple[int, int]]]:
        return [by_parameter[number] for by_parameter in self._shares]

    def take(self, dealt: DealtRanges) -> None:
        """In the next update the processes divide these ranges of the parameters that they divide."""
        if dealt != self._taken:
            self._taken = dealt
            self._mine = list(
                zip(self._divided, update_ranges(dealt, len(self._shares))[self._store.rank], strict=True)
            )
            self.pieces = {**dict(self._mine), **{p: _whole(p) for p in self._alone}}

    # ---- the head

    def deal(self, wanted: Ranges | None) -> DealtRanges:
        """What this worker updates next, None: all; returns what a limb is to `take`."""
        of = {} if wanted is None else wanted
        dealt = [[(first, stop) for first, stop in of.get(p, _whole(p))] for p in self._divided]
        self.take(dealt)
        self.pieces = {**self.pieces, **{p: of.get(p, _whole(p)) for p in self._alone}}
        return dealt

    def release(self, tensor: Tensor, kept: Sequence[tuple[int, int]]) -> None:
        """Give the memory of a tensor of the state back, for all processes, but for these ranges of elements."""
        if not self._is_shared(tensor):
            state_memory.give_back(tensor, kept)
            return
        at = tensor.data_ptr() - self._store.memory.address
        edges = [0, *(edge for one in kept for edge in one), tensor.numel()]
        for first, stop in zip(edges[::2], edges[1::2], strict=True):
            self._store.memory.free(at + first * _FLOAT, at + stop * _FLOAT)

    def describe(self) -> KeptForEach:
        """What the optimizer keeps for the divided parameters, once it lies where all processes have it.

        Raises: ConfigError if it keeps what cannot be divided.
        """
        return [self._described(number, parameter, ((0, parameter.numel()),)) for number, parameter in self._numbered]

    def new(self) -> KeptForEach | None:
        """After an update: `describe` if that has made tensors of the state, of which each process has its own part;
        else None."""
        missing = any(
            self._is_like(value, parameter) and not self._is_shared(value)
            for parameter in self._divided
            for value in self._optimizer.state.get(parameter, {}).values()
        )
        if not missing:
            return None
        found = [self._described(number, parameter, runs) for number, (parameter, runs) in enumerate(self._mine)]
        give_back()
        return found

    @property
    def _numbered(self) -> list[tuple[int, Tensor]]:
        return list(enumerate(self._divided))

    def _described(self, number: int, parameter: Tensor, runs: Sequence[tuple[int, int]]) -> dict[str, list[Any]]:
        kept = self._optimizer.state.get(parameter, {})
        if kept and kept_like(self._optimizer, parameter) is None:
            raise ConfigError(
                f"cell.fsdp: what {type(self._optimizer).__name__} keeps for a parameter of shape "
                f"{tuple(parameter.shape)} cannot be divided: set cell.fsdp=1"
            )
        found: dict[str, list[Any]] = {}
        for key, value in kept.items():
            if self._is_like(value, parameter):
                if not self._is_shared(value):
                    offset = self._place(number, str(key), parameter)
                    shared = self._shared(parameter, offset)
                    if runs == ((0, value.numel()),):
                        self._write(value, shared)
                    else:
                        _copy(value, shared, runs)
                    kept[key] = shared
                found[str(key)] = ["shared", self._places[number, str(key)]]
            elif isinstance(value, Tensor):
                found[str(key)] = ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
                found[str(key)].append(bytes(bytes_of(value)))
            else:
                found[str(key)] = ["value", value]
        return found

    def _write(self, value: Tensor, to: Tensor) -> None:
        data, at = bytes_of(value), 0
        for view, send in self._store.others.destinations(bytes_of(to)):
            view[:] = data[at : at + len(view)]
            at += len(view)
            send()

    def room(self, parameter: Tensor, key: str) -> Tensor | None:
        """Where what the optimizer keeps for a parameter, under this key, lies for all processes; None if each has its
        own."""
        number = self._number.get(id(parameter))
        return None if number is None else self._shared(parameter, self._place(number, key, parameter))

    def _place(self, number: int, key: str, parameter: Tensor) -> int:
        if (number, key) not in self._places:
            extent = self._store.places.state
            size = round_up(parameter.numel() * _FLOAT, ALIGN_BYTES)
            if self._used + size > extent.size:
                raise ConfigError(
                    f"cell.fsdp: {type(self._optimizer).__name__} keeps too many tensors for each parameter: set "
                    "cell.fsdp=1"
                )
            self._places[number, key] = at = extent.offset + self._used
            self._store.others.divide(SharedPlace(at, parameter.numel() * _FLOAT), self._runs_of(number))
            self._used += size
        return self._places[number, key]

    # ---- a limb

    def follow(self, kept: KeptForEach, *, adopts: bool) -> None:
        """Have the optimizer keep what the head's keeps. adopts: after an update, when each process has its own part of
        the tensors that the update has made: these parts go where the others find them."""
        check(
            len(kept) == len(self._divided),
            f"{len(kept)} parameters are divided at the head, {len(self._divided)} here",
        )
        for (parameter, runs), values in zip(self._mine, kept, strict=True):
            before = self._optimizer.state.pop(parameter, {})
            found: dict[Any, Any] = {}
            for key, (kind, *what) in values.items():
                if kind == "shared":
                    found[key] = self._shared(parameter, what[0])
                    if adopts and not self._is_shared(before[key]):
                        _copy(before[key], found[key], runs)
                elif kind == "tensor":
                    dtype, shape, data = what
                    found[key] = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)
                else:
                    found[key] = what[0]
            if found:
                self._optimizer.state[parameter] = found
        before = {}
        if adopts or not any(kept):  # the state has been moved, or is about to be made
            give_back()

    # ---- memory

    def _shared(self, parameter: Tensor, offset: int) -> Tensor:
        flat = self._store.memory.tensor(SharedPlace(offset, parameter.numel() * _FLOAT), torch.float32)
        return flat.as_strided(parameter.shape, parameter.stride(), 0)

    def _is_shared(self, tensor: Tensor) -> bool:
        start = self._store.memory.address
        return start <= tensor.data_ptr() < start + self._store.places.size

    @staticmethod
    def _is_like(value: Any, parameter: Tensor) -> bool:
        return isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype is torch.float32


def _whole(parameter: Tensor) -> list[tuple[int, int]]:
    return [(0, parameter.numel())]


def _copy(source: Tensor, to: Tensor, runs: Sequence[tuple[int, int]]) -> None:
    """Copy ranges of elements; both are contiguous."""
    with torch.no_grad():
        for first, stop in runs:
            to.view(-1)[first:stop].copy_(source.reshape(-1)[first:stop])
