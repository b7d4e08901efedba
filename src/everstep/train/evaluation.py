"""Evaluation in parallel, with the same numbers for any number of workers.

The dataset is cut into fixed chunks. Placement decides which worker computes which chunk; the result of a chunk does
not depend on it: each has its own seed, and the results are folded in chunk order. Chunks that a dead worker leaves
undone are shared out again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import msgspec
import torch

from everstep.base.errors import ConfigError
from everstep.base.plan import Plan
from everstep.base.ports import Hop
from everstep.exact.seeding import derive, seed_all
from everstep.exact.settings import evaluating
from everstep.exact.trees import Bundle, from_wire, to_wire
from everstep.protocol.driver.operations import Evaluate
from everstep.train.view import WorkerView

_Results = dict[int, dict[str, tuple[float, float]]]
_results = msgspec.msgpack.Decoder(_Results)
_stated = msgspec.msgpack.Decoder(tuple[int, _Results])


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
    ids of all present members). Returns name -> sum / count.
    """
    mine: _Results = {}
    known: _Results = {}
    while len(known) < chunks:
        me, everyone = members()
        missing = [i for i in range(chunks) if i not in known]
        for place, index in enumerate(missing):
            if everyone[place % len(everyone)] == me and index not in mine:
                seed_all(derive(seed, _CHUNK_SEED, index))
                mine[index] = _pairs(fn(load(index)))
        packed = msgspec.msgpack.encode({i: r for i, r in mine.items() if i not in known})
        for data in gather(packed).values():
            known.update(_results.decode(data))
    return _folded(known, chunks)


def _folded(known: _Results, chunks: int) -> dict[str, float]:
    totals: dict[str, tuple[float, float]] = {}
    for index in range(chunks):
        for name, (value, count) in known[index].items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + value, before[1] + count)
    return {name: value / count if count else float("nan") for name, (value, count) in sorted(totals.items())}


_CHUNK_SEED = 1 << 32
_WAVE = 64
"""Most chunks of one wave: its messages are kept until it has ended."""
_BEFORE_ALL_STEPS = 1 << 31
"""Messages of evaluations count as of a step before all others, so that those of older waves can be forgotten alone."""


class Waves:
    """An evaluation where each worker has a part of the model: chunks flow through the pools, wave after wave.

    A wave belongs to the generation that all stated in the gather before it. A worker that has left that generation
    does not begin the wave; a worker that waits for such a one is freed by the plan that comes, and the next gather
    unites them.
    """

    def __init__(
        self,
        view: WorkerView,
        metrics: Callable[[Any, Any], Mapping[str, Any]],
        chunks: int,
        load: Callable[[int], Any],
    ) -> None:
        self._view, self._metrics, self._chunks, self._load = view, metrics, chunks, load
        self._parts = view.stages.count * view.config.chunks
        self._generations: set[int] = set()
        self._known = _Results()
        self._mine: _Results = {}
        self._local: dict[Hop, Bundle] = {}

    def run(self, gather: Callable[[bytes], Mapping[int, bytes]], wave: Callable[[], object]) -> dict[str, float]:
        """Evaluate all chunks, whatever happens to the members; result as of `evaluate`. wave: has `pass_on` carried
        out, if it can be.

        Raises: StateJumped if the state is another one meanwhile.
        """
        while True:
            stated = gather(msgspec.msgpack.encode((self._view.driver.machine.generation, self._mine)))
            self._generations = set()
            for data in stated.values():
                generation, found = _stated.decode(data)
                self._generations.add(generation)
                self._known.update(found)
            self._mine = {}
            if not self._missing():
                return _folded(self._known, self._chunks)
            wave()

    def _missing(self) -> list[int]:
        return [i for i in range(self._chunks) if i not in self._known][:_WAVE]

    def pass_on(self, operation: Evaluate) -> None:
        """Do one wave: all of this worker's passes of its chunks. Raises: CollectiveAborted."""
        view, plan = self._view, operation.plan
        if self._generations != {plan.generation}:
            return
        number = operation.number - _BEFORE_ALL_STEPS
        view.transport.channel.forget(number - 1)  # all have received the messages of the wave before
        self._local = {}
        with ExitStack() as modes:
            for replica in view.stages.values():
                replica.lanes.settle_buffers()
                modes.enter_context(evaluating(replica.parts.model))
            for place, index in enumerate(self._missing()):
                for part in range(self._parts):
                    if self._holder(plan, part, place) == view.me:
                        if view.cutter.over(plan.generation):
                            return
                        self._pass(plan, Hop(number, "eval", part, place), index)

    def _holder(self, plan: Plan, part: int, place: int) -> int:
        pool = [seat.worker_id for seat in plan.pool(part % plan.stages) if seat.lanes]
        return pool[place % len(pool)]

    def _pass(self, plan: Plan, hop: Hop, index: int) -> None:
        """Take one chunk through one part; the output of the last part is its result."""
        view, part, place = self._view, hop.part, hop.lane
        inputs = self._take(plan, hop) if part else None
        last = part == self._parts - 1
        seed_all(derive(view.config.seed, _CHUNK_SEED, index))
        batch = self._load(index) if part == 0 or last else None
        view.tick()
        found = view.stages[part % plan.stages].lanes.evaluate(part, inputs, self._metrics, batch)
        if last:
            self._mine[index] = _pairs(found)
            return
        hop, to = hop._replace(part=part + 1), self._holder(plan, part + 1, place)
        if to == view.me:
            self._local[hop] = found
        else:
            view.transport.channel.send(to, hop, *to_wire(found))

    def _take(self, plan: Plan, hop: Hop) -> Bundle:
        source = self._holder(plan, hop.part - 1, hop.lane)
        if source == self._view.me:
            return self._local.pop(hop)
        return from_wire(*self._view.transport.channel.recv(source, hop))


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
