"""Embedding, logits and loss of a vocabulary that is cut into virtual shards. No rank has all logits in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from everstep.base.errors import ConfigError, TaskError
from everstep.exact.shard_cut import ShardCut, bounds
from everstep.exact.shard_guard import CORRECT, CutModules, compare_with_whole
from everstep.exact.shard_sums import ShardMesh, refuse_second

_ROWS = ShardCut(0)
_NONE = -1
"""In the place of a token that has no gradient."""


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
        found: Tensor = _Masses.apply(self.mesh, self.words, targets, *logits)  # type: ignore[no-untyped-call]
        masses, logit = found.unbind(0)
        loss: Tensor = (masses.log() - logit).sum()
        return loss

    def whole(self) -> Tensor:
        """All logits, without gradient: (N, T, words)."""
        return torch.cat(self.mesh.gather(self.mine), -1)


class _Masses(Function):
    """(mass of all words, logit of the target), (2, N, T), above the largest logit, of which it gives no gradient."""

    @staticmethod
    def forward(ctx: Any, mesh: ShardMesh, words: int, targets: Tensor, *logits: Tensor) -> Tensor:
        most = torch.stack(mesh.gather([own.amax(-1) for own in logits])).amax(0).unsqueeze(-1)
        kept, found = list[Tensor](), []
        for shard, own in zip(mesh.mine, logits, strict=True):
            inside, place = _inside(targets, *bounds(words, mesh.shards)[shard])
            above, place = own - most, place.unsqueeze(-1)
            logit = above.gather(-1, place).squeeze(-1) * inside
            mass = above.exp_()
            found.append(torch.stack([mass.sum(-1), logit]))
            kept += [mass, place, inside]
        ctx.save_for_backward(*kept)
        return mesh.total(found)

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> tuple[Any, ...]:
        refuse_second()
        by_mass, by_logit = found[0].unsqueeze(-1).unbind(0)
        kept, given = ctx.saved_tensors, []
        for mass, place, inside in zip(kept[::3], kept[1::3], kept[2::3], strict=True):
            given.append((mass * by_mass).scatter_add_(-1, place, by_logit * inside.unsqueeze(-1)))
        return None, None, None, *given


class _Look(Function):
    """Rows of an embedding. Each word belongs to one shard, and the other shards give zeros: a rank that has all rows
    looks them up at once."""

    @staticmethod
    def forward(ctx: Any, mesh: ShardMesh, padding: int, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.mesh, ctx.padding, ctx.weight = mesh, padding, weight.detach()
        ctx.save_for_backward(tokens)
        if mesh.degree == 1:
            return functional.embedding(tokens, weight).add_(0.0)  # a sum makes 0.0 of -0.0
        found = []
        for shard in mesh.mine:
            first, stop = bounds(weight.shape[0], mesh.shards)[shard]
            inside, place = _inside(tokens, first, stop)
            found.append(functional.embedding(place, weight[first:stop]).masked_fill_(~inside.unsqueeze(-1), 0.0))
        return mesh.total(found)

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> tuple[Any, ...]:
        refuse_second()
        (tokens,), mesh, given = ctx.saved_tensors, ctx.mesh, []
        for shard in mesh.mine:
            first, stop = bounds(ctx.weight.shape[0], mesh.shards)[shard]
            inside, place = _inside(tokens, first, stop)
            place.masked_fill_(~inside | (tokens == ctx.padding), _NONE)
            given.append(torch.ops.aten.embedding_dense_backward(found[0], place, stop - first, _NONE, False))
        return None, None, None, mesh.whole_gradient(_ROWS, ctx.weight, given)


def _inside(tokens: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
    """Whether tokens are words of a shard, and which of its words, or any."""
    return (tokens >= first) & (tokens < stop), (tokens - first).clamp(0, stop - first - 1)


class _VocabularyModule:
    """In the place of a method of a module that has a weight with a row for each word."""

    def __init__(self, name: str, owner: nn.Module, mesh: ShardMesh, method: str = "") -> None:
        """name: of the module; method: as of `CutModules`. Raises: ConfigError for too few words."""
        self._guard = CutModules([(name, owner)], owner, method)
        weight = cast(Tensor, owner.weight)
        if weight.shape[0] < mesh.shards:
            raise ConfigError(
                f"cell.shards: {name}.weight is {list(weight.shape)}: expected a word or more for {mesh.shards} shards"
            )
        self._owner, self._mesh, self._words = owner, mesh, weight.shape[0]
        mesh.cuts[f"{name}.weight"] = _ROWS

    def _parts(self) -> tuple[Tensor, ...]:
        self._guard.check()
        return self._mesh.parts_of(cast(Tensor, self._owner.weight), _ROWS)


class VocabularyEmbedding(_VocabularyModule):
    """An embedding; each shard looks its own words up, and the sum over shards is alike at all ranks."""

    def __init__(self, name: str, owner: nn.Module, mesh: ShardMesh) -> None:
        """Raises: ConfigError for what an embedding may do beyond looking up."""
        if type(owner) is not nn.Embedding and type(owner).__name__ != "GemmaTextScaledWordEmbedding":
            raise ConfigError(f"cell.shards: {name} is a {type(owner).__name__}: expected an embedding")
        super().__init__(name, owner, mesh)
        self._name = name
        self._padding()

    def _padding(self) -> int | None:
        """The word that has no gradient. Raises: ConfigError for what an embedding may do beyond looking up."""
        owner = cast(nn.Embedding, self._owner)
        if owner.max_norm is not None or owner.scale_grad_by_freq or owner.sparse:
            raise ConfigError(
                f"cell.shards: {self._name}: expected an embedding without max_norm, scale_grad_by_freq and sparse"
            )
        return owner.padding_idx

    def __call__(self, input: Tensor) -> Tensor:
        """input: tokens, (N, T) int64 -> (N, T, width). Raises: TaskError for tokens that are no words."""
        padding_idx = self._padding()
        _refuse_unknown("tokens", input, self._words)
        self._guard.check()
        padding = _NONE if padding_idx is None else padding_idx
        joined = cast(Tensor, _Look.apply(self._mesh, padding, input, self._owner.weight))  # type: ignore[no-untyped-call]
        scale = getattr(self._owner, "embed_scale", None)  # Gemma's
        return joined if scale is None else joined * scale.to(joined.dtype)


class VocabularyHead(_VocabularyModule):
    """Logits: `VocabularyLogits` where gradients are wanted, else the tensor of all."""

    def __init__(self, name: str, owner: nn.Module, mesh: ShardMesh, method: str) -> None:
        """method: that gives the logits, "": the forward pass. Raises: ConfigError for a head that has more than a
        weight."""
        if method and not callable(getattr(type(owner), method, None)):
            raise ConfigError(
                f"cell.shards: the plan names {name}.{method}(), which the model does not have: {CORRECT}"
            )
        present = [name for name, parameter in owner._parameters.items() if parameter is not None]
        if (not method and type(owner) is not nn.Linear) or present != ["weight"]:
            raise ConfigError(f"cell.shards: {name}: expected a linear head that has a weight and no bias")
        super().__init__(name, owner, mesh, method)
        self._name, self._method = name, method or "forward"

    def __call__(self, x: Tensor) -> VocabularyLogits | Tensor:
        """x: (N, T, width), alike at all ranks."""
        if self._mesh.compares:
            owner, whole = self._owner, getattr(type(self._owner), self._method)
            compare_with_whole(
                *(self._name, owner, lambda y: whole(owner, y).detach()),
                *(lambda y: self._by_shards(y).whole(), x),
            )
        logits = self._by_shards(x)
        return logits if torch.is_grad_enabled() else logits.whole()

    def _by_shards(self, x: Tensor) -> VocabularyLogits:
        pairs = zip(self._mesh.spread(x), self._parts(), strict=True)
        own = tuple(functional.linear(own, weight) for own, weight in pairs)
        return VocabularyLogits(self._mesh, self._words, own)


def _refuse_unknown(what: str, tokens: Tensor, words: int) -> None:
    """A token that no shard has would count as a zero. Raises: TaskError."""
    if tokens.numel() and not tokens.is_meta and not (int(tokens.min()) >= 0 and int(tokens.max()) < words):
        raise TaskError(f"expected {what} from 0 to {words - 1}, got {int(tokens.min())} to {int(tokens.max())}")
