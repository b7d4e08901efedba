"""What the processes of one worker exchange at a time: the gradients of a unit, or of modules of some size. Pure."""

from __future__ import annotations

from typing import NamedTuple

from everstep.exact.layout import GradientLayout


class Wrapped(NamedTuple):
    """Entries of the layout that are exchanged together, and their part [start, stop) of the flat vector."""

    entries: tuple[int, ...]
    start: int
    stop: int


def wrapped(layout: GradientLayout, least: int | None = None) -> list[Wrapped]:
    """All entries, in order. least: elements that modules have together before the next one begins another exchange,
    within a unit; None: one exchange for each unit. Running statistics go with the last modules of their unit."""
    found: list[Wrapped] = []
    for number, unit in enumerate(layout.units):
        mine = [i for i, entry in enumerate(layout.entries) if entry.unit == number]
        groups, size, owner = [list[int]()], 0, ""
        for i in mine:
            entry = layout.entries[i]
            module = entry.name.rpartition(".")[0]
            if least is not None and size >= least and module != owner and entry.kind == "param":
                groups.append([])
                size = 0
            groups[-1].append(i)
            size, owner = size + entry.numel, module
        ends = [*(layout.entries[group[0]].offset for group in groups[1:]), unit.stop]
        start = unit.start
        for group, stop in zip(groups, ends, strict=True):
            if start < stop:
                found.append(Wrapped(tuple(group), start, stop))
            start = stop
    return found
