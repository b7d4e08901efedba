"""The executor of a split model: goes through this worker's list of passes, and moves what they hand over.

Apart from its host because it knows lanes and parts only: whatever it is given, it computes the same, and it may be
stopped between any two passes. What is computed is kept by the stages; what is on its way belongs to a generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from everstep.base.config import Config
from everstep.base.errors import CollectiveAborted
from everstep.base.plan import Plan
from everstep.base.ports import Channel, Hop, HopKind
from everstep.exact.trees import Bundle, from_wire, to_wire
from everstep.order.ledger import use_digest
from everstep.placement import routes
from everstep.placement.schedules import PipeOp
from everstep.train.replica import StageReplica

_AHEAD = 8
"""How many passes ahead of the present one the channel is told what will be wanted."""
_SLICE_S = 0.01


class PassHost(Protocol):
    """What the executor of passes needs of the worker."""

    def phase(self, name: str, step: int, plan: Plan) -> None:
        """A phase begins (progress board, scripted faults)."""
        ...

    def tick(self) -> None:
        """Something was done."""
        ...

    def receiving(self) -> None:
        """Waits for what another part hands over."""
        ...

    def sent(self, operation: str, n_bytes: int) -> None:
        """So many bytes were given to other workers."""
        ...

    def batch(self, step: int, lane: int) -> tuple[Any, Sequence[Any]]:
        """A lane's batch on the device, and its samples (none: the lane is empty)."""
        ...

    def samples(self, step: int, lane: int) -> Sequence[Any]:
        """The samples of a lane, without loading them."""
        ...

    def over(self, generation: int) -> bool:
        """Whether nothing is to be computed for this generation any more."""
        ...

    def lane_done(self, step: int, stage: int, lane: int) -> None:
        """All parts of the stage are through with the lane."""
        ...


class Pipeline:
    """Runs lists of passes. `channel` is that of the generation in which `run` is called."""

    def __init__(self, me: int, config: Config, host: PassHost, micro_batch: Callable[[], int]) -> None:
        self._me = me
        self._config = config
        self._host = host
        self._micro_batch = micro_batch
        self._batches: dict[int, tuple[Any, Sequence[Any]]] = {}
        self._local: dict[Hop, Bundle] = {}

    def run(
        self, plan: Plan, step: int, lanes: Sequence[int], stages: Mapping[int, StageReplica], channel: Channel
    ) -> None:
        """Compute these lanes wherever they pass through this worker.

        lanes: the same at every member, none of them empty.

        Raises: CollectiveAborted if the generation ends, or a worker that something was expected from is dead.
        """
        config = self._config
        listed = routes.ops(
            plan, self._me, lanes, kind=config.schedule, chunks=config.chunks, recompute=config.recompute
        )
        self._batches, self._local = {}, {}
        for replica in stages.values():
            replica.lanes.drop()
        passes = _Passes(self, plan, step, listed, stages, channel, plan.stages * config.chunks)
        for k in range(min(_AHEAD, len(listed))):
            passes.expect(k)
        for k, op in enumerate(listed):
            if self._host.over(plan.generation):
                raise CollectiveAborted("a newer plan has come")
            passes.expect(k + _AHEAD)
            passes.perform(k, op)
        self._batches, self._local = {}, {}


class _Passes:
    """One list in one generation."""

    def __init__(
        self,
        pipeline: Pipeline,
        plan: Plan,
        step: int,
        ops: Sequence[PipeOp],
        stages: Mapping[int, StageReplica],
        channel: Channel,
        parts: int,
    ) -> None:
        self.me, self.config, self.host = pipeline._me, pipeline._config, pipeline._host
        self.batches, self.local = pipeline._batches, pipeline._local
        self.full = pipeline._micro_batch()
        self.plan, self.step, self.ops, self.stages, self.channel, self.parts = plan, step, ops, stages, channel, parts
        self.wait_s = self.config.emulate_compute_ms / 1e3 / max(1, self.config.chunks)
        self.perform = self._emulate if self.wait_s else self._compute

    # ---- one pass

    def _compute(self, k: int, op: PipeOp) -> None:
        lanes = self.stages[op.stage].lanes
        if op.kind == "forward":
            given: dict[str, Any] = {}
            if op.part == 0 or op.part == self.parts - 1:  # loaded before waiting for the part before
                batch, samples = self._batch(op)
                given["batch"] = batch
                if op.part == self.parts - 1:
                    given |= {"share": len(samples) / self.full, "count": len(samples), "use": use_digest(samples)}
            inputs = self._take("act", op.part, op.lane, op.part - 1) if op.part else None
            keep = not self.config.recompute or self._backward_follows(k)
            self.host.phase("forward", self.step, self.plan)
            result = lanes.forward(self.step, op.part, op.lane, inputs, keep=keep, **given)
            if result is not None:
                self._give("act", op.part + 1, op.lane, result)
        elif op.kind == "recompute":
            lanes.recompute(self.step, op.part, op.lane)
        else:
            back = self._take("grad", op.part, op.lane, op.part + 1) if op.part + 1 < self.parts else None
            self.host.phase("backward", self.step, self.plan)
            lanes.backward(
                self.step, op.part, op.lane, back, lambda found: self._give("grad", op.part - 1, op.lane, found)
            )
            self._after_backward(op)

    def _emulate(self, k: int, op: PipeOp) -> None:
        """The same list and messages, with waiting in place of computing; gradients are absent."""
        lanes = self.stages[op.stage].lanes
        if op.kind == "forward":
            if op.part:
                self._take("act", op.part, op.lane, op.part - 1)
            self.host.phase("forward", self.step, self.plan)
            self._wait(self.wait_s)
            if op.part + 1 < self.parts:
                self._give("act", op.part + 1, op.lane, _NOTHING)
        elif op.kind == "recompute":
            self._wait(self.wait_s)
        else:
            if op.part + 1 < self.parts:
                self._take("grad", op.part, op.lane, op.part + 1)
            self.host.phase("backward", self.step, self.plan)
            self._wait(2 * self.wait_s)
            if op.part:
                self._give("grad", op.part - 1, op.lane, _NOTHING)
            if op.part == op.stage:
                samples = self.host.samples(self.step, op.lane)
                lanes.add_idle(op.lane, len(samples), use_digest(samples))
            self._after_backward(op)

    def _after_backward(self, op: PipeOp) -> None:
        if op.part == op.stage:  # the first of the stage's parts is the last to be done
            self.host.lane_done(self.step, op.stage, op.lane)

    def _backward_follows(self, k: int) -> bool:
        return k + 1 < len(self.ops) and self.ops[k + 1] == self.ops[k]._replace(kind="backward")

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _SLICE_S))
            self.host.tick()

    def _batch(self, op: PipeOp) -> tuple[Any, Sequence[Any]]:
        """Loaded once where this worker has both ends of the lane's way."""
        found = self.batches.pop(op.lane, None)
        if found is None:
            self.host.phase("load", self.step, self.plan)
            found = self.host.batch(self.step, op.lane)
            if op.part == 0 and routes.holder(self.plan, self.parts - 1, op.lane) == self.me:
                self.batches[op.lane] = found
        return found

    # ---- what goes from part to part

    def _take(self, kind: HopKind, part: int, lane: int, source_part: int) -> Bundle:
        hop = Hop(self.step, kind, part, lane)
        source = routes.holder(self.plan, source_part, lane)
        if source == self.me:
            return self.local.pop(hop)
        self.host.receiving()
        return from_wire(*self.channel.recv(source, hop))

    def _give(self, kind: HopKind, part: int, lane: int, what: Bundle) -> None:
        hop = Hop(self.step, kind, part, lane)
        to = routes.holder(self.plan, part, lane)
        if to == self.me:
            self.local[hop] = what
        else:
            tensors, meta = to_wire(what)
            self.host.sent("transfer", sum(t.nbytes for t in tensors) + len(meta))
            self.channel.send(to, hop, tensors, meta)

    def expect(self, k: int) -> None:
        """Tell the channel what the k-th pass will receive."""
        if k >= len(self.ops):
            return
        op = self.ops[k]
        if op.kind == "forward" and op.part:
            kind, source_part = "act", op.part - 1
        elif op.kind == "backward" and op.part + 1 < self.parts:
            kind, source_part = "grad", op.part + 1
        else:
            return
        source = routes.holder(self.plan, source_part, op.lane)
        if source != self.me:
            self.channel.expect(source, Hop(self.step, kind, op.part, op.lane))  # type: ignore[arg-type]


_NOTHING = Bundle([], b"")
