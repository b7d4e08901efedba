"""The ranks of a tensor-parallel cell as threads that take turns: one runs until it needs the others' shards.

So the process's random generators are each rank's own while it runs, as they are in processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from everstep.exact.shard_sums import ShardMesh

_LIMIT_S = 300.0


class Turns:
    """Whose turn it is, and what has been given at each exchange."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._given: dict[tuple[int, int], list[Tensor]] = {}
        self._mine = [threading.Semaphore(0) for _ in range(degree)]
        self.broken = False

    def await_turn(self, rank: int) -> None:
        assert self._mine[rank].acquire(timeout=_LIMIT_S), f"rank {rank} waits for a rank that is gone"
        assert not self.broken, "another rank has raised"

    def pass_on(self, rank: int) -> None:
        self._mine[(rank + 1) % self.degree].release()

    def start(self) -> None:
        self._mine[0].release()

    def exchange(self, rank: int, number: int, mine: Sequence[Tensor]) -> list[Tensor]:
        self._given[rank, number] = [tensor.clone() for tensor in mine]
        state = torch.get_rng_state()
        self.pass_on(rank)
        self.await_turn(rank)
        torch.set_rng_state(state)
        return [tensor for other in range(self.degree) for tensor in self._given[other, number]]


class TakingTurns:
    """One rank's exchange."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns, self._rank, self.count = turns, rank, 0

    def gather(self, mine: Sequence[Tensor]) -> list[Tensor]:
        self.count += 1
        return self._turns.exchange(self._rank, self.count, mine)


def on_ranks(shards: int, degree: int, run: Callable[[ShardMesh], Any], *, sequence: bool = False) -> list[Any]:
    """What `run` returns at each rank."""
    turns = Turns(degree)
    found: list[Any] = [None] * degree
    raised: list[BaseException] = []

    def rank_of(rank: int) -> None:
        try:
            turns.await_turn(rank)
            exchange = TakingTurns(turns, rank)
            mesh = ShardMesh(shards, sequence=sequence)
            with mesh.among(rank, degree, exchange):
                found[rank] = run(mesh)
        except BaseException as error:
            turns.broken = True
            raised.append(error)
        finally:
            turns.pass_on(rank)

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(degree)]
    for thread in threads:
        thread.start()
    turns.start()
    for thread in threads:
        thread.join(_LIMIT_S)
    if raised:
        raise raised[0]
    return found
