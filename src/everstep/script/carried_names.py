"""Names that a loop carries from one round to the next and that training depends on, found in its code.

The loop that iterates over the job is read once, with the user's functions that it calls and the code that makes its
samples. A name that is read before it is written, and written, is carried; if training depends on it, it must be state.
"""

from __future__ import annotations

import functools
import io
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everstep.data.reading import reading_of
from everstep.exact.attributes import storage_of
from everstep.exact.beside_state import kept_beside
from everstep.exact.several import optimizers_of, schedulers_of
from everstep.script.flow_calls import BesideLoop, Calls
from everstep.script.flow_functions import Functions, unwrapped
from everstep.script.flow_items import ContainerItems
from everstep.script.flow_memory import LEADER, Judge, Origin, RoundMemory, Value, recalls, remembers
from everstep.script.flow_reader import Reader, Scope
from everstep.script.flow_sources import SyntaxTrees
from everstep.script.flow_syntax import SYNTAX
from everstep.script.reachable import GENERATORS, kind_of, of_user, users_class, variables
from everstep.script.restarts import like_parameters

_SAMPLING = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__")
_DEEP, _WIDE = 3, 16
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_FORWARD = ("_forward_pre_hooks", "_forward_hooks")
_HOOKS = (
    *(*_FORWARD, "_backward_hooks", "_backward_pre_hooks"),
    "_post_accumulate_grad_hooks",
)
_UPDATE_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


_RUN = str(Path(__file__).parents[1] / "train" / "run.py")


def is_run(thing: Any) -> bool:
    """Whether this is a job that is iterated over, directly or by its iterator."""
    if isinstance(thing, types.GeneratorType):
        return thing.gi_code.co_filename == _RUN and thing.gi_code.co_name == "_steps"
    return type(thing).__module__ == "everstep.train.run" and type(thing).__name__ == "Run"


@dataclass(frozen=True)
class Trained:
    """Arguments of `join`. carried: the objects in `state=`, with their contents. is_run: whether an object is the
    iterated job. ignored: as in join. given: the data as join has got them, such as a loader of the dataset."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    carried: Sequence[Any]
    dataset: Any
    collate: Any
    is_run: Callable[[Any], bool]
    ignored: Sequence[Any] = ()
    given: Any = None


@dataclass(frozen=True)
class Read:
    """Result of reading the code. carried: names that must be state, with their kind (carried, iterator, generator,
    cache, file, reread, count, leader, given) and the place of their first write; harmless: names that change without
    an effect on training; notes: things that could not be followed."""

    carried: tuple[tuple[str, str, str, int], ...] = ()
    harmless: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_loop(frames: Sequence[types.FrameType], trained: Trained) -> Read:
    """Read the round of the loop that these frames are in, the innermost first."""
    names, sources = _names(frames), SyntaxTrees()
    memory, notes = _read_code(frames, trained, names, sources, RoundMemory(_judge(trained)))
    if memory.items.grew:
        again = RoundMemory(memory.judge, items=ContainerItems(memory.items.known))
        memory, notes = _read_code(frames, trained, names, sources, again)
    loaded = {path for frame in frames for path in sources.loaded_before(frame)}
    return _verdict(memory, names, trained, tuple(dict.fromkeys(notes)), loaded)


def _read_code(
    frames: Sequence[types.FrameType],
    trained: Trained,
    names: Mapping[int, str],
    sources: SyntaxTrees,
    memory: RoundMemory,
) -> tuple[RoundMemory, list[str]]:
    reader = Reader(memory, sources, SYNTAX)
    keyed = [(frame, id(frame)) for frame in frames if frame.f_code.co_name != "<module>"]
    reader.ask(Calls(reader, _beside_loop(trained, names), Functions(reader, _users_modules, keyed)))
    seen = False
    for frame in frames:
        loop = sources.loop(frame)
        if loop is None:
            continue
        seen = True
        with memory.reading(frame.f_code.co_filename, loop.lineno):
            _read_round(reader, loop, frame)
    if not seen:
        reader.notes.append("the source of the loop")
    return memory, reader.notes


def _names(frames: Sequence[types.FrameType]) -> dict[int, str]:
    """Names of objects, and of their contents, in the code of these frames."""
    found: dict[int, str] = {}
    layer = [(name, thing) for name, thing in variables(frames) if not isinstance(thing, _PLAIN)]
    for _ in range(_DEEP):
        inner = []
        for name, thing in layer:
            if id(thing) not in found:
                found[id(thing)] = name
                if users_class(type(thing)) and not isinstance(thing, type):
                    inner += [(f"{name}.{k}", v) for k, v in list(getattr(thing, "__dict__", {}).items())[:_WIDE]]
        layer = [(name, thing) for name, thing in inner if not isinstance(thing, _PLAIN)]
    return found


def _read_round(reader: Reader, loop: Any, frame: types.FrameType) -> None:
    memory, code = reader.memory, frame.f_code
    scope = Scope(None, frame.f_globals, lasting=True, is_round=True)
    if code.co_name != "<module>":
        own = frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars))
        scope = replace(scope, key=id(frame), own=own, live=dict(frame.f_locals))
    if hasattr(loop, "iter"):
        over = reader.value(loop.iter, scope)
        each = reader.each(over, loop.iter)
        trains = "run" in over.flags or "step" in each.flags
        scope = replace(scope, is_round=trains)
        reader.store(loop.target, _counted(memory, each, loop) if trains else each, scope)
    else:
        with memory.under(memory.use(reader.value(loop.test, scope))):
            memory.sink(())
    for name, leads in reader.sources.set_before(frame, "is_main"):
        place, now = scope.place(name)
        if isinstance(now, bool | int | float | complex | str):  # an object with such a setting is read as it is
            memory.values[place] = Value(memory.use(reader.value(leads, scope)), title=name)
    reader.block(loop.body, scope)


def _counted(memory: RoundMemory, each: Value, loop: Any) -> Value:
    """Note that counters beside the job's steps (`enumerate`, `zip`) start over with the loop."""
    if each.items is None:
        return each
    items = []
    for k, item in enumerate(each.items):
        if "step" not in item.flags:
            targets = getattr(loop.target, "elts", [])
            title = getattr(targets[k], "id", "") if k < len(targets) else ""
            place = ("count", loop.lineno, k)
            memory.read(place, None, title)
            memory.write(place, Value(frozenset((place,))), title=title, strong=False)
            item = item.with_deps((place,))
        items.append(item)
    return Value(items=tuple(items))


def _verdict(
    memory: RoundMemory, names: Mapping[int, str], trained: Trained, notes: tuple[str, ...], loaded: Set[str]
) -> Read:
    reaching = memory.reaching()
    carried_ids = {id(thing) for thing in _within([*_carried(trained), *trained.ignored])}
    ignored = [given for given in trained.ignored if isinstance(given, str)]
    found: dict[str, tuple[str, str, str, int]] = {}
    harmless: dict[str, None] = {}
    for place, (file, line) in memory.written.items():
        if place[0] == "attr" and place[1] in memory.made:
            continue
        thing = memory.kept.get(place[1]) if place[0] in ("object", "attr") else None
        if thing is not None and (id(thing) in carried_ids or "trained" in memory.judge.flags(thing)):
            continue
        title = _title(place, memory, names)
        if any(title == given or title.startswith((f"{given}.", f"{given}[")) for given in ignored):
            continue
        if ("given", place) in memory.sinks:
            found.setdefault(title, (title, "given", file, line))
            continue
        needed = ("if", place) in reaching or (
            place in reaching and not (remembers(memory, place) and recalls(memory, place, reaching))
        )
        if needed or _is_average(place, thing, memory, trained):
            found.setdefault(title, (title, _kind(place, thing), file, line))
        elif place == LEADER:
            continue
        elif place[0] == "file" and place[1] in loaded:
            found.setdefault(title, (title, "reread", file, line))
        else:
            harmless[title] = None
    return Read(tuple(found.values()), tuple(t for t in harmless if t not in found), notes)


def _kind(place: Origin, thing: Any) -> str:
    if place[0] in ("file", "count", "leader"):
        return str(place[0])
    if isinstance(thing, GENERATORS):
        return "generator"
    if isinstance(thing, functools._lru_cache_wrapper):
        return "cache"
    return "iterator" if place[0] == "object" and _iterates(thing) else "carried"


def _title(place: Origin, memory: RoundMemory, names: Mapping[int, str]) -> str:
    if place[0] == "object" and place[1] in names:
        return names[place[1]]
    if place[0] == "attr" and place[1] in names:
        return f"{names[place[1]]}.{place[2]}"
    title = memory.titles.get(place) or str(place[-1])
    if place[0] == "name" and isinstance(place[1], tuple) and place[1][0] == "cell":
        owner = names.get(memory.owners.get(place[1][1], 0))
        return f"{owner}.{title}" if owner else title
    return title.split("[")[0] if place[0] == "object" else title


def _is_average(place: Origin, thing: Any, memory: RoundMemory, trained: Trained) -> bool:
    """Whether it is a copy of trained values that is kept up to date, or another object with such a state."""
    if remembers(memory, place) or (place[0] == "file"):
        return False
    if place[0] == "object":
        return place in memory.copies or looks_trained(thing, trained.model)
    own = place in memory.values and place in memory.values[place].deps
    return place in memory.copies and own


def looks_trained(thing: Any, model: nn.Module) -> bool:
    """Whether this is a module, an optimizer, a scheduler, or as many tensors as a copy of the model has."""
    if kind_of(thing) in ("module", "optimizer", "scheduler"):
        return True
    inner = [thing] if isinstance(thing, Tensor) else list(thing.values()) if isinstance(thing, dict) else thing
    tensors = [t for t in inner if isinstance(t, Tensor)] if isinstance(inner, list | tuple) else []
    shapes = [tuple(t.shape) for t in tensors if t.is_floating_point()]
    return bool(shapes) and like_parameters(shapes, [tuple(p.shape) for p in model.parameters()])


# ---- kinds of objects


def _judge(trained: Trained) -> Judge:
    model, optimizer = trained.model, trained.optimizer
    parts: list[Any] = schedulers_of(trained.scheduler)[:]
    for member in optimizers_of(optimizer).values():
        parts += [member, member.param_groups, *member.param_groups, member.state]
    for module in model.modules():
        parts += [module, module._parameters, module._buffers, module._modules]
        parts += [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    ids = {id(part): part for part in parts if part is not None}
    storages = {storage_of(part) for part in ids.values() if isinstance(part, Tensor)}
    carried = {id(thing) for thing in _within(_carried(trained))}
    of_join = [trained.given, getattr(trained.given, "dataset", None), trained.dataset]
    of_join += [*schedulers_of(trained.scheduler), *optimizers_of(optimizer).values()]
    given = {id(thing) for thing in of_join if thing is not None}
    nothing: frozenset[str] = frozenset()

    def is_trained(thing: Any) -> bool:
        return id(thing) in ids or (isinstance(thing, Tensor) and storage_of(thing) in storages)

    def flags(thing: Any) -> frozenset[str]:
        found = nothing
        if trained.is_run(thing):
            return frozenset(("run",))
        if is_trained(thing) or _are_all(thing, is_trained):
            found |= {"trained"}
        if id(thing) in carried:
            found |= {"carried"}
        if id(thing) in given:
            found |= {"given"}
        if isinstance(thing, type) and issubclass(thing, nn.Module | Optimizer | LRScheduler):
            found |= {"copies"}
        elif isinstance(thing, Optimizer | LRScheduler):
            found |= {"drives"}
        elif isinstance(thing, (*GENERATORS, io.IOBase)) or _iterates(thing):
            found |= {"restless"}
        return found

    def users(thing: Any) -> bool:
        if isinstance(thing, types.FunctionType):
            return of_user(thing.__code__.co_filename)
        return users_class(thing if isinstance(thing, type) else type(thing))

    return Judge(flags, users)


def _carried(trained: Trained) -> list[Any]:
    """Objects in `state=`, and what is carried beside the state of these and of the optimizer, scalars aside."""
    own = (value for thing in (trained.optimizer, *trained.carried) for value in kept_beside(thing))
    return [*trained.carried, *(value for value in own if not isinstance(value, _PLAIN))]


def _are_all(thing: Any, test: Callable[[Any], bool]) -> bool:
    """Whether this is a container all of whose elements pass the test, as far as one looks."""
    inner = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else ()
    return len(inner) > 0 and all(test(one) for one in itertools.islice(inner, _WIDE))


def _iterates(thing: Any) -> bool:
    return hasattr(type(thing), "__next__") and not isinstance(thing, Tensor)


def _within(things: Iterable[Any]) -> Iterator[Any]:
    """These objects, and their contents."""
    layer = list(things)
    for _ in range(_DEEP):
        yield from layer
        inner: list[Any] = []
        for thing in layer:
            if isinstance(thing, dict):
                inner += list(thing.values())[:_WIDE]
            elif isinstance(thing, list | tuple):
                inner += list(thing)[:_WIDE]
            elif isinstance(thing, nn.Module):
                inner += [*thing.modules(), *thing.parameters(), *thing.buffers()]
                inner += [part for m in thing.modules() for part in (m._modules, m._parameters, m._buffers)]
            elif isinstance(thing, Optimizer):
                inner += [thing.param_groups, thing.state]
            elif not isinstance(thing, Tensor | np.ndarray | str):
                inner += list(getattr(thing, "__dict__", {}).values())[:_WIDE]
        layer = inner
    yield from layer


def _users_modules(thing: Any) -> list[Any]:
    return [m for m in thing.modules() if users_class(type(m))] if isinstance(thing, nn.Module) else []


# ---- code that runs beside the loop


def _beside_loop(trained: Trained, names: Mapping[int, str]) -> BesideLoop:
    samples: list[Any] = []
    data: list[Any] = []
    dataset = trained.dataset
    streamed = callable(getattr(dataset, "__iter__", None)) and reading_of(dataset).streamed
    if streamed:  # what reading it changes is put back with its place, or is its reader's own
        data.append((names.get(id(dataset), "dataset"), dataset))
    for thing in _within([trained.collate] if streamed else [dataset, trained.collate]):
        title = names.get(id(thing), "dataset")
        if isinstance(thing, types.FunctionType) and of_user(thing.__code__.co_filename):
            samples.append((thing, ()))
        elif users_class(type(thing)) and not isinstance(thing, nn.Module):
            samples += [(f, ((title, thing),)) for f in _methods(thing, _SAMPLING)]
        elif thing is dataset or isinstance(thing, list | dict | Tensor | np.ndarray):
            data.append((title, thing))
        if len(data) + len(samples) > 4 * _WIDE:
            break
    if users_class(type(dataset)) and not streamed:
        data = []  # its own code says what it reads
    forwards = {id(m): _hooks_of(m, _FORWARD, names) for m in trained.model.modules()}
    return BesideLoop(samples, _hooks(trained.model, names), _updates(trained, names), data, forwards)


def _methods(thing: Any, wanted: Iterable[str]) -> Iterator[types.FunctionType]:
    for name in wanted:
        for kind in type(thing).__mro__:
            found = vars(kind).get(name)
            found = unwrapped(found)
            if isinstance(found, types.FunctionType) and of_user(found.__code__.co_filename):
                yield found
                break


def _hooks(model: nn.Module, names: Mapping[int, str]) -> list[Any]:
    return [one for thing in (*model.modules(), *model.parameters()) for one in _hooks_of(thing, _HOOKS, names)]


def _hooks_of(thing: Any, kinds: Iterable[str], names: Mapping[int, str]) -> list[Any]:
    return [one for kind in kinds for one in _functions(getattr(thing, kind, None), names)]


def _updates(trained: Trained, names: Mapping[int, str]) -> list[Any]:
    found = [
        one for attribute in _UPDATE_HOOKS for one in _functions(getattr(trained.optimizer, attribute, None), names)
    ]
    for scheduler in schedulers_of(trained.scheduler):
        found += _functions(dict(enumerate(getattr(scheduler, "lr_lambdas", []))), names)
        found += [(f, (("scheduler", scheduler),)) for f in _methods(scheduler, ("get_lr", "step"))]
    members = optimizers_of(trained.optimizer).values()
    return found + [(f, (("optimizer", member),)) for member in members for f in _methods(member, ("step",))]


def _functions(hooks: Any, names: Mapping[int, str]) -> list[Any]:
    found: list[Any] = []
    for hook in list((hooks or {}).values()):
        hook = hook[0] if isinstance(hook, tuple) else hook
        if isinstance(hook, types.FunctionType) and of_user(hook.__code__.co_filename):
            found.append((hook, ()))
        elif isinstance(hook, types.MethodType) and of_user(hook.__func__.__code__.co_filename):
            found.append((hook.__func__, ((names.get(id(hook.__self__), "hook"), hook.__self__),)))
        elif not isinstance(hook, types.FunctionType) and users_class(type(hook)):
            found += [(f, ((names.get(id(hook), "hook"), hook),)) for f in _methods(hook, ("__call__",))]
    return found
