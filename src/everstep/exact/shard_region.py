"""A region of a model that is computed shard by shard: column-parallel layers, what lies between, row-parallel layers.

The module's own forward pass runs once for each shard, on a twin whose layers are the shard's: so attention, with heads
of any grouping, and perceptrons of any kind need no second implementation. What the region gives is the sum
over shards; biases of row-parallel layers and what comes after them are applied to the sum, once.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from everstep.base.errors import ConfigError, TaskError
from everstep.exact.shard_cut import ShardCut
from everstep.exact.shard_guard import CORRECT, CutModules, compare_with_whole
from everstep.exact.shard_sums import ShardMesh

_PLAIN = frozenset({bool, int, float, str, type(None)})
"""Types of settings of modules."""
_OF_MODULES = frozenset({"forward", *vars(nn.Module())})


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
    numbers of the module that count what a shard has only its share of; rates: numbers of the module that are all 0
    where it draws nothing, None: it may draw whenever it is in training.
    """

    modules: str
    column: Mapping[str, Column]
    row: Sequence[str]
    method: str = ""
    after: Sequence[str] = ()
    divided: Sequence[str] = ()
    rates: Sequence[str] | None = None


class ShardLinear(nn.Module):
    """A linear layer that has one shard's weight during a call. turned: the weight is (inputs, outputs), as GPT-2's."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.hold(None, None)

    def hold(self, weight: Tensor | None, bias: Tensor | None) -> None:
        """Set the weight and bias of the next call."""
        self.__dict__.update(weight=weight, bias=bias)  # `nn.Module` takes several us for each

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., inputs of the shard) -> (..., outputs of the shard)."""
        weight = cast(Tensor, self.weight)
        return functional.linear(x, weight.t() if self.turned else weight, self.bias)


class ShardedRegion:
    """What a module computes, shard by shard, in the place of its `forward` or of another method. The module keeps its
    parameters, whole, and its name."""

    def __init__(self, name: str, owner: nn.Module, rule: RegionRule, mesh: ShardMesh) -> None:
        """name: of the module in the model. Raises: ConfigError for what the rule cannot cut."""
        self._name, self._owner, self._mesh, self._method = name, owner, mesh, rule.method
        _refuse_missing(name, owner, rule)
        self._layers = {layer: _layer(name, owner, layer) for layer in (*rule.column, *rule.row)}
        _refuse_others(name, owner, rule, self._layers)
        self._guard = CutModules(_in_region(name, owner, rule, self._layers), owner)
        self._cuts = {
            layer: self._cut(f"{name}.{layer}", module, rule.column.get(layer))
            for layer, module in self._layers.items()
        }
        self._inner = {layer: ShardLinear(turned=not isinstance(one, nn.Linear)) for layer, one in self._layers.items()}
        self._twin = _twin(
            owner, rule, {id(self._layers[layer]): one for layer, one in self._inner.items()}, mesh.shards
        )
        biased = [self._layers[layer] for layer in rule.row if self._layers[layer].bias is not None]
        if len(biased) > 1:
            raise ConfigError(f"cell.shards: {name} has several row-parallel layers with biases: expected one")
        self._biased, self._rates = biased, rule.rates
        self._draws = [m for m in self._twin.modules() if isinstance(m, _DropoutNd | nn.RReLU)]
        self._pairs = _pairs(owner, self._twin, rule.divided)
        self._beside = _BesideSettings(name, self._pairs, getattr(type(owner), rule.method) if rule.method else None)
        after = [owner.get_submodule(path) for path in rule.after]
        self._after = [
            SequencePieces(f"{name}.{path}", module, mesh) if mesh.sequence else module
            for path, module in zip(rule.after, after, strict=True)
        ]

    def _cut(self, name: str, module: nn.Module, column: Column | None) -> dict[str, ShardCut]:
        """How a layer's parameters are cut."""
        weight, mesh = cast(Tensor, module.weight), self._mesh
        outputs = int(not isinstance(module, nn.Linear))
        cut = ShardCut(1 - outputs) if column is None else ShardCut(outputs, column.fused)
        cut.require(f"{name}.weight", weight.shape, mesh.shards, 0 if column is None else column.heads)
        found = {"weight": cut}
        if column is not None and module.bias is not None:
            found["bias"] = ShardCut(0, column.fused)
        mesh.cuts.update({f"{name}.{key}": one for key, one in found.items()})
        return found

    def __call__(self, *args: Any, **named: Any) -> Any:
        """What the module gives. Its first argument is the hidden state; the others are alike for all shards."""
        self._guard.check()
        self._beside.check()
        for layer, module in self._layers.items():
            if self._owner.get_submodule(layer) is not module:
                raise ConfigError(f"cell.shards: {layer} of {self._name} was replaced after the model was cut")
        if self._mesh.compares:
            self._compare(args, named)
            self._beside.look()
        return self._by_shards(*args, **named)

    def _compare(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        owner, key = self._owner, "" if args else next(iter(named))
        whole = getattr(type(owner), self._method or "forward")
        rest = {name: value for name, value in named.items() if name != key}

        def given(act: Any, *first: Any) -> Any:
            return lambda x: act(*first, x, *args[1:], **rest) if args else act(*first, **{key: x}, **rest)

        x = args[0] if args else named[key]
        compare_with_whole(self._name, owner, given(whole, owner), given(self._by_shards), x)

    def _by_shards(self, *args: Any, **named: Any) -> Any:
        key = "" if args else next(iter(named))
        hidden = args[0] if args else named[key]
        for other in (*args[1:], *(value for name, value in named.items() if name != key)):
            if isinstance(other, Tensor) and other.requires_grad:
                raise TaskError("cell.shards: a sharded module takes one tensor with a gradient, its first argument")
        mesh, twin, draws = self._mesh, self._twin, _set_as_owner(self._pairs)
        idle = self._rates is not None and not any(vars(twin)[rate] for rate in self._rates)
        idle = idle and not any(getattr(module, "p", 1.0) for module in self._draws)  # the user may have put one there
        call = getattr(twin, self._method) if self._method else twin
        weights = {layer: self._parts(layer) for layer in self._layers}
        xs = mesh.spread_hidden(hidden)

        def act(k: int) -> Any:
            for layer, inner in self._inner.items():
                inner.hold(*weights[layer][k])
            return call(xs[k], *args[1:], **named) if args else call(**{**named, key: xs[k]})

        found = mesh.each(act, draws=draws, idle=idle)
        for inner in self._inner.values():
            inner.hold(None, None)
        first = found[0]
        y = mesh.join_hidden([one[0] if isinstance(one, tuple) else one for one in found])
        for layer in self._biased:
            y = _add_bias(y, cast(Tensor, layer.bias), mesh)
        for after in self._after:
            y = after(y)
        return (y, *(None for _ in first[1:])) if isinstance(first, tuple) else y

    def _parts(self, layer: str) -> list[tuple[Tensor, Tensor | None]]:
        """(weight, bias) of each of this rank's shards."""
        cuts, module, mesh = self._cuts[layer], self._layers[layer], self._mesh
        weights = mesh.parts_of(cast(Tensor, module.weight), cuts["weight"])
        if "bias" not in cuts:
            return [(weight, None) for weight in weights]
        return list(zip(weights, mesh.parts_of(cast(Tensor, module.bias), cuts["bias"]), strict=True))


class SequencePieces:
    """What a module between regions makes of the sequence, such as a norm: each shard has a part of it."""

    def __init__(self, name: str, owner: nn.Module, mesh: ShardMesh) -> None:
        """name: of the module in the model. Raises: ConfigError for what parts of the sequence would pass over."""
        self._name, self._owner, self._mesh = name, owner, mesh
        self._guard = CutModules(_named(name, owner), owner)
        self._twin = copy.deepcopy(owner)
        self._pairs = _pairs(owner, self._twin)
        self._beside = _BesideSettings(name, self._pairs)

    def __call__(self, x: Tensor) -> Tensor:
        """x: this rank's part, (N, T, width) -> the same shape. Gradients of parameters are sums over shards."""
        self._guard.check()
        self._beside.check()
        if self._mesh.compares:
            owner = self._owner
            whole = type(owner).forward
            compare_with_whole(self._name, owner, lambda y: whole(owner, y), self._by_parts, x)
            self._beside.look()
        return self._by_parts(x)

    def _by_parts(self, x: Tensor) -> Tensor:
        mesh, twin, draws = self._mesh, self._twin, _set_as_owner(self._pairs)
        pieces = mesh.pieces(x)
        spread = {name: mesh.spread(parameter) for name, parameter in self._owner.named_parameters()}

        def act(k: int) -> Tensor:
            given = {name: views[k] for name, views in spread.items()}
            return cast(Tensor, functional_call(twin, given, (pieces[k],)))

        return mesh.together(mesh.each(act, draws=draws))


_Pairs = list[tuple[nn.Module, nn.Module, Sequence[str]]]
"""Modules of a twin, those that they stand for, and settings that are the twin's own."""


def _pairs(owner: nn.Module, twin: nn.Module, own: Sequence[str] = ()) -> _Pairs:
    found = [(module, owner.get_submodule(name)) for name, module in twin.named_modules()]
    return [(one, other, own if one is twin else ()) for one, other in found if type(one) is type(other)]


def _set_as_owner(pairs: _Pairs) -> bool:
    """Give the modules of a twin the modes and plain settings that the model has by now, such as a dropout rate that
    a scheduler changes. Returns whether one of them is in training, so that it may draw."""
    for module, other, own in pairs:
        vars(module).update({k: v for k, v in vars(other).items() if type(v) in _PLAIN and k not in own})
    return any(module.training for module, _, _ in pairs)


class _BesideSettings:
    """What modules have beside plain settings. Their twins keep the copies made when the model was cut."""

    def __init__(self, name: str, pairs: _Pairs, method: Any = None) -> None:
        """method: all that is computed by shards, of a module that may set what it does not use."""
        self._name, self._modules = name, [other for _, other, _ in pairs]
        self._used: Any = getattr(getattr(inspect.unwrap(method), "__code__", None), "co_names", None)
        self.look()

    def look(self) -> None:
        """Take what there is for what the twins have: a module's own forward pass has set it."""
        self._seen = [_things(module) for module in self._modules]

    def check(self) -> None:
        """Raises: ConfigError naming what was set since."""
        for module, seen in zip(self._modules, self._seen, strict=True):
            for key, value in _things(module).items():
                if seen.get(key) is not value and (self._used is None or key.partition("[")[0] in self._used):
                    raise ConfigError(
                        f"cell.shards: {key} of {type(module).__name__} in {self._name} was set after the model was "
                        "cut: expected an argument of the forward pass; or set cell.tp=1 and cell.shards=1"
                    )


def _things(module: nn.Module) -> dict[str, Any]:
    """What a module has beside settings, parameters and modules, and what is in its lists and dicts."""
    found = {k: v for k, v in vars(module).items() if type(v) not in _PLAIN and k not in _OF_MODULES and not _is_cut(v)}
    for key, value in [*found.items()]:
        if type(value) in (dict, list):
            items = value.items() if type(value) is dict else enumerate(value)
            found |= {f"{key}[{at!r:.40}]": one for at, one in items}
    return found


def _is_cut(value: Any) -> bool:
    """Whether the value stands for a method that is computed by shards."""
    return type(value).__module__.startswith("everstep.exact.shard_")


def _add_bias(y: Tensor, bias: Tensor, mesh: ShardMesh) -> Tensor:
    if not mesh.sequence:
        return y + bias
    return mesh.together([piece + own for piece, own in zip(mesh.pieces(y), mesh.spread(bias), strict=True)])


def _refuse_missing(name: str, owner: nn.Module, rule: RegionRule) -> None:
    """Raises: ConfigError for what the plan names of a module that has no such thing."""
    there = dict(owner.named_modules(remove_duplicate=False))
    missing = [path for path in (*rule.column, *rule.row, *rule.after) if path not in there]
    missing += [number for number in rule.divided if type(vars(owner).get(number)) is not int]
    missing += [rate for rate in rule.rates or () if rate not in vars(owner)]
    if rule.method and not callable(getattr(type(owner), rule.method, None)):
        missing.append(f"{rule.method}()")
    if missing:
        kind = "method" if missing[0].endswith("()") else "whole number" if missing[0] in rule.divided else "module"
        kind = "number" if missing[0] in (rule.rates or ()) else kind
        raise ConfigError(f"cell.shards: the plan names the {kind} {name}.{missing[0]}, which is not there: {CORRECT}")


def _layer(name: str, owner: nn.Module, layer: str) -> nn.Module:
    """A linear layer, or one of GPT-2's, which are turned."""
    module = owner.get_submodule(layer)
    if type(module) is not nn.Linear and type(module).__name__ != "Conv1D":
        raise ConfigError(
            f"cell.shards: {name}.{layer} is a {type(module).__name__}: expected a linear layer, which can be cut"
        )
    present = [path for path, parameter in module.named_parameters() if parameter is not None]
    more = [path for path in present if path not in ("weight", "bias")] + [path for path, _ in module.named_buffers()]
    if more or "weight" not in present:
        raise ConfigError(
            f"cell.shards: {name}.{layer} has {', '.join(more) or 'no weight'}: expected a linear layer with a weight "
            "and a bias alone, without weight_norm, spectral_norm or an adapter; or set cell.tp=1 and cell.shards=1"
        )
    return module


def _named(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(f"{name}.{path}" if path else name, one) for path, one in module.named_modules()]


def _in_region(
    name: str, owner: nn.Module, rule: RegionRule, layers: Mapping[str, nn.Module]
) -> list[tuple[str, nn.Module]]:
    """Modules that the shards have twins of."""
    if rule.method:
        if rule.method in vars(owner):
            raise ConfigError(f"cell.shards: {name} has a method {rule.method} of its own")
        return [(f"{name}.{layer}", module) for layer, module in layers.items()]
    apart = {id(one) for path in rule.after for one in owner.get_submodule(path).modules()}
    return [(path, one) for path, one in _named(name, owner) if id(one) not in apart]


def _refuse_others(name: str, owner: nn.Module, rule: RegionRule, layers: Mapping[str, nn.Module]) -> None:
    """Refuse parameters and buffers in the region that no rule cuts: each shard would change its own copy."""
    if rule.method:
        return
    known = {id(value) for module in layers.values() for value in module.parameters()}
    known |= {id(value) for path in rule.after for value in owner.get_submodule(path).parameters()}
    for path, value in (*owner.named_parameters(), *owner.named_buffers()):
        if id(value) not in known:
            raise ConfigError(
                f"cell.shards: the plan does not say how {name}.{path} {list(value.shape)} is cut: {CORRECT}"
            )


def _twin(owner: nn.Module, rule: RegionRule, made: dict[int, Any], shards: int) -> nn.Module:
    """The module with layers of a shard. made: these layers, by the identity of those that they stand for."""
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
                f"cell.shards: {rule.modules}.{number} is {count}: expected one that {shards} shards divide; set "
                f"cell.shards to a divisor of {count}"
            )
        vars(found)[number] = count // shards
    return found
