"""A plan says which modules of a model are cut into virtual shards; `shard_model` carries it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from everstep.base.errors import ConfigError
from everstep.exact.shard_region import BySequence, RegionRule, Sharded, ShardedRegion
from everstep.exact.shard_sums import ShardMesh
from everstep.exact.shard_vocabulary import VocabularyEmbedding, VocabularyHead, VocabularyShards

ShardTable = Mapping[str, Sharded]
"""Each parameter of the sharded model -> what it was cut from."""


@dataclass(frozen=True)
class SequenceRule:
    """Where the hidden state is cut along the sequence. enter, leave: modules whose first argument begins to be cut,
    and is whole again; between: modules that are computed by parts of the sequence."""

    enter: str
    leave: str
    between: Sequence[str]


@dataclass(frozen=True)
class ShardPlan:
    """A plan. Names are those of modules, "*" for any one part. embedding, head: of the vocabulary, "" for none;
    head_method: what computes the logits, if it is not the whole module."""

    regions: Sequence[RegionRule]
    sequence: SequenceRule
    embedding: str = ""
    head: str = ""
    head_method: str = ""


def shard_model(model: nn.Module, plan: ShardPlan, mesh: ShardMesh) -> dict[str, Sharded]:
    """Cut the model in place; returns what each of its parameters was cut from.

    Raises: ConfigError for what cannot be cut, naming it.
    """
    for name, module in model.named_modules():
        if isinstance(module, ShardedRegion | BySequence | VocabularyEmbedding | VocabularyHead):
            raise ConfigError(f"cell.shards: {name} is wrapped already: expected a model that is not yet cut")
    matched = {rule.modules + rule.method: _matching(model, rule.modules) for rule in plan.regions}
    between = [name for pattern in plan.sequence.between for name in _matching(model, pattern)]
    lone = [name for name in (plan.embedding, plan.head, plan.sequence.enter, plan.sequence.leave) if name]
    for name in lone:
        _matching(model, name)
    _refuse_twice(plan, matched, between)
    was = {id(parameter): name for name, parameter in model.named_parameters()}
    for rule in plan.regions:
        for name in matched[rule.modules + rule.method]:
            _put(model, name, rule.method, ShardedRegion(name, model.get_submodule(name), rule, mesh), _inside(rule))
    _cut_vocabulary(model, plan, mesh)
    if mesh.sequence:
        for name in between:
            _put(model, name, "", BySequence(model.get_submodule(name), mesh), ())
        _hook(model.get_submodule(plan.sequence.enter), mesh.enter_sequence)
        _hook(model.get_submodule(plan.sequence.leave), mesh.leave_sequence)
    return dict(_table(model, was))


def _inside(rule: RegionRule) -> tuple[str, ...]:
    return (*rule.column, *rule.row, *rule.after) if rule.method else ()


def _cut_vocabulary(model: nn.Module, plan: ShardPlan, mesh: ShardMesh) -> None:
    made = VocabularyShards(mesh)
    head = model.get_submodule(plan.head) if plan.head else None
    if plan.embedding:
        inner = model.get_submodule(plan.embedding)
        if type(inner) is not nn.Embedding:
            raise ConfigError(f"cell.shards: {plan.embedding} is a {type(inner).__name__}: expected an embedding")
        _put(model, plan.embedding, "", VocabularyEmbedding(plan.embedding, inner, mesh, made), ())
    if head is not None:
        weight = getattr(head, "weight", None)
        if not isinstance(weight, Tensor) or getattr(head, "bias", None) is not None:
            raise ConfigError(f"cell.shards: {plan.head}: expected a head that has a weight and no bias")
        found = VocabularyHead(f"{plan.head}.weight", weight, mesh, made)
        _put(model, plan.head, plan.head_method, found, ("weight",) if plan.head_method else ())


def _put(model: nn.Module, name: str, method: str, made: nn.Module, instead: Sequence[str]) -> None:
    """Put a module in the place of one, or of one's method. instead: what the method alone has used."""
    if not method:
        model.set_submodule(name, made)
        return
    owner = model.get_submodule(name)
    for path in instead:
        owner._modules.pop(path, None)
        owner._parameters.pop(path, None)
    owner.add_module(f"sharded_{method}", made)
    vars(owner)[method] = made


def _hook(module: nn.Module, act: Any) -> None:
    """Have the module's first argument go through `act` before its forward pass."""

    def change(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (act(args[0]), *args[1:]), named
        first = next(iter(named))
        return args, {**named, first: act(named[first])}

    module.register_forward_pre_hook(change, with_kwargs=True)


def _matching(model: nn.Module, pattern: str) -> list[str]:
    """Names that a pattern means. Raises: ConfigError if there is none."""
    wanted = pattern.split(".")
    found = [
        name
        for name, _ in model.named_modules()
        if len(parts := name.split(".")) == len(wanted)
        and all(want in ("*", part) for want, part in zip(wanted, parts, strict=True))
    ]
    if not found:
        raise ConfigError(f"cell.shards: the plan names {pattern}, but the model has no such module")
    return found


def _refuse_twice(plan: ShardPlan, matched: Mapping[str, list[str]], between: Sequence[str]) -> None:
    """Raises: ConfigError for a module that two rules wrap, or one inside another."""
    taken = [name for name in (*between, plan.embedding, "" if plan.head_method else plan.head) if name]
    for rule in plan.regions:
        for name in matched[rule.modules + rule.method]:
            taken += [f"{name}.{layer}" for layer in _inside(rule)] if rule.method else [name]
    for k, name in enumerate(taken):
        for other in taken[k + 1 :]:
            if name == other or name.startswith(f"{other}.") or other.startswith(f"{name}."):
                raise ConfigError(
                    f"cell.shards: the plan wraps {max(name, other, key=len)} twice: expected one rule for it"
                )


def _table(model: nn.Module, was: Mapping[int, str]) -> Iterator[tuple[str, Sharded]]:
    cut: dict[int, Sharded] = {}
    for module in model.modules():
        for path, sharded in getattr(module, "came_from", {}).items():
            cut[id(_parameter(module, path))] = sharded
    for name, parameter in model.named_parameters():
        yield name, cut[id(parameter)] if id(parameter) in cut else Sharded(was[id(parameter)])


def _parameter(module: nn.Module, path: str) -> Tensor:
    owner, _, last = path.rpartition(".")
    inner: Any = module.get_submodule(owner)
    return cast(Tensor, inner[last] if isinstance(inner, nn.ParameterDict) else getattr(inner, last))


def whole_tensors(found: Sequence[Mapping[str, Tensor]], table: Sequence[ShardTable], shards: int) -> dict[str, Tensor]:
    """Tensors of the model that was cut, by its own names. found: for each rank tensors by the sharded model's names;
    table: what they were cut from."""
    pieces: dict[str, dict[int, Tensor]] = {}
    cuts: dict[str, Any] = {}
    whole: dict[str, Tensor] = {}
    for tensors, names in zip(found, table, strict=True):
        for name, tensor in tensors.items():
            origin = names[name]
            if origin.shard is None:
                whole[origin.name] = tensor
            else:
                pieces.setdefault(origin.name, {})[origin.shard] = tensor
                cuts[origin.name] = origin.cut
    joined = {name: cuts[name].join([parts[shard] for shard in range(shards)]) for name, parts in pieces.items()}
    return {**whole, **joined}
