"""Source of all randomness of a job: 64-bit seeds derived from (seed, step, lane, unit), set directly.

Apart because the same rules hold in workers, loader processes and the pipeline. `torch.manual_seed` takes 95 us, the
generator's own method 1 us (measured), which matters at every unit of every lane.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

_MASK = (1 << 64) - 1
_LANE, _UNIT, _SAMPLE, _BUILD, _BACKWARD, _MODULE, _SHARD = 1, 2, 3, 4, 5, 6, 7
"""First number of a derivation, so that seeds for different purposes never coincide by construction. A lane's is for
its draws outside units; a unit's counts its forward passes within the lane, from 0."""


def derive(*numbers: int) -> int:
    """64-bit seed that depends on all numbers (each taken modulo 2**64), their order and their count."""
    layout = f"<{len(numbers)}Q"
    try:
        data = struct.pack(layout, *numbers)
    except struct.error:  # some are beyond 64 bits, or negative
        data = struct.pack(layout, *(n & _MASK for n in numbers))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def seed_all(value: int) -> None:
    """Seed the generators of torch (all devices in use), numpy (the legacy global one) and `random`. About 10 us.

    numpy takes 32 bits, the exclusive or of both halves; torch's CPU generator the lower 32 bits.
    """
    value &= _MASK
    torch.default_generator.manual_seed(value)
    if _cuda_in_use():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(value)
    np.random.mtrand._rand.seed((value ^ (value >> 32)) & 0xFFFFFFFF)  # type: ignore[attr-defined]
    _python_seed(value)


def build_seed(seed: int) -> int:
    """Seed for building model, optimizer and datasets, before the first step."""
    return derive(_BUILD, seed)


def module_seed(seed: int, path: str) -> int:
    """Seed for initialising one module of the model by itself."""
    return derive(_MODULE, seed, int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little"))


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Seed for fetching one sample of the dataset (augmentation)."""
    return derive(_SAMPLE, seed, epoch, index)


def shard_seed(drawn: int, shard: int) -> int:
    """Seed for what one virtual shard draws. drawn: from the stream around it, alike for all shards."""
    return derive(_SHARD, drawn, shard)


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore every generator afterwards: `random`, numpy's global one, torch's CPU and CUDA ones."""
    python, legacy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    cuda = [g.get_state() for g in torch.cuda.default_generators] if _cuda_in_use() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.default_generator.set_state(cpu)
        for generator, state in zip(torch.cuda.default_generators, cuda, strict=False):
            generator.set_state(state)


def drawn_from() -> list[tuple[int, bytes]]:
    """Seed and state of each generator: where the seed stays and the state does not, numbers were drawn. Those of
    Python and NumPy are seeded where torch's are."""
    cuda = torch.cuda.default_generators if _cuda_in_use() else ()
    found = [(g.initial_seed(), g.get_state().numpy().tobytes()) for g in (torch.default_generator, *cuda)]
    others = random.getstate(), np.random.get_state()
    return [*found, *((found[0][0], repr(state).encode()) for state in others)]


class _Entry(partial[None]):
    """The seeder's hook at a unit. A copy or a file of the model has one in its place that does nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nn.Identity, "forward")


@dataclass
class _Call:
    """One forward pass of a unit. before: the generator's seed at its entry; repeated: done again in backward."""

    before: int
    repeated: bool = False


class UnitSeeder:
    """Seeds all generators at each unit's entry: a unit's draws do not depend on the units before it.

    Active between `begin_lane` and `end_lane` only: evaluation is left alone. Several lanes may be in flight, each
    known by its number and that of the part of the model: `pause` after a forward pass, `resume` before its backward
    pass. A unit that is computed again inside backward (activation checkpointing) gets the seed of the forward call it
    repeats. That call is recognised by the seed that the generator held at its entry (checkpointing restores the
    generator, and with it that seed); if the generator is not restored, calls are taken in reverse order. Inside a
    model compiled as a whole, units within the compiled region are not seeded apart.
    """

    def __init__(self, units: Sequence[nn.Module], seed: int, numbers: Sequence[int] | None = None) -> None:
        """numbers: of the units in the whole model, if these are not all."""
        self._seed = seed
        self._active = False
        self._step = 0
        self._lane = 0
        self._part = 0
        self._flight = (0, 0)
        self._in_flight: dict[tuple[int, int], dict[int, list[_Call]]] = {}
        self._calls: dict[int, list[_Call]] = {}
        self._hooks = [
            unit.register_forward_pre_hook(_Entry(self._enter, number), prepend=True)
            for number, unit in zip(range(len(units)) if numbers is None else numbers, units, strict=True)
        ]

    def begin_lane(self, step: int, lane: int, part: int = 0, flight: int | None = None) -> None:
        """Seed all generators for the lane and start counting its calls. flight: the number by which the lane is known
        here, if that is another one: the lane is computed twice."""
        if step != self._step:
            self._in_flight.clear()
        self._step, self._lane, self._part = step, lane, part
        self._flight = lane if flight is None else flight, part
        self._calls = self._in_flight[self._flight] = {}
        seed_all(derive(_LANE, self._seed, step, lane))
        self._active = True

    def pause(self) -> None:
        """From here on the units' entries do nothing; the lane's calls are remembered."""
        self._active = False

    def resume(self, lane: int, part: int = 0, flight: int | None = None) -> None:
        """The lane's backward pass comes next. flight: as in `begin_lane`."""
        self._lane, self._part = lane, part
        self._flight = lane if flight is None else flight, part
        self._calls = self._in_flight[self._flight]
        seed_all(derive(_BACKWARD, self._seed, self._step, lane, part))
        self._active = True

    def end_lane(self) -> None:
        """From here on the units' entries do nothing; the lane is forgotten."""
        self._active = False
        self._in_flight.pop(self._flight, None)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _enter(self, unit: int, *_: Any) -> None:
        """At the unit's entry, in forward or in backward."""
        if not self._active or torch.compiler.is_compiling():
            return
        calls = self._calls.setdefault(unit, [])
        before = torch.default_generator.initial_seed()
        if torch._C._current_graph_task_id() == -1:
            call = len(calls)
            calls.append(_Call(before))
        else:
            call = _repeated(calls, before)
        seed_all(derive(_UNIT, self._seed, self._step, self._lane, unit, call))


def _repeated(calls: list[_Call], before: int) -> int:
    """Number of the forward call that a computation inside backward repeats; marks it."""
    fresh = [k for k, call in enumerate(calls) if not call.repeated]
    known = [k for k in fresh if calls[k].before == before]
    known += fresh[-1:] if not known else []
    known += [k for k, call in enumerate(calls) if call.before == before]
    if not known:
        return len(calls)
    calls[known[0]].repeated = True
    return known[0]


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _python_seed(value: int) -> None:
    """`random.seed(value)`, without the check of the value's type, which takes as long as seeding."""
    generator = random._inst  # type: ignore[attr-defined]
    super(random.Random, generator).seed(value)
    generator.gauss_next = None  # type: ignore[attr-defined]
