"""Which items of a list or dict a round sets: whether anything of the rounds before is left in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MISSING: Any = object()
KeysDone = Mapping[int, set[Any]]
"""By id of a container, the keys that have been set."""


@dataclass
class ContainerItems:
    """Keys of containers, by id. known: those that a container may have, MISSING if some are not known; grew: whether
    reading has found more of them, so that the code must be read again; done: those that have been set up to here."""

    known: dict[int, set[Any]] = field(default_factory=dict)
    grew: bool = False
    done: KeysDone = field(default_factory=dict)

    def covers(self, thing: Any, key: Any) -> bool:
        """Whether, with this key, all items of a list or dict have been set in this round. key: of the item that is set
        now, MISSING if it is not a constant."""
        if type(thing) not in (list, dict):
            return False
        keys = self.known.setdefault(id(thing), set(thing if isinstance(thing, dict) else range(len(thing))))
        if isinstance(thing, dict) or key is not MISSING:
            self._add(id(thing), key)
        self.done = {**self.done, id(thing): self.done.get(id(thing), set()) | ({key} - {MISSING})}
        return self.done[id(thing)] >= keys

    def changed(self, container: int) -> None:
        """Note that it gets or loses items that the code does not name."""
        if container in self.known:
            self._add(container, MISSING)

    def meet(self, ends: Sequence[KeysDone]) -> None:
        """Go on from one of these states of `done`, and it is unknown from which."""
        self.done = {key: set.intersection(*(end.get(key, set()) for end in ends)) for key in ends[0]}

    def _add(self, container: int, key: Any) -> None:
        self.grew |= key not in self.known[container]
        self.known[container].add(key)
