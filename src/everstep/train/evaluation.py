"""Evaluation in parallel, with the same numbers for any number of workers.

The dataset is cut into fixed chunks. Who computes which chunk is placement; what a chunk gives is not: each has its own
seed, and the results are folded in chunk order. What a dead worker leaves undone is shared out again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from everstep.base.errors import ConfigError
from everstep.exact.seeding import derive, seed_all

_Results = dict[int, dict[str, tuple[float, float]]]


def evaluate(
    fn: Callable[[Any], Mapping[str, Any]],
    chunks: int,
    load: Callable[[int], Any],
    *,
    gather: Callable[[bytes], Mapping[int, bytes]],
    members: Callable[[], tuple[int, tuple[int, ...]]],
    seed: int,
) -> dict[str, float]:
    """Run `fn(load(i))` for every chunk, once over all workers.

    fn returns name -> tensor([sum, count]) (or a pair, or a number that counts once). members() gives (own worker id,
    all members' ids) as of now. Returns name -> sum / count.
    """
    mine: _Results = {}
    known: _Results = {}
    while len(known) < chunks:
        me, everyone = members()
        missing = [i for i in range(chunks) if i not in known]
        for place, index in enumerate(missing):
            if everyone[place % len(everyone)] == me and index not in mine:
                seed_all(derive(seed, 1 << 32, index))
                mine[index] = _pairs(fn(load(index)))
        packed = msgspec.msgpack.encode({i: r for i, r in mine.items() if i not in known})
        for data in gather(packed).values():
            known.update(msgspec.msgpack.decode(data, type=_Results))
    totals: dict[str, tuple[float, float]] = {}
    for index in range(chunks):
        for name, (value, count) in known[index].items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + value, before[1] + count)
    return {name: value / count if count else float("nan") for name, (value, count) in sorted(totals.items())}


def _pairs(results: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    if not isinstance(results, Mapping):
        raise ConfigError(f"metrics must be a dict of name -> tensor([sum, count]), got {type(results).__name__}")
    pairs = {}
    for name, value in results.items():
        numbers = torch.as_tensor(value, dtype=torch.float64).detach().cpu().flatten().tolist()
        if len(numbers) not in (1, 2):
            raise ConfigError(f"metric {name!r} must be tensor([sum, count]) or one number, got {len(numbers)} numbers")
        pairs[str(name)] = (numbers[0], numbers[1] if len(numbers) == 2 else 1.0)
    return pairs
