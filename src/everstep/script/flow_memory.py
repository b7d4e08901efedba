"""Facts of a loop while one round of it is read: places, their dependences, and those that reach training.

A place is something that outlives the round: a variable, an attribute of an object, or an object's content. At the
beginning of the round each place depends on itself alone; so a value that depends on a place at the end depends on the
content before. Pure: no code of the user's is run; live objects are only told apart, and their attributes looked up.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from everstep.script.flow_items import MISSING, ContainerItems, KeysDone
from everstep.script.reachable import users_class

Origin = tuple[Any, ...]
"""("name", scope, NAME), ("attr", id, NAME), ("object", id), ("item", id, KEY), ("file", PATH), ("count", LINE, N); or
something that varies without being a place: ("step",), ("random",), ("trained",), ("arg", ...), ("leader",), which
varies between workers; ("if", PLACE):
decisions of that place; ("given", PLACE): something else takes the place of what `join` has read; ("read", PLACE,
KEYS): what a read finds in a container: the entry under these keys, or, KEYS being None, all. An item is a place only
after it was set in this round."""

STEP, RANDOM, TRAINED, LEADER = ("step",), ("random",), ("trained",), ("leader",)
_VARYING = ("step", "random", "trained", "arg")
SCALARS = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, types.FunctionType)
_INNER = ("_modules", "_parameters", "_buffers")
_MOST = 64
NOTHING: frozenset[Origin] = frozenset()
CHOSEN = frozenset(("chosen",))
"""Flag of a function that is one of several."""


@dataclass(frozen=True, eq=False)
class Value:
    """Possible values of an expression. deps: places that it depends on. objects: live objects that it may be. homes:
    places that change with it if it is changed in place. flags: run, step, trained, copy (of trained values). items: of
    a tuple; element: of an iterable; codes: of functions in the code itself. key: the one place whose bare value it is.
    title: its name for a person."""

    deps: frozenset[Origin] = NOTHING
    objects: tuple[Any, ...] = ()
    homes: frozenset[Origin] = NOTHING
    flags: frozenset[str] = frozenset()
    items: tuple[Value, ...] | None = None
    element: Value | None = None
    codes: tuple[Any, ...] = ()
    key: frozenset[Origin] | None = None
    title: str = ""

    def with_deps(self, deps: Iterable[Origin]) -> Value:
        more = frozenset(deps) - self.deps
        return replace(self, deps=normal(self.deps | more), key=self.key if not more else None) if more else self


def normal(deps: frozenset[Origin]) -> frozenset[Origin]:
    """Drop decisions of values that are dependences anyway: a dependence on a value includes its decisions."""
    dropped = {d for d in deps if d[0] == "if" and d[1] in deps}
    return deps - dropped if dropped else deps


def decided(deps: Iterable[Origin]) -> frozenset[Origin]:
    """Dependences of an act under a condition that depends on these."""
    return frozenset(d if d[0] == "if" else ("if", d) for d in deps)


def joined(values: Iterable[Value]) -> Value:
    """A value that may be any of these."""
    values = list(values)
    if len(values) == 1:
        return values[0]
    objects: dict[int, Any] = {id(o): o for v in values for o in v.objects}
    sizes = {len(v.items) if v.items is not None else -1 for v in values}
    items = None
    if len(sizes) == 1 and -1 not in sizes:
        items = tuple(joined(column) for column in zip(*(v.items or () for v in values), strict=True))
    elements = [v.element for v in values if v.element is not None]
    codes = {id(code): code for v in values for code in v.codes}
    return Value(
        normal(frozenset().union(*(v.deps for v in values))),
        tuple(list(objects.values())[:_MOST]),
        frozenset().union(*(v.homes for v in values)),
        frozenset().union(*(v.flags for v in values)),
        items,
        joined(elements) if elements else None,
        tuple(codes.values()),
        None,
        next((v.title for v in values if v.title), ""),
    )


@dataclass(frozen=True)
class Judge:
    """Facts of live objects. flags: run, trained, carried, given (join has read it), restless (any method changes it),
    drives (its arguments change trained values), copies (a class whose objects copy). of_user: whether the class is the
    user's."""

    flags: Callable[[Any], frozenset[str]]
    of_user: Callable[[Any], bool]


@dataclass(frozen=True)
class WrittenOnce:
    """A write: dependences of the value, and keys under which it was written. each: "batch" in code for each batch,
    "beside" in code that makes samples or is a task's."""

    deps: frozenset[Origin]
    keys: frozenset[Origin]
    each: str = ""


Point = tuple[dict[Origin, Value], KeysDone]
"""Values of all places, and the items that have been set, at one point of the round."""


@dataclass
class Attempt:
    """A `try`. raised: dependences of whether its own code raises, so that the rest is not done; surprised: dependences
    of whether other code may raise."""

    raised: frozenset[Origin] = NOTHING
    surprised: frozenset[Origin] = NOTHING

    def note(self, deps: frozenset[Origin], surely: bool) -> None:
        """Add dependences. surely: the code itself raises."""
        if surely:
            self.raised |= deps
        else:
            self.surprised |= deps


@dataclass
class RoundMemory:
    """All places. at: file and line, and `each` of writes here; written: by place, where it is first
    written; stores: all writes, and attributes by their class, where they are set. copies: places that came to
    hold a copy of trained values. sinks: places that training was found to depend on. control: dependences of whether
    the present statement is done. kept: live objects by id; made: stand-ins for objects that are made in the round.
    owners: by cell of a closure, its function."""

    judge: Judge
    values: dict[Origin, Value] = field(default_factory=dict)
    written: dict[Origin, tuple[str, int, str]] = field(default_factory=dict)
    stores: dict[Origin, list[WrittenOnce]] = field(default_factory=dict)
    titles: dict[Origin, str] = field(default_factory=dict)
    copies: set[Origin] = field(default_factory=set)
    sinks: set[Origin] = field(default_factory=set)
    control: frozenset[Origin] = NOTHING
    at: tuple[str, int, str] = ("", 0, "")
    kept: dict[int, Any] = field(default_factory=dict)
    made: dict[int, Any] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)
    items: ContainerItems = field(default_factory=ContainerItems)
    _attempts: list[Attempt] = field(default_factory=list)
    _set: dict[int, set[Origin]] = field(default_factory=dict)

    # ---- reading

    def live(self, thing: Any, title: str, deps: frozenset[Origin] = NOTHING) -> Value:
        if thing is MISSING:
            return Value(deps, title=title)
        self.kept[id(thing)] = thing
        return Value(deps, (thing,), flags=self.judge.flags(thing) - {"carried", "restless", "given"}, title=title)

    def read(self, place: Origin, thing: Any, title: str) -> Value:
        """Value of a place. thing: its content at the beginning of the round."""
        self.titles.setdefault(place, title)
        if place not in self.values:
            self.values[place] = replace(self.live(thing, title, frozenset((place,))), key=frozenset((place,)))
        return self.values[place]

    def contents(self, thing: Any) -> frozenset[Origin]:
        """Dependences of an object's content."""
        if isinstance(thing, SCALARS):
            return NOTHING
        place = ("object", id(thing))
        found = self.values[place].deps if place in self.values else frozenset((place,))
        found |= {("read", place, None)}
        if (base := _beneath(thing)) is not None:
            found |= self.contents(base)
        told = {inner for inner in self._set.get(id(thing), ()) if not _is_code_read(self.judge, thing, inner[2])}
        found = found.union(*(self.values[inner].deps for inner in told if inner in self.values))
        names = getattr(thing, "__dict__", None)
        if isinstance(names, dict) and self.judge.of_user(thing) and "trained" not in self.judge.flags(thing):
            for name in list(names)[:_MOST]:
                inner = ("attr", id(thing), name)
                found |= self.values[inner].deps if inner in self.values else {inner}
        return found

    def fields(self, thing: Any, title: str) -> frozenset[Origin]:
        """Dependences of an object's attributes, which its own code may use without being read."""
        own = getattr(thing, "__dict__", {})
        if isinstance(thing, SCALARS) or "trained" in self.judge.flags(thing):
            return NOTHING
        pairs = [pair for inner in (own, *(own.get(k) for k in _INNER)) for pair in dict(inner or {}).items()][:_MOST]
        found = NOTHING
        for name, value in pairs:
            found |= self.read(("attr", id(thing), name), value, f"{title}.{name}").deps | self.contents(value)
        return found

    def use(self, value: Value) -> frozenset[Origin]:
        """Everything that a computation with the value depends on."""
        found = value.deps.union(*(self.contents(thing) for thing in value.objects))
        found = found.union(*(self.values[h].deps for h in value.homes if h in self.values))
        for inner in (*(value.items or ()), *([value.element] if value.element is not None else ())):
            found |= self.use(inner)
        return found | {TRAINED} if "trained" in value.flags else found

    def attribute(self, thing: Any, name: str) -> tuple[Origin, Any]:
        """Place and value of an attribute of a live object; MISSING if there is none."""
        self.kept[id(thing)] = thing
        if isinstance(thing, types.ModuleType):
            return ("name", id(vars(thing)), name), vars(thing).get(name, MISSING)
        own = getattr(thing, "__dict__", {})
        if name in own:
            return ("attr", id(thing), name), own[name]
        for inner in _INNER:
            if isinstance(own.get(inner), dict) and name in own[inner]:
                return ("attr", id(thing), name), own[inner][name]
        for kind in thing.__mro__ if isinstance(thing, type) else type(thing).__mro__:
            found = vars(kind).get(name, MISSING)
            if found is MISSING:
                continue
            if isinstance(found, types.MemberDescriptorType):
                return ("attr", id(thing), name), getattr(thing, name, MISSING)
            if callable(found) or hasattr(type(found), "__get__") or isinstance(thing, type):
                self.kept[id(kind)] = kind
                return ("attr", id(kind), name), found
            place, shared = ("attr", id(thing), name), ("attr", id(kind), name)
            if place not in self.values:  # of the class, until the object has its own
                self.kept[id(kind)] = kind
                self.values[place] = self.live(found, "", frozenset((place, shared)))
            return place, found
        return ("attr", id(thing), name), MISSING

    # ---- writing

    def write(self, place: Origin, value: Value, *, title: str = "", strong: bool = True, keys: Any = NOTHING) -> None:
        """Write a value to a place. strong: it replaces the content."""
        self.titles.setdefault(place, title)
        self.written.setdefault(place, self.at)
        if place[0] == "attr":
            self._set.setdefault(place[1], set()).add(place)
        deps = self.use(value) if not strong or place[0] != "name" else value.deps
        found = normal(self.use(value) | self.control)
        self.stores.setdefault(place, []).append(WrittenOnce(found, frozenset(keys), self.at[2]))
        value = value.with_deps(deps | self.control)
        if not strong:
            before = self.values.get(place, Value(frozenset((place,))))
            value = joined([before, value]) if place[0] != "object" else before.with_deps(value.deps)
        if "copy" in value.flags:
            self.copies.add(place)
        own = bool(value.title and (value.objects or value.homes))
        kept = normal(value.deps) - {("if", ("read", place, None))}  # a limit of its size says nothing of its entries
        self.values[place] = replace(value, deps=kept, title=value.title if own else title)

    def mutate(
        self,
        value: Value,
        given: Value,
        *,
        keys: Iterable[Origin] = NOTHING,
        sets: bool = False,
        forgets: bool = False,
        whole: bool = True,
    ) -> None:
        """Note a change in place. sets: the old content does not matter for the new one; forgets: the content may be
        found again; whole: nothing of the old content is left."""
        if value.flags & {"trained", "step", "grad"}:
            self.sink(self.use(given))
        places = [("object", id(thing)) for thing in value.objects if not isinstance(thing, SCALARS)]
        bases = {id(base): base for thing in value.objects if (base := _beneath(thing)) is not None}
        self.kept |= bases
        if "trained" in value.flags:
            return  # trained values are carried
        for place in (*places, *value.homes, *(("object", key) for key in bases)):
            if place[0] == "item":
                self.values[place] = self.values.get(place, Value()).with_deps(self.use(given) | self.control)
                place = ("object", place[1])
            else:
                for item in items_of(self, place):
                    del self.values[item]
            if not (sets or forgets):
                self.items.changed(place[1])
            if forgets:
                self.written.setdefault(place, self.at)
                self.titles.setdefault(place, value.title)
            else:
                before = self.values[place].deps if place in self.values else frozenset((place,))
                deps = self.use(given) | (NOTHING if sets else before)
                plain = Value(deps, flags=given.flags & {"copy"})
                self.write(place, plain, title=value.title, strong=False, keys=keys)
            if whole and (sets or forgets) and len(places) == 1 and not (value.homes or keys):
                items = self.stores.get(place, ()) if place[1] in self.items.done else ()
                deps = (self.use(given) | self.control).union(*(store.deps for store in items))
                self.values[place] = Value(normal(deps), title=value.title)

    def sink(self, deps: Iterable[Origin]) -> None:
        """Note that training depends on these, here."""
        self.sinks |= normal(frozenset(deps) | self.control)

    @contextmanager
    def reading(self, file: str = "", line: int = 0, each: str = "") -> Iterator[None]:
        """While inside, code is read that stands in this file, or at this line, or that is done for `each` batch."""
        before, self.at = self.at, (file or self.at[0], line or self.at[1], each or self.at[2])
        try:
            yield
        finally:
            self.at = before

    @contextmanager
    def under(self, deps: Iterable[Origin]) -> Iterator[None]:
        """While inside, acts are done under a condition that depends on these."""
        before, self.control = self.control, self.control | decided(deps)
        try:
            yield
        finally:
            self.control = before

    @contextmanager
    def unconditionally(self, *but: Origin) -> Iterator[None]:
        """While inside, acts have the same result whenever they are done, so conditions do not matter; or do not matter
        by what they depend on here, if something is given."""
        before, self.control = self.control, self.control - decided(but) if but else NOTHING
        try:
            yield
        finally:
            self.control = before

    @contextmanager
    def attempt(self) -> Iterator[Attempt]:
        """While inside, code of a `try` is read."""
        self._attempts.append(Attempt())
        try:
            yield self._attempts[-1]
        finally:
            self._attempts.pop()

    def may_raise(self, deps: Iterable[Origin] = NOTHING, *, surely: bool = False) -> None:
        """Note that the `try` may end here, depending on these. surely: it does if the code comes here."""
        if self._attempts:
            self._attempts[-1].note(decided(frozenset(deps) | self.control), surely)

    @property
    def raised(self) -> frozenset[Origin]:
        """Dependences of whether the rest of the `try` is done."""
        return self._attempts[-1].raised if self._attempts else NOTHING

    def branches(self, acts: Iterable[Callable[[], None]]) -> None:
        """One of these alternatives happens, and it is unknown which."""
        before, ends = self.point(), []
        for act in acts:
            self.values = dict(before[0])
            self.items.meet([before[1]])
            act()
            ends.append(self.point())
        self.meet(ends)

    def point(self) -> Point:
        """The place of reading, which is met later."""
        return dict(self.values), self.items.done

    def meet(self, ends: Sequence[Point]) -> None:
        """Go on from one of these states, and it is unknown from which."""
        merged: dict[Origin, Value] = {}
        for place in {p for values, _ in ends for p in values}:
            found = [values.get(place) for values, _ in ends]
            known = [v for v in found if v is not None]
            if place[0] == "item" and len(known) < len(found):
                continue
            if len(known) == len(found) and all(v is known[0] for v in known):
                merged[place] = known[0]
            else:
                untouched = [Value(frozenset((place,)))] if len(known) < len(found) else []
                merged[place] = joined([*known, *untouched])
        self.values = merged
        self.items.meet([done for _, done in ends])

    # ---- results

    def reaching(self) -> set[Origin]:
        """Places that training depends on, in this round or a later one; ("if", PLACE) if the place only decides."""
        found: set[Origin] = set()
        left = list(self.sinks)
        while left:
            one = left.pop()
            if one in found:
                continue
            found.add(one)
            place = one[1] if one[0] == "if" else one
            value = self.values.get(place)
            if place in self.written and value is not None:
                own = ("if", place), ("if", ("read", place, None))
                left += value.deps
                left += [d for store in self.stores.get(place, ()) for d in store.deps if d not in own]
        return found

    def is_plain(self, dep: Origin) -> bool:
        """Whether this is no place whose content is lost in another life: batches, shapes, carried objects."""
        place = dep[1] if dep[0] == "if" else dep
        place = place[1] if place[0] == "read" else place
        if place in (STEP, RANDOM, TRAINED) or place[:2] == ("arg", "shape"):
            return True
        thing = self.kept.get(place[1]) if place[0] in ("object", "attr") else None
        return thing is not None and "carried" in self.judge.flags(thing)


def _is_code_read(judge: Judge, thing: Any, name: str) -> bool:
    """Whether this is an attribute of a trained object that only the user's code uses, which is read."""
    if "trained" not in judge.flags(thing):
        return False
    return name not in _names_in_libraries(type(thing))  # type: ignore[arg-type]


@functools.lru_cache(1024)
def _names_in_libraries(kind: type) -> frozenset[str]:
    """Names in the code of those bases of a class that are not the user's."""
    held = [f for base in kind.__mro__ if not users_class(base) for f in vars(base).values()]
    return frozenset().union(*(f.__code__.co_names for f in held if isinstance(f, types.FunctionType)))


def sink_setting(memory: RoundMemory, value: Value) -> None:
    """Note that a trained object has an attribute of this value, on which the training may depend: on attributes of
    trained objects it does where their code says so."""

    def is_own(dep: Origin) -> bool:
        place = dep[1] if dep[0] == "if" else dep
        return place[0] == "attr" and "trained" in memory.judge.flags(memory.kept.get(place[1]))

    memory.sinks.update(d for d in normal(memory.use(value) | memory.control) if not is_own(d))


def counts_batches(memory: RoundMemory, place: Origin) -> bool:
    """Whether the content of a place follows from its content before the batch."""
    return any(store.each and place in store.deps for store in memory.stores.get(place, ()))


def is_harmless_beside(memory: RoundMemory, place: Origin) -> bool:
    """Whether only samples' or a task's code writes this place, and it counts nothing: a file that is opened late, a
    shard that is kept until the next is wanted."""
    stores = memory.stores.get(place, ())
    only = bool(stores) and all(store.each == "beside" for store in stores) and place[1] not in memory.items.bounded
    return only and (place[0] == "file" or not counts_batches(memory, place))


def note_setting(memory: RoundMemory, base: Value, name: str, value: Value) -> None:
    """Note that a batch sets an attribute of these objects, or of unknown ones."""
    if memory.at[2]:
        store = WrittenOnce(normal(memory.use(value) | memory.control), NOTHING, memory.at[2])
        for kind in [*map(type, base.objects)] or [type(None)]:
            memory.stores.setdefault(("set", kind, name), []).append(store)


def is_set_anew(memory: RoundMemory, thing: Any, name: str) -> bool:
    """Whether each batch surely sets an attribute of such objects to what does not depend on the batches before."""

    def is_anew(dep: Origin) -> bool:
        if dep[0] != "if":
            return memory.is_plain(dep) or dep not in memory.written
        return dep[1] == TRAINED or not (dep[1][0] in _VARYING or dep[1] in memory.written)

    stores = [s for kind in (type(thing), type(None)) for s in memory.stores.get(("set", kind, name), ())]
    return any(all(map(is_anew, store.deps)) for store in stores)


def keep_content(memory: RoundMemory, base: Value, name: str) -> None:
    """Note that what was written last to an attribute of these objects is what it was, in another form."""
    for place in (("attr", id(thing), name) for thing in base.objects):
        stores = memory.stores.get(place, [])
        stores[-1:] = [replace(store, deps=store.deps - {place}) for store in stores[-1:]]


def _beneath(thing: Any) -> Any:
    """The array or tensor that this one is a view of, if any."""
    name = {"ndarray": "base", "Tensor": "_base"}.get(type(thing).__name__, "")
    base = getattr(thing, name, None) if name else None
    return base if type(base) is type(thing) else None


def entry_of(memory: RoundMemory, value: Value, keys: frozenset[Origin]) -> frozenset[Origin]:
    """Everything that one entry of a container depends on. keys: under which it is looked up."""
    own = value.homes | {("object", id(thing)) for thing in value.objects}
    return (memory.use(value) - {("read", place, None) for place in own}) | {("read", place, keys) for place in own}


def remembers(memory: RoundMemory, place: Origin) -> bool:
    """Whether the content of a place is a function of the key that it is written under, at any time."""

    def varies(dep: Origin) -> bool:
        inner = dep[1] if dep[0] == "if" else dep
        return inner[0] in _VARYING or inner in memory.written

    stores = memory.stores.get(place, [])
    return bool(stores) and all(
        d == ("if", place) or not varies(d) or (d[1] if d[0] == "if" else d) in store.keys
        for store in stores
        for d in store.deps
    )


def items_of(memory: RoundMemory, place: Origin) -> dict[Origin, Value]:
    """Items of this container that have been set since it was last changed in another way."""
    return {p: v for p, v in memory.values.items() if p[0] == "item" and p[1] == place[1]}


def recalls(memory: RoundMemory, place: Origin, reaching: set[Origin]) -> bool:
    """Whether a container that remembers gives the training only entries of keys that this round writes: the rest
    depends on the rounds before."""
    keys = {key for store in memory.stores[place] for key in store.keys if key[0] != "arg"}
    read = {d[2] for d in reaching if d[0] == "read" and d[1] == place}
    read |= {d[1][2] for d in reaching if d[0] == "if" and d[1][:2] == ("read", place)}
    every = keys or place[1] in memory.items.bounded
    return not every or all(one and keys == {key for key in one if key[0] != "arg"} for one in read)
