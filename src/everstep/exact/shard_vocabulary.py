"""Embedding, logits and loss of a vocabulary that is cut into virtual shards. No rank has all logits in training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from everstep.base.errors import ConfigError, TaskError
from everstep.exact.shard_cut import ShardCut, bounds
from everstep.exact.shard_region import Sharded
from everstep.exact.shard_sums import ShardMesh

_ROWS = ShardCut(0)


@dataclass(frozen=True)
class VocabularyLogits:
    """Logits in training: for each shard of this rank (N, T, words of the shard)."""

    mesh: ShardMesh
    words: int
    mine: tuple[Tensor, ...]

    def loss(self, targets: Tensor) -> Tensor:
        """Cross-entropy, summed over tokens. targets: (N, T) int64.

        Raises: TaskError for targets that are no words.
        """
        _refuse_unknown("targets", targets, self.words)
        logits = [own.float() for own in self.mine]
        most = torch.stack(self.mesh.gather([own.detach().amax(-1) for own in logits])).amax(0)
        above = [own - most.unsqueeze(-1) for own in logits]
        masses = self.mesh.join([own.exp().sum(-1) for own in above])
        limits = [bounds(self.words, self.mesh.shards)[shard] for shard in self.mesh.mine]
        wanted = []
        for own, (first, stop) in zip(above, limits, strict=True):
            inside = (targets >= first) & (targets < stop)
            place = (targets - first).clamp(0, stop - first - 1).unsqueeze(-1)
            wanted.append(own.gather(-1, place).squeeze(-1) * inside)
        return (masses.log() - self.mesh.join(wanted)).sum()

    def whole(self) -> Tensor:
        """All logits, without gradient: (N, T, words)."""
        return torch.cat(self.mesh.gather(self.mine), -1)


class VocabularyShards:
    """The shards of each weight that has a row per word; those that two modules share are the same parameters."""

    def __init__(self, mesh: ShardMesh) -> None:
        self._mesh = mesh
        self._made: dict[int, tuple[str, nn.ParameterDict]] = {}

    def of(self, name: str, weight: Tensor) -> tuple[str, nn.ParameterDict]:
        """(name of the weight that they were cut from, this rank's shards). Raises: ConfigError for too few words."""
        mesh = self._mesh
        if weight.shape[0] < mesh.shards:
            raise ConfigError(
                f"cell.shards: {name} is {list(weight.shape)}: expected a word or more for {mesh.shards} shards"
            )
        if id(weight) not in self._made:
            made = {
                str(shard): nn.Parameter(_ROWS.take(weight, shard, mesh.shards), requires_grad=weight.requires_grad)
                for shard in mesh.mine
            }
            self._made[id(weight)] = name, nn.ParameterDict(made)
        return self._made[id(weight)]


class _VocabularyModule(nn.Module):
    def __init__(self, name: str, weight: Tensor, mesh: ShardMesh, made: VocabularyShards) -> None:
        super().__init__()
        self._mesh, self._words = mesh, weight.shape[0]
        origin, self.shards = made.of(name, weight)
        self.came_from = {f"shards.{shard}": Sharded(origin, shard, _ROWS) for shard in mesh.mine}

    def _weight(self, k: int) -> Tensor:
        return self.shards[str(self._mesh.mine[k])]


class VocabularyEmbedding(_VocabularyModule):
    """An embedding; each shard looks its own words up, and the sum over shards is alike at all ranks."""

    def __init__(self, name: str, inner: nn.Embedding, mesh: ShardMesh, made: VocabularyShards) -> None:
        """name: of the module. Raises: ConfigError for what an embedding may do beyond looking up."""
        super().__init__(f"{name}.weight", inner.weight, mesh, made)
        if inner.max_norm is not None or inner.scale_grad_by_freq or inner.sparse:
            raise ConfigError(
                f"cell.shards: {name}: expected an embedding without max_norm, scale_grad_by_freq and sparse"
            )
        self._padding = inner.padding_idx

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (N, T) int64 -> (N, T, width). Raises: TaskError for tokens that are no words."""
        _refuse_unknown("tokens", tokens, self._words)
        limits = bounds(self._words, self._mesh.shards)
        found = []
        for k, shard in enumerate(self._mesh.mine):
            first, stop = limits[shard]
            inside = (tokens >= first) & (tokens < stop)
            padding = None if self._padding is None or not first <= self._padding < stop else self._padding - first
            looked = functional.embedding((tokens - first).clamp(0, stop - first - 1), self._weight(k), padding)
            found.append(looked * inside.unsqueeze(-1))
        return self._mesh.join(found)


class VocabularyHead(_VocabularyModule):
    """Logits: `VocabularyLogits` where gradients are wanted, else the tensor of all."""

    def forward(self, x: Tensor) -> VocabularyLogits | Tensor:
        """x: (N, T, width), alike at all ranks."""
        found = tuple(functional.linear(own, self._weight(k)) for k, own in enumerate(self._mesh.spread(x)))
        logits = VocabularyLogits(self._mesh, self._words, found)
        return logits if torch.is_grad_enabled() else logits.whole()


def _refuse_unknown(what: str, tokens: Tensor, words: int) -> None:
    """A token that no shard has would count as a zero. Raises: TaskError."""
    if tokens.numel() and not (int(tokens.min()) >= 0 and int(tokens.max()) < words):
        raise TaskError(f"expected {what} from 0 to {words - 1}, got {int(tokens.min())} to {int(tokens.max())}")
