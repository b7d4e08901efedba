"""Private flat gradients of a transport that has no shared memory: nodes, kept results and receive buffers."""

from __future__ import annotations

import mmap

import torch

from everstep.base.errors import check
from everstep.base.ports import Node

_HUGE_BYTES = 8 << 20


def new_flat(numel: int, device: torch.device) -> torch.Tensor:
    """float32 [numel], at least 64-byte aligned; on the CPU in huge pages where the kernel gives them."""
    if device.type != "cpu" or numel * 4 < _HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(numel, device=device)
    memory = mmap.mmap(-1, numel * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without them
    return torch.frombuffer(memory, dtype=torch.float32)


class Flats:
    """Hands out float32 [numel] tensors by (step, node), and takes them back by the promises of the transport."""

    _SPARES = 2

    def __init__(self, numel: int, device: torch.device) -> None:
        self._numel = numel
        self._device = device
        self._step = 0
        self._nodes: dict[Node, torch.Tensor] = {}
        self._results: dict[int, torch.Tensor] = {}
        self._reduced_step = -1
        self._spare: list[torch.Tensor] = []
        self._scratch: dict[int, torch.Tensor] = {}

    def tensor(self, step: int, node: Node) -> torch.Tensor:
        """The same (step, node) gives the same memory; a new step frees that of the step before."""
        if step != self._step:
            self._step = step
            kept = {id(t) for t in self._results.values()}
            self._spare += [t for t in self._nodes.values() if id(t) not in kept]
            self._nodes.clear()
        if node not in self._nodes:
            self._nodes[node] = self._spare.pop() if self._spare else new_flat(self._numel, self._device)
        return self._nodes[node]

    def held(self, step: int, node: Node) -> torch.Tensor:
        """A node that was filled before."""
        check(step == self._step and node in self._nodes, f"node {node} of step {step} was never asked for")
        return self._nodes[node]

    def keep_result(self, step: int, node: Node) -> None:
        """The node is the result of the step: it stays until the reduction of step + 2 begins."""
        self._results[step] = self._nodes[node]

    def begin_reduction(self, step: int) -> bool:
        """Frees results of step - 2; returns whether steps have been undone, and kept results are void."""
        undone = step < self._reduced_step
        self._reduced_step = step
        freed = [s for s in self._results if not step - 2 < s <= step]
        held = {id(t) for t in self._nodes.values()}
        self._spare += [t for t in map(self._results.pop, freed) if id(t) not in held]
        del self._spare[self._SPARES :]
        return undone

    def scratch(self, number: int, numel: int) -> torch.Tensor:
        """The receive buffer `number`, free again after the reduction; float32 [numel]."""
        found = self._scratch.get(number)
        if found is None or found.numel() < numel:
            found = self._scratch[number] = new_flat(numel, self._device)
        return found[:numel]
