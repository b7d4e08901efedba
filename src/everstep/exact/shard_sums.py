"""Sums over virtual shards: a layer is cut into a fixed number of shards, and what the shards give is added by a tree.

The number of shards is numerics: each is computed with kernels of its own shape, and the tree over them is that of the
lanes. How many ranks there are to compute them is placement: a rank computes its shards one after the other, and what
is to be added is gathered by shard, never reduced on the way. So the bits are the same at every degree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from everstep.base.errors import ConfigError, check
from everstep.exact.seeding import preserve_rng, seed_all, shard_seed
from everstep.exact.shard_cut import ShardCut
from everstep.placement.tree import fold

_DRAWS = 2**62
_SEQUENCE = 1
"""Axis of a hidden state (N, T, width) that sequence parallelism cuts."""
T = TypeVar("T")


class ShardExchange(Protocol):
    """How the ranks of a cell learn of each other's shards. All of them call it in the same order."""

    def gather(self, mine: Sequence[Tensor]) -> list[Tensor]:
        """Give one tensor for each shard of this rank, in order; returns those of all shards, in order. The tensors
        that come back are not written to."""


class AllHere:
    """The exchange of a rank that has all shards."""

    def gather(self, mine: Sequence[Tensor]) -> list[Tensor]:
        return list(mine)


@dataclass(frozen=True)
class _Seat:
    """Which rank of how many this is, and how it learns of the others' shards."""

    rank: int = 0
    degree: int = 1
    exchange: ShardExchange = field(default_factory=AllHere)


class ShardMesh:
    """Virtual shards, and which of them this rank has: all, unless it is `among` others.

    shards: how many; sequence: whether the hidden state between sharded regions is cut along the sequence, ends: from
    which module on, and up to which; cuts: the parameters that are cut, by name; compares: whether this is inside
    `comparing`.
    """

    def __init__(self, shards: int, *, sequence: bool = False) -> None:
        check(shards >= 1, f"a model has one shard or more, not {shards}")
        self.shards, self.sequence = shards, sequence
        self.cuts: dict[str, ShardCut] = {}
        self.ends: list[nn.Module] = []
        self.compares = False
        self._derives = False
        self._seat = _Seat()

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Inside, what is computed by shards is compared with what the whole module gives. For a rank that has all."""
        self.compares = True
        try:
            yield
        finally:
            self.compares = False

    @contextmanager
    def among(self, rank: int, degree: int, exchange: ShardExchange) -> Iterator[None]:
        """Be one of so many ranks inside: all of them run the same passes."""
        check(0 <= rank < degree, f"rank {rank} is none of {degree}")
        check(self.shards % degree == 0, f"{degree} ranks do not divide {self.shards} shards")
        before, self._seat = self._seat, _Seat(rank, degree, exchange)
        try:
            yield
        finally:
            self._seat = before

    @contextmanager
    def deriving(self) -> Iterator[None]:
        """Inside, a backward pass is a lane's own, whose gradients go to the sums shard by shard. Elsewhere it is the
        user's, who sees whole gradients: each rank has those of its own shards, and asks the others."""
        self._derives = True
        try:
            yield
        finally:
            self._derives = False

    @property
    def rank(self) -> int:
        """Number of this process among those that have a part of the shards."""
        return self._seat.rank

    @property
    def degree(self) -> int:
        """Ranks among which the shards are dealt."""
        return self._seat.degree

    @property
    def mine(self) -> range:
        count = self.shards // self.degree
        return range(self.rank * count, (self.rank + 1) * count)

    def gather(self, mine: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of all shards. mine: those of this rank's, in order."""
        found = self._seat.exchange.gather([tensor.detach().contiguous() for tensor in mine])
        check(len(found) == self.shards, f"{len(found)} tensors came of {self.shards} shards")
        return found

    def total(self, mine: Sequence[Tensor]) -> Tensor:
        """The sum over all shards, along the tree."""
        found, sums = self.gather(mine), set[int]()

        def add(left: Tensor, right: Tensor) -> Tensor:
            if id(left) in sums:
                return left.add_(right)
            total = left + right
            sums.add(id(total))
            return total

        return found[0].clone() if self.shards == 1 else fold(self.shards, dict(enumerate(found)), add)

    def each(self, act: Callable[[int], T], *, draws: bool, idle: bool = False) -> list[T]:
        """What `act(k)` gives for the k-th shard of this rank, one after the other. draws: each shard draws from a
        stream of its own, which depends on the stream around it and on the number of the shard. idle: none draws this
        time, so these streams are not made (about 100 us); the stream around them goes on as if they were."""
        drawn = int(torch.randint(_DRAWS, (), device="cpu")) if draws else 0
        if idle or not draws:
            return [act(k) for k in range(len(self.mine))]
        found = []
        with preserve_rng():
            for k, shard in enumerate(self.mine):
                seed_all(shard_seed(drawn, shard))
                found.append(act(k))
        return found

    def whole_gradient(self, cut: ShardCut, like: Tensor, found: Sequence[Tensor]) -> Tensor:
        """The gradient of a parameter that is cut. found: of this rank's shards; those of others are zeros in a lane's
        own backward pass."""
        if not self._derives or self.degree == 1:
            return cut.join(found if self.degree == 1 else self.gather(found))
        gradient = torch.zeros_like(like)
        for shard, one in zip(self.mine, found, strict=True):
            cut.put(one, gradient, shard, self.shards)
        return gradient

    # ---- differentiable

    def parts_of(self, whole: Tensor, cut: ShardCut) -> tuple[Tensor, ...]:
        """This rank's shards of a parameter. Its gradient is `whole_gradient`."""
        return cast("tuple[Tensor, ...]", _Take.apply(self, cut, whole))  # type: ignore[no-untyped-call]

    def spread(self, x: Tensor) -> tuple[Tensor, ...]:
        """`x`, which is alike at all ranks, for each shard of this rank; its gradient is the sum over all shards."""
        return cast("tuple[Tensor, ...]", _Spread.apply(self, x))  # type: ignore[no-untyped-call]

    def join(self, mine: Sequence[Tensor]) -> Tensor:
        """The sum over all shards, alike at all ranks."""
        return cast(Tensor, _Join.apply(self, *mine))  # type: ignore[no-untyped-call]

    def spread_hidden(self, x: Tensor) -> tuple[Tensor, ...]:
        """`spread` of a hidden state, of which each shard may have a part of the sequence."""
        return cast("tuple[Tensor, ...]", _SpreadSequence.apply(self, x)) if self.sequence else self.spread(x)  # type: ignore[no-untyped-call]

    def join_hidden(self, mine: Sequence[Tensor]) -> Tensor:
        """`join` to a hidden state, of which each shard may have a part of the sequence."""
        return cast(Tensor, _JoinSequence.apply(self, *mine)) if self.sequence else self.join(mine)  # type: ignore[no-untyped-call]

    def require_length(self, tokens: int) -> None:
        """Raises: ConfigError for a sequence of so many tokens, if it is to be cut and the shards do not divide it."""
        if self.sequence and tokens % self.shards:
            raise ConfigError(
                f"cell.sp: expected sequences whose length is a multiple of cell.shards={self.shards}, got "
                f"{tokens} tokens: change task.context, or set cell.sp=false"
            )

    def enter_sequence(self, x: Tensor) -> Tensor:
        """This rank's part of the sequence. x: (N, T, width), alike at all ranks.

        Raises: ConfigError for a length that the shards do not divide.
        """
        self.require_length(x.shape[_SEQUENCE])
        return cast(Tensor, _EnterSequence.apply(self, x))  # type: ignore[no-untyped-call]

    def leave_sequence(self, x: Tensor) -> Tensor:
        """The whole sequence, alike at all ranks. x: this rank's part."""
        return cast(Tensor, _LeaveSequence.apply(self, x))  # type: ignore[no-untyped-call]

    # ---- parts of the sequence

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        """The parts of the sequence that this rank's shards have. x: of this rank. Differentiable, and contiguous on
        both ways: a kernel that adds rows up chooses its order by the strides."""
        return cast("tuple[Tensor, ...]", _Pieces.apply(len(self.mine), x))  # type: ignore[no-untyped-call]

    def together(self, pieces: Sequence[Tensor]) -> Tensor:
        """Inverse of `pieces`."""
        return cast(Tensor, _Together.apply(*pieces))  # type: ignore[no-untyped-call]

    def whole(self, x: Tensor) -> Tensor:
        """The whole sequence. x: this rank's part."""
        return torch.cat(self.gather(_cut(x.detach(), len(self.mine))), _SEQUENCE)

    def part(self, x: Tensor) -> Tensor:
        """This rank's part of the whole sequence `x`."""
        size = x.shape[_SEQUENCE] // self.degree
        return x.narrow(_SEQUENCE, self.rank * size, size).contiguous()


def refuse_second() -> None:
    """Inside a backward pass. Raises: ConfigError if it is to be derived, too."""
    if torch.is_grad_enabled():
        raise ConfigError(
            "cell.shards: a sharded module has first derivatives alone, but its gradients are to be derived again "
            "(create_graph=True): set cell.tp=1 and cell.shards=1"
        )


def _views(x: Tensor, count: int) -> tuple[Tensor, ...]:
    return tuple(x.view_as(x) for _ in range(count))


def _cut(x: Tensor, count: int) -> tuple[Tensor, ...]:
    return tuple(piece.clone(memory_format=torch.contiguous_format) for piece in x.chunk(count, _SEQUENCE))


class _Pieces(Function):
    @staticmethod
    def forward(ctx: Any, count: int, x: Tensor) -> tuple[Tensor, ...]:
        return _cut(x, count)

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> tuple[Any, ...]:
        return None, torch.cat(found, _SEQUENCE)


class _Together(Function):
    @staticmethod
    def forward(ctx: Any, *pieces: Tensor) -> Tensor:
        ctx.count = len(pieces)
        return torch.cat(pieces, _SEQUENCE)

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> tuple[Tensor, ...]:
        return _cut(found[0], ctx.count)


class _Take(Function):
    @staticmethod
    def forward(ctx: Any, mesh: ShardMesh, cut: ShardCut, whole: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh, ctx.cut, ctx.whole = mesh, cut, whole.detach()
        return tuple(cut.lend(whole, mesh.mine, mesh.shards))

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> tuple[Any, ...]:
        refuse_second()
        return None, None, ctx.mesh.whole_gradient(ctx.cut, ctx.whole, found)


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, mesh: ShardMesh, x: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh = mesh
        return _views(x, len(mesh.mine))

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> tuple[Any, ...]:
        refuse_second()
        return None, ctx.mesh.total(found)


class _Join(Function):
    @staticmethod
    def forward(ctx: Any, mesh: ShardMesh, *mine: Tensor) -> Tensor:
        ctx.count = len(mine)
        return mesh.total(mine)

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> tuple[Any, ...]:
        refuse_second()
        return None, *(found * ctx.count)


class _SpreadSequence(Function):
    @staticmethod
    def forward(ctx: Any, mesh: ShardMesh, x: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh = mesh
        return _views(mesh.whole(x), len(mesh.mine))

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> tuple[Any, ...]:
        refuse_second()
        return None, ctx.mesh.part(ctx.mesh.total(found))


class _JoinSequence(Function):
    @staticmethod
    def forward(ctx: Any, mesh: ShardMesh, *mine: Tensor) -> Tensor:
        ctx.mesh = mesh
        return mesh.part(mesh.total(mine))

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> tuple[Any, ...]:
        refuse_second()
        return None, *([ctx.mesh.whole(found[0])] * len(ctx.mesh.mine))


class _EnterSequence(Function):
    @staticmethod
    def forward(ctx: Any, mesh: ShardMesh, x: Tensor) -> Tensor:
        ctx.mesh = mesh
        return mesh.part(x)

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> tuple[Any, ...]:
        refuse_second()
        return None, ctx.mesh.whole(found[0])


class _LeaveSequence(Function):
    @staticmethod
    def forward(ctx: Any, mesh: ShardMesh, x: Tensor) -> Tensor:
        ctx.mesh = mesh
        return mesh.whole(x)

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> tuple[Any, ...]:
        refuse_second()
        return None, ctx.mesh.part(found[0])
