"""A worker process with a staged transport, for the crew of `parallel_members`: it does as it is told."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import torch
from parallel_members import LANES, FolderStore, node_sum, reference, shape

from everstep.base.plan import Member, Plan, WorkerKey
from everstep.base.ports import Hop, Tag
from everstep.parallel.staged import StagedTransport
from everstep.parallel.transport_kinds import ControlStore
from everstep.placement.tree import cover
from process_resources import resources

STAGE_STEPS = 100_000
"""Each stage has gradients of its own: those that step + stage * STAGE_STEPS would have."""


def stage_reference(blocks: int, stage: int, step: int) -> bytes:
    return reference(blocks, step + stage * STAGE_STEPS)


def activation(step: int, lane: int, n: int) -> torch.Tensor:
    """Strided, and different for each hop."""
    return torch.randn(4, n, generator=torch.Generator().manual_seed(step * 1000 + lane)).t()


class StagedHand:
    """Inside a worker: one method per order."""

    def __init__(self, kind: str, worker_id: int, blocks: int, folder: Path) -> None:
        torch.set_num_threads(1)
        self.key = WorkerKey(worker_id, 0)
        self.blocks = blocks
        self.files = FolderStore(folder)
        self.store = ControlStore(self.files.set_key, self.files.get_keys, self.files.superseded.is_set)
        self.plan: Plan
        self.waits = 0
        self.transport = StagedTransport(
            self.key, LANES, self.tick, kind=kind.removeprefix("staged-"), store=self.store, key=b"k"
        )

    def tick(self) -> None:
        self.waits += 1

    def hello(self) -> Member:
        return Member(self.key.worker_id, 0, "here", os.getpid(), "127.0.0.1:1", self.transport.segment)

    @property
    def stages(self) -> list[int]:
        return [s.stage for s in self.plan.seats if s.worker_id == self.key.worker_id]

    def open(self, plan: Plan) -> float:
        begin = time.monotonic()
        self.files.superseded.clear()
        self.plan = plan
        self.transport.open(plan, {stage: shape(self.blocks) for stage in self.stages})
        return time.monotonic() - begin

    def reduce(self, step: int) -> dict[int, bytes]:
        """Of all own stages, with sums that all can be told apart."""
        found = {}
        for stage in self.stages:
            presence = {}
            for node in cover(self.plan.lanes_of(self.key.worker_id, stage), LANES):
                self.transport.node(stage, step, node).copy_(node_sum(self.blocks, step + stage * STAGE_STEPS, node))
                presence[node] = b"\x01"
            self.kept = self.transport.reduce(stage, step, presence)
            found[stage] = torch.cat([piece.data for piece in self.kept.pieces]).numpy().tobytes()
        return found

    def exchange(self, tag: Tag, payload: bytes) -> dict[int, bytes]:
        return self.transport.exchange(tag, payload)

    def pipe(self, first: int, last: int, n: int) -> int:
        """Every step: each lane's activation goes down the stages, its gradient back up, then all reduce and agree.

        Of each stage the first member runs all lanes; the sizes differ from lane to lane. Returns the last step that
        was complete and right.
        """
        me, done = self.key.worker_id, first - 1
        line = [self.plan.leader(stage) for stage in range(self.plan.stages)]
        for step in range(first, last):
            for stage in self.stages:
                if line[stage] == me and stage > 0:
                    for lane in range(LANES):
                        self.transport.channel.expect(line[stage - 1], Hop(step, "act", stage, lane))
            for stage in self.stages:
                if line[stage] == me:
                    self._lanes(step, stage, line, n)
            for stage in reversed(self.stages):
                if line[stage] == me:
                    self._back(step, stage, line, n)
            for stage in self.stages:
                self._cheap(stage, step)
            self.transport.exchange(Tag("decide", step, 0), b"")
            self.transport.channel.forget(step)
            done = step
        return done

    def _lanes(self, step: int, stage: int, line: list[int], n: int) -> None:
        for lane in range(LANES):
            given = activation(step, lane, n + lane)
            if stage:
                (found,), meta = self.transport.channel.recv(line[stage - 1], Hop(step, "act", stage, lane))
                right = torch.equal(found, given + stage) and found.stride() == given.stride()
                if not right or pickle.loads(meta) != (step, lane):
                    raise AssertionError(f"stage {stage} of {step}.{lane}: wrong activation")
            if stage + 1 < len(line):
                out = (given + (stage + 1)).requires_grad_()
                key = Hop(step, "act", stage + 1, lane)
                self.transport.channel.send(line[stage + 1], key, [out], pickle.dumps((step, lane)))

    def _back(self, step: int, stage: int, line: list[int], n: int) -> None:
        for lane in range(LANES):
            given = -activation(step, lane, n + lane)
            if stage + 1 < len(line):
                (found,), _ = self.transport.channel.recv(line[stage + 1], Hop(step, "grad", stage, lane))
                if not torch.equal(found, given * (stage + 1)):
                    raise AssertionError(f"stage {stage} of {step}.{lane}: wrong gradient")
            if stage:
                self.transport.channel.send(line[stage - 1], Hop(step, "grad", stage - 1, lane), [given * stage])

    def _cheap(self, stage: int, step: int) -> None:
        presence = {}
        for node in cover(self.plan.lanes_of(self.key.worker_id, stage), LANES):
            self.transport.node(stage, step, node).fill_(float((node.hi - node.lo) * (step % 1000 + stage)))
            presence[node] = b"\x01"
        reduced = self.transport.reduce(stage, step, presence)
        if not all(bool((piece.data == LANES * (step % 1000 + stage)).all()) for piece in reduced.pieces):
            raise AssertionError(f"stage {stage} of step {step}: wrong result")

    def flood(self, to: int, step: int, count: int, n: int) -> int:
        """Send a lot without anybody receiving it."""
        for lane in range(count):
            self.transport.channel.send(to, Hop(step, "act", 1, lane), [torch.full((n,), float(lane))])
        return count

    def receive(self, source: int, step: int, lane: int) -> float:
        """Waits; returns the first element."""
        (found,), _ = self.transport.channel.recv(source, Hop(step, "act", 1, lane))
        if not bool((found == found[0]).all()):
            raise AssertionError("torn")
        return float(found[0])

    def resources(self) -> dict[str, Any]:
        """Of this process, free memory given back first."""
        import ctypes
        import gc

        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return resources()

    def close(self) -> None:
        self.transport.close()
