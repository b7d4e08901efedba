"""A region of a model that is computed shard by shard: column-parallel layers, what lies between, row-parallel layers.

The module's own forward pass runs once for each shard, on a copy whose layers are the shard's: so attention, with heads
of whatever grouping, and perceptrons of whatever kind need no second implementation. What the region gives is the sum
over shards; biases of row-parallel layers and what comes after them are applied to the sum, once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from everstep.base.errors import ConfigError, TaskError
from everstep.exact.shard_cut import ShardCut
from everstep.exact.shard_sums import ShardMesh


@dataclass(frozen=True)
class Column:
    """A layer whose outputs are cut. fused: as in `ShardCut`; heads: among its outputs, of one fused part."""

    fused: int = 1
    heads: int = 0


@dataclass(frozen=True)
class RegionRule:
    """How one region is cut.

    modules: its name in the model, "*" for any one part of it; method: what is computed, if it is not the whole module;
    column, row: layers in it; after: modules that are applied to what the last row-parallel layer gives; divided:
    numbers of the module that count what a shard has only its share of.
    """

    modules: str
    column: Mapping[str, Column]
    row: Sequence[str]
    method: str = ""
    after: Sequence[str] = ()
    divided: Sequence[str] = ()


@dataclass(frozen=True)
class Sharded:
    """Where a parameter of the sharded model comes from. name: of the one it was cut from; shard, cut: None for a whole
    one."""

    name: str
    shard: int | None = None
    cut: ShardCut | None = None


class ShardLinear(nn.Module):
    """One shard of a linear layer. turned: the weight is (inputs, outputs), as GPT-2's."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, turned: bool, trained: bool) -> None:
        super().__init__()
        self.turned = turned
        self.weight = nn.Parameter(weight, requires_grad=trained)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., inputs of the shard) -> (..., outputs of the shard)."""
        return functional.linear(x, self.weight.t() if self.turned else self.weight, self.bias)


class ShardedRegion(nn.Module):
    """A region in the place of the module that it was."""

    def __init__(self, name: str, owner: nn.Module, rule: RegionRule, mesh: ShardMesh) -> None:
        """name: of the module in the model. Raises: ConfigError for what the rule cannot cut."""
        super().__init__()
        self._mesh, self._method = mesh, rule.method
        self.came_from: dict[str, Sharded] = {}
        self.shards = nn.ModuleDict()
        layers = {layer: _layer(name, owner, layer) for layer in (*rule.column, *rule.row)}
        _refuse_others(name, owner, rule, layers)
        for shard in mesh.mine:
            made: dict[int, Any] = {}
            for layer, module in layers.items():
                made[id(module)] = self._cut(f"{name}.{layer}", layer, module, rule.column.get(layer), shard)
            self.shards[str(shard)] = _copy(owner, rule, made, mesh.shards)
        self.bias: nn.Parameter | None = None
        for layer in rule.row:
            if layers[layer].bias is not None:
                if self.bias is not None:
                    raise ConfigError(f"cell.shards: {name} has several row-parallel layers with biases: expected one")
                self.bias = cast(nn.Parameter, layers[layer].bias)
                self.came_from["bias"] = Sharded(f"{name}.{layer}.bias")
        self.after = nn.ModuleList(owner.get_submodule(path) for path in rule.after)

    def _cut(self, name: str, layer: str, module: nn.Module, column: Column | None, shard: int) -> ShardLinear:
        weight, turned = cast(Tensor, module.weight), not isinstance(module, nn.Linear)
        outputs, shards = int(turned), self._mesh.shards
        cut = ShardCut(1 - outputs) if column is None else ShardCut(outputs, column.fused)
        cut.require(f"{name}.weight", weight.shape, shards, 0 if column is None else column.heads)
        place = f"shards.{shard}.{layer}"
        self.came_from[f"{place}.weight"] = Sharded(f"{name}.weight", shard, cut)
        bias = None
        if column is not None and module.bias is not None:
            along = ShardCut(0, column.fused)
            bias = along.take(cast(Tensor, module.bias), shard, shards)
            self.came_from[f"{place}.bias"] = Sharded(f"{name}.bias", shard, along)
        return ShardLinear(cut.take(weight, shard, shards), bias, turned=turned, trained=weight.requires_grad)

    def forward(self, *args: Any, **named: Any) -> Any:
        """What the module gives. Its first argument is the hidden state; the others are alike for all shards."""
        key = "" if args else next(iter(named))
        hidden = args[0] if args else named[key]
        for other in (*args[1:], *(value for name, value in named.items() if name != key)):
            if isinstance(other, Tensor) and other.requires_grad:
                raise TaskError("cell.shards: a sharded module takes one tensor with a gradient, its first argument")
        xs = self._mesh.spread_hidden(hidden)

        def act(k: int) -> Any:
            module: Any = self.shards[str(self._mesh.mine[k])]
            call = getattr(module, self._method) if self._method else module
            return call(xs[k], *args[1:], **named) if args else call(**{**named, key: xs[k]})

        found = self._mesh.each(act, draws=self.training)
        first = found[0]
        y = self._mesh.join_hidden([one[0] if isinstance(one, tuple) else one for one in found])
        if self.bias is not None:
            y = _add_bias(y, self.bias, self._mesh)
        for module in self.after:
            y = by_piece(module, y, self._mesh) if self._mesh.sequence else module(y)
        return (y, *(None for _ in first[1:])) if isinstance(first, tuple) else y


class BySequence(nn.Module):
    """A module between regions, such as a norm, where each shard has a part of the sequence."""

    def __init__(self, inner: nn.Module, mesh: ShardMesh) -> None:
        super().__init__()
        self.inner, self._mesh = inner, mesh

    def forward(self, x: Tensor) -> Tensor:
        """x: this rank's part, (N, T, width) -> the same shape."""
        return by_piece(self.inner, x, self._mesh)


def by_piece(module: nn.Module, x: Tensor, mesh: ShardMesh) -> Tensor:
    """What the module makes of each shard's part of the sequence; its gradients are sums over shards."""
    pieces = mesh.pieces(x)
    spread = {name: mesh.spread(parameter) for name, parameter in module.named_parameters()}

    def act(k: int) -> Tensor:
        given = {name: views[k] for name, views in spread.items()}
        return cast(Tensor, functional_call(module, given, (pieces[k],)))

    return mesh.together(mesh.each(act, draws=module.training))


def _add_bias(y: Tensor, bias: Tensor, mesh: ShardMesh) -> Tensor:
    if not mesh.sequence:
        return y + bias
    return mesh.together([piece + own for piece, own in zip(mesh.pieces(y), mesh.spread(bias), strict=True)])


def _layer(name: str, owner: nn.Module, layer: str) -> nn.Module:
    """A linear layer, or one of GPT-2's, which are turned."""
    try:
        module = owner.get_submodule(layer)
    except AttributeError:
        raise ConfigError(f"cell.shards: the plan names {name}.{layer}, which the model does not have") from None
    if type(module) is not nn.Linear and type(module).__name__ != "Conv1D":
        raise ConfigError(
            f"cell.shards: {name}.{layer} is a {type(module).__name__}: expected a linear layer, which can be cut"
        )
    return module


def _refuse_others(name: str, owner: nn.Module, rule: RegionRule, layers: Mapping[str, nn.Module]) -> None:
    """Refuse parameters and buffers in the region that no rule cuts: each shard would change its own copy."""
    if rule.method:
        return
    known = {id(value) for module in layers.values() for value in module.parameters()}
    known |= {id(value) for path in rule.after for value in owner.get_submodule(path).parameters()}
    for path, value in (*owner.named_parameters(), *owner.named_buffers()):
        if id(value) not in known:
            raise ConfigError(f"cell.shards: the plan does not say how {name}.{path} {list(value.shape)} is cut")


def _copy(owner: nn.Module, rule: RegionRule, made: dict[int, Any], shards: int) -> nn.Module:
    """The module with a shard's layers. made: these layers, by the identity of those that they stand for."""
    memo = dict(made)
    memo.update({id(owner.get_submodule(path)): nn.Identity() for path in rule.after})
    if rule.method:  # the other modules are no part of the region
        memo.update({id(child): nn.Identity() for child in owner.children() if id(child) not in memo})
    config = getattr(owner, "config", None)
    if config is not None:
        memo[id(config)] = config
    found = copy.deepcopy(owner, memo)
    if rule.method:
        for layer in [path for path, child in found.named_children() if isinstance(child, nn.Identity)]:
            del found._modules[layer]
    for number in rule.divided:
        count = vars(found)[number]
        if count % shards:
            raise ConfigError(
                f"cell.shards: {rule.modules}.{number} is {count}: expected one that {shards} shards divide"
            )
        vars(found)[number] = count // shards
    return found
