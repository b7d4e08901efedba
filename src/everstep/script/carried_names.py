"""Names that a loop carries from one round to the next and that training depends on, found in its code.

The loop that iterates over the job is read once, with the user's functions that it calls and the code that makes its
samples. A name that is read before it is written, and written, is carried; if training depends on it, it must be state.
"""

from __future__ import annotations

import functools
import io
import itertools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizers
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import IterableDataset

from everstep.data.reading import reading_of
from everstep.exact.attributes import plain
from everstep.exact.extra_state import has_extra_state
from everstep.exact.several import optimizers_of, with_inner
from everstep.script.flow_calls import BesideLoop, Calls
from everstep.script.flow_functions import Functions, method_of, unwrapped
from everstep.script.flow_items import ContainerItems
from everstep.script.flow_memory import (
    LEADER,
    Judge,
    Origin,
    RoundMemory,
    Value,
    counts_batches,
    is_harmless_beside,
    is_set_anew,
    recalls,
    remembers,
)
from everstep.script.flow_reader import Reader, Scope
from everstep.script.flow_sources import SyntaxTrees
from everstep.script.flow_syntax import SYNTAX
from everstep.script.reachable import GENERATORS, kind_of, of_user, storage_of, users_class, variables
from everstep.script.restarts import like_parameters

_BY_INDEX = ("__getitem__", "__getitems__", "__call__")
_SAMPLING = (*_BY_INDEX, "__iter__", "__next__")
_DEEP, _WIDE = 3, 16
_MOST_SAMPLED, _MOST_OF_A_KIND = 8_192, 4
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_UNSAMPLED = (*_PLAIN, type, types.ModuleType, Optimizer, LRScheduler)
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
    names, sources = _names(variables(frames)), SyntaxTrees()

    def rounds(reader: Reader, calls: Calls) -> None:
        loops = [(frame, loop) for frame in frames if (loop := sources.loop(frame)) is not None]
        for frame, loop in loops:
            with reader.memory.reading(frame.f_code.co_filename, loop.lineno):
                _read_round(reader, loop, frame)
        if not loops:
            reader.notes.append("the source of the loop")

    keyed = [(frame, id(frame)) for frame in frames if frame.f_code.co_name != "<module>"]
    memory, notes = _read_code(rounds, keyed, trained, names, sources)
    loaded = {path for frame in frames for path in sources.loaded_before(frame)}
    return _verdict(memory, names, trained, notes, loaded)


def read_task(task: Any, trained: Trained) -> Read:
    """Read what is done in each step of a task: for its batches, and in its update."""
    names = _names((("task", task), ("model", trained.model), ("dataset", trained.dataset)))
    loss = method_of(type(task), "loss")

    def step(reader: Reader, calls: Calls) -> None:
        memory = reader.memory
        with memory.reading(loss.__code__.co_filename, loss.__code__.co_firstlineno, each="beside"):
            for _ in range(2):
                memory.stores.clear()  # what the first batch has put back counts nothing
                memory.sinks.clear()
                calls.train_on_batch(loss, [memory.live(task, "task"), memory.live(trained.model, "model")])
            calls.updated()

    sources = SyntaxTrees()
    if loss is None or sources.function(unwrapped(loss).__code__) is None:
        return Read(notes=("the source of its loss",))
    memory, notes = _read_code(step, (), trained, names, sources)
    return _verdict(memory, names, trained, notes, None)


def _read_code(
    act: Callable[[Reader, Calls], None],
    keyed: Sequence[tuple[types.FrameType, Any]],
    trained: Trained,
    names: Mapping[int, str],
    sources: SyntaxTrees,
) -> tuple[RoundMemory, tuple[str, ...]]:
    memory = RoundMemory(_judge(trained))
    for _ in range(2):
        reader = Reader(memory, sources, SYNTAX)
        calls = Calls(reader, _beside_loop(trained, names), Functions(reader, _users_modules, keyed))
        reader.ask(calls)
        act(reader, calls)
        if not memory.items.grew:
            break
        memory = RoundMemory(memory.judge, items=ContainerItems(memory.items.known))
    return reader.memory, tuple(dict.fromkeys(reader.notes))


def _names(variables: Iterable[tuple[str, Any]]) -> dict[int, str]:
    """Names of objects, and of their contents, in code that knows these variables."""
    found: dict[int, str] = {}
    layer = [(name, thing) for name, thing in variables if not isinstance(thing, _PLAIN)]
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
    memory: RoundMemory, names: Mapping[int, str], trained: Trained, notes: tuple[str, ...], loaded: Set[str] | None
) -> Read:
    """Names that are carried. loaded: files that a script loads before its loop; None for a task."""
    reaching = memory.reaching()
    carried_ids = {id(thing) for thing in _within([*_carried(trained), *trained.ignored])}
    ignored = [given for given in trained.ignored if isinstance(given, str)]
    found: dict[str, tuple[str, str, str, int]] = {}
    harmless: dict[str, None] = {}
    for place, (file, line, _) in memory.written.items():
        if place[0] == "attr" and place[1] in memory.made:
            continue
        thing = memory.kept.get(place[1]) if place[0] in ("object", "attr") else None
        of_model = thing is not None and "trained" in memory.judge.flags(thing)
        if thing is not None and (id(thing) in carried_ids or of_model) and not _counts(memory, place, thing):
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
        harmless_here = (loaded is None or place[0] != "object") and is_harmless_beside(memory, place)
        if (needed and not harmless_here) or _is_average(place, thing, memory, trained):
            found.setdefault(title, (title, "forward" if of_model else _kind(place, thing), file, line))
        elif place == LEADER or of_model:
            continue
        elif place[0] == "file" and place[1] in (loaded or ()):
            found.setdefault(title, (title, "reread", file, line))
        else:
            harmless[title] = None
    return Read(tuple(found.values()), tuple(t for t in harmless if t not in found), notes)


def _counts(memory: RoundMemory, place: Origin, module: Any) -> bool:
    """Whether this is a plain attribute of a trained module with which its code counts on from batch to batch: what the
    loop sets is carried."""
    if not isinstance(module, nn.Module) or place[0] != "attr" or "trained" not in memory.judge.flags(module):
        return False
    stated = (module._parameters, module._buffers, module._modules, ("training",))
    if has_extra_state(module) or any(place[2] in names for names in stated):
        return False
    return counts_batches(memory, place) and not is_set_anew(memory, module, place[2])


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
    parts: list[Any] = with_inner(trained.scheduler)
    for member in optimizers_of(optimizer).values():
        parts += [member, member.param_groups, *member.param_groups, member.state]
    for module in model.modules():
        parts += [module, module._parameters, module._buffers, module._modules]
        parts += [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    ids = {id(part): part for part in parts if part is not None}
    storages = {storage_of(part) for part in ids.values() if isinstance(part, Tensor)}
    carried = {id(thing) for thing in _within(_carried(trained))}
    of_join = [trained.given, getattr(trained.given, "dataset", None), trained.dataset]
    of_join += [*with_inner(trained.scheduler), *optimizers_of(optimizer).values()]
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
    """Objects in `state=`, and attributes of a user's own optimizer, scalars aside."""
    own = plain(trained.optimizer).values()
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
    for thing in _sampled([trained.collate] if streamed else [dataset, trained.collate], trained):
        if thing is dataset or isinstance(thing, list | dict | Tensor | np.ndarray):
            data.append((names.get(id(thing), "dataset"), thing))
        by_index = hasattr(type(thing), "__getitem__") and not isinstance(thing, IterableDataset)
        found = _code_of(thing, names, "dataset", _BY_INDEX if by_index else _SAMPLING)
        samples += [one for one in found if sum(f is one[0] for f, _ in samples) < _MOST_OF_A_KIND]
    if users_class(type(dataset)) and not streamed:
        data = []  # its own code says what it reads
    of_all = [one for kind in _FORWARD for one in _functions(getattr(torch_modules, f"_global{kind}"), names)]
    forwards = {id(m): [*_hooks_of(m, _FORWARD, names), *of_all] for m in trained.model.modules()}
    limit = 4 * _WIDE
    hooks = [*_hooks(trained.model, names), *of_all]
    return BesideLoop(samples[:limit], hooks, _updates(trained, names), data[:limit], forwards)


def _sampled(things: Iterable[Any], trained: Trained) -> Iterator[Any]:
    """These objects and their contents: some levels of the user's objects, whose code tells the rest, and any of a
    library's around them."""
    known = {id(module) for module in trained.model.modules()}
    left = deque((thing, _DEEP) for thing in things)
    while left and len(known) < _MOST_SAMPLED:
        thing, levels = left.popleft()
        if id(thing) in known or isinstance(thing, _UNSAMPLED) or trained.is_run(thing):
            continue
        known.add(id(thing))
        yield thing
        inner: Iterable[Any] = ()
        if isinstance(thing, dict | list | tuple):
            inner = thing.values() if isinstance(thing, dict) else thing
        elif isinstance(thing, functools.partial):
            inner = (*thing.args, *thing.keywords.values())
        elif isinstance(thing, types.MethodType):
            inner = () if users_class(type(thing.__self__)) else (thing.__self__,)  # the user's own code is read
        elif not isinstance(thing, Tensor | np.ndarray | types.FunctionType):
            levels -= users_class(type(thing))
            own = vars(nn.Module()) if isinstance(thing, nn.Module) else {}
            inner = [v for k, v in getattr(thing, "__dict__", {}).items() if k not in own or k == "_modules"]
        if levels > 0:
            left += [(one, levels) for one in itertools.islice(inner, _WIDE)]


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
    found: list[Any] = []
    for member in optimizers_of(trained.optimizer).values():
        hooks = [getattr(member, kind, None) for kind in _UPDATE_HOOKS]
        hooks += [torch_optimizers._global_optimizer_pre_hooks, torch_optimizers._global_optimizer_post_hooks]
        known = ("optimizer", member)
        found += [(f, (*given, known)) for held in hooks for f, given in _functions(held, names)]
        found += [(f, (known,)) for f in _methods(member, ("step",))]
    schedulers = with_inner(trained.scheduler)
    for scheduler in schedulers:
        found += [(f, (("scheduler", scheduler),)) for f in _methods(scheduler, ("get_lr", "step"))]
    carried = list(_within(trained.carried))
    for thing in (*schedulers, *(s for one in carried if isinstance(one, LRScheduler) for s in with_inner(one))):
        found += _functions(dict(enumerate(getattr(thing, "lr_lambdas", []))), names)
    averages = [one for one in carried if isinstance(one, AveragedModel)]
    held = [f for one in averages for f in (getattr(one, "avg_fn", None), getattr(one, "multi_avg_fn", None))]
    return found + _functions(dict(enumerate(held)), names)


def _functions(hooks: Any, names: Mapping[int, str]) -> list[Any]:
    found: list[Any] = []
    for hook in list((hooks or {}).values()):
        found += _code_of(hook[0] if isinstance(hook, tuple) else hook, names, "hook", ("__call__",))
    return found


def _code_of(thing: Any, names: Mapping[int, str], title: str, methods: Sequence[str]) -> list[Any]:
    """The user's functions that run if this is called, with their first arguments. methods: of other objects."""
    if isinstance(thing, functools.partial):
        return [(thing, ())]
    if isinstance(thing, types.FunctionType):
        return [(thing, ())] if of_user(thing.__code__.co_filename) else []
    if isinstance(thing, types.MethodType):
        inner = thing.__func__ if isinstance(thing.__func__, types.FunctionType) else None
        own = ((names.get(id(thing.__self__), title), thing.__self__),)
        return [(inner, own)] if inner is not None and of_user(inner.__code__.co_filename) else []
    wanted = (*methods, "forward") if isinstance(thing, nn.Module) else methods
    own = ((names.get(id(thing), title), thing),)
    return [(f, own) for f in _methods(thing, wanted)] if users_class(type(thing)) else []
