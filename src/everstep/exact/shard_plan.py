"""A plan says which modules of a model are cut into virtual shards; `shard_model` carries it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from everstep.base.errors import ConfigError
from everstep.exact.shard_guard import CORRECT, BorderHook, refuse_hooks
from everstep.exact.shard_region import RegionRule, SequencePieces, ShardedRegion
from everstep.exact.shard_sums import ShardMesh
from everstep.exact.shard_vocabulary import VocabularyEmbedding, VocabularyHead


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


def shard_model(model: nn.Module, plan: ShardPlan, mesh: ShardMesh) -> None:
    """Have the model compute by shards. Its parameters stay whole, under their names: `mesh.cuts` says how each is cut.

    Raises: ConfigError for what cannot be cut, naming it.
    """
    for name, module in model.named_modules():
        if any(isinstance(value, _WRAPPED) for value in vars(module).values()):
            raise ConfigError(
                f"cell.shards: {name} is wrapped already: expected a model that is not yet cut; call shard_model once"
            )
    matched = {rule.modules + rule.method: _matching(model, rule.modules) for rule in plan.regions}
    between = [name for pattern in plan.sequence.between for name in _matching(model, pattern)]
    lone = [name for name in (plan.embedding, plan.head, plan.sequence.enter, plan.sequence.leave) if name]
    for name in lone:
        _matching(model, name)
    _refuse_twice(plan, matched, between)
    for rule in plan.regions:
        for name in matched[rule.modules + rule.method]:
            owner = model.get_submodule(name)
            _put(owner, rule.method, ShardedRegion(name, owner, rule, mesh))
    if plan.embedding:
        owner = model.get_submodule(plan.embedding)
        _put(owner, "", VocabularyEmbedding(plan.embedding, owner, mesh))
    if plan.head:
        owner = model.get_submodule(plan.head)
        _put(owner, plan.head_method, VocabularyHead(plan.head, owner, mesh, plan.head_method))
    if mesh.sequence:
        _refuse_hooks_between(model, plan, [*between, *(name for names in matched.values() for name in names)])
        for name in between:
            owner = model.get_submodule(name)
            _put(owner, "", SequencePieces(name, owner, mesh))
        mesh.ends[:] = [model.get_submodule(plan.sequence.enter), model.get_submodule(plan.sequence.leave)]
        _hook(mesh.ends[0], mesh.enter_sequence)
        _hook(mesh.ends[1], mesh.leave_sequence)


def whole_at_borders(mesh: ShardMesh, units: Sequence[nn.Module], parts: Sequence[tuple[int, int]]) -> None:
    """Have whole sequences go from part to part of a model that is split. units: of the whole model, each of which
    takes and gives the hidden state, or a tuple that begins with it; parts: (first, stop) of those that are here."""
    if not mesh.ends:
        return
    enter, leave = (next(k for k, unit in enumerate(units) if end in [*unit.modules()]) for end in mesh.ends)
    for first, stop in parts:
        if enter < first <= leave:
            units[first].register_forward_pre_hook(BorderHook(mesh.enter_sequence))
        if enter < stop <= leave:
            units[stop - 1].register_forward_hook(BorderHook(mesh.leave_sequence, after=True))


def gather_gradients(model: nn.Module, mesh: ShardMesh) -> None:
    """Bring the gradients of a lane, of which each rank has its own shards, together at all of them. The model may be a
    stage."""
    by_name = dict(model.named_parameters(remove_duplicate=False))
    wanted = {id(by_name[name]): (by_name[name], cut) for name, cut in mesh.cuts.items() if name in by_name}
    for parameter, cut in wanted.values():
        gradient = parameter.grad
        if gradient is None:
            continue  # at all ranks alike
        found = mesh.gather(cut.take(gradient, mesh.mine, mesh.shards))
        for shard, one in enumerate(found):
            cut.put(one, gradient, shard, mesh.shards)


_WRAPPED = (ShardedRegion, SequencePieces, VocabularyEmbedding, VocabularyHead)


def _put(owner: nn.Module, method: str, made: Callable[..., Any]) -> None:
    """Put `made` in the place of a module's method, "": of its forward pass."""
    vars(owner)[method or "forward"] = made


def _inside(rule: RegionRule) -> tuple[str, ...]:
    return (*rule.column, *rule.row, *rule.after) if rule.method else ()


def _hook(module: nn.Module, act: Any) -> None:
    """Have the module's first argument go through `act` before its forward pass."""

    def change(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (act(args[0]), *args[1:]), named
        first = next(iter(named))
        return args, {**named, first: act(named[first])}

    module.register_forward_pre_hook(change, with_kwargs=True)


def _refuse_hooks_between(model: nn.Module, plan: ShardPlan, names: Sequence[str]) -> None:
    """Modules around those that are cut see parts of the sequence. Raises: ConfigError naming one with a hook."""
    around = {name.rpartition(".")[0] for name in names} | {plan.sequence.enter, plan.sequence.leave}
    for name in sorted(around - {""}):
        module = model.get_submodule(name)
        refuse_hooks(name, module)
        if "forward" in vars(module) and not isinstance(vars(module)["forward"], _WRAPPED):
            raise ConfigError(f"cell.sp: {name} has a forward pass of its own, which would see parts of the sequence")


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
        raise ConfigError(
            f"cell.shards: the plan names {pattern}, but the model has no such module: expected a name as of "
            f"model.named_modules(); {CORRECT}"
        )
    return found


def _refuse_twice(plan: ShardPlan, matched: Mapping[str, list[str]], between: Sequence[str]) -> None:
    """Raises: ConfigError for a module that two rules wrap, or one inside another."""
    taken = [name for name in (*between, plan.embedding, "" if plan.head_method else plan.head) if name]
    for rule in plan.regions:
        for name in matched[rule.modules + rule.method]:
            taken += [f"{name}.{layer}" for layer in _inside(rule)] if rule.method else [name]
            both = [f"{name}.{layer}" for layer in rule.column if layer in rule.row]
            taken += [layer for layer in both for _ in range(2)]
    for k, name in enumerate(taken):
        for other in taken[k + 1 :]:
            if name == other or name.startswith(f"{other}.") or other.startswith(f"{name}."):
                inner = max(name, other, key=len)
                raise ConfigError(f"cell.shards: the plan wraps {inner} twice: expected one rule for it; {CORRECT}")
