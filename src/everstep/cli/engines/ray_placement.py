"""Nodes of a Ray cluster for the hosts of a job: the requests for placement groups. Pure.

All hosts are bundles of one STRICT_SPREAD group, which Ray places at once or not at all. A job that may begin with
fewer does not wait for that: then each host has a group of its own, placed as soon as there is a node for it. Ray keeps
bundles apart only within a group; so a host's group has, beside the host's bundle, one for each node that has a host
already. Such a bundle takes next to nothing of a resource that only that node has.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

ALL_AT_ONCE_S = 10.0
_NEXT_TO_NOTHING = 0.0001  # the least that Ray counts
RayBundle = dict[str, float]


class Groups(Protocol):
    """Placement groups whose bundles lie on different nodes."""

    def make(self, bundles: list[RayBundle]) -> Hashable:
        """Ask for a group."""

    def nodes(self, group: Hashable) -> list[tuple[str, str]]:
        """(id, address) of the node of each bundle; "" for both if it has none."""

    def remove(self, group: Hashable) -> None:
        """Give the group up, or back."""


class RayPlaces:
    """Places for `hosts` hosts. bundle: resources of a host on its node. least: number of hosts with which the job may
    begin. alone: each host has a group of its own, as not all of them had a node in time."""

    def __init__(self, groups: Groups, bundle: RayBundle, hosts: int, least: int, now_s: float) -> None:
        self._groups = groups
        self._bundle = bundle
        self.alone = False
        self._least = least
        self._until_s = now_s + ALL_AT_ONCE_S
        all_of_them = groups.make([bundle] * hosts)
        self._of: dict[int, tuple[Hashable, int]] = {number: (all_of_them, number) for number in range(hosts)}
        self._taken: dict[int, tuple[str, str]] = {}
        """The node of each host that has one, by the last report."""

    def of(self, number: int) -> tuple[Any, int]:
        """The group of a host, and its bundle there."""
        return self._of[number]

    def look(self, now_s: float) -> list[int]:
        """Hosts that have a node now and had none when this was last called, or were lost since."""
        late = not self.alone and not self._taken and now_s >= self._until_s
        if late and self._least < len(self._of) and not all(node for node, _ in self._groups.nodes(self._of[0][0])):
            self._part()
        seen: dict[Hashable, list[tuple[str, str]]] = {}
        come = []
        for number in self._waiting():
            group, index = self._of[number]
            if group not in seen:
                seen[group] = self._groups.nodes(group)
            found = seen[group][index]
            if found[0] and self.alone and found in self._taken.values():
                self._ask_again(number)  # both waited when this one node came
            elif found[0]:
                self._taken[number] = found
                come.append(number)
        return come

    def lost(self, number: int) -> None:
        """Take in that a host's process is gone, and perhaps its node, too: the host waits for a node again."""
        self._taken.pop(number, None)
        for waiting in self._waiting() if self.alone else ():
            self._ask_again(waiting)  # otherwise they would wait for resources of that node

    def close(self) -> None:
        for group in dict.fromkeys(group for group, _ in self._of.values()):
            self._groups.remove(group)

    def _part(self) -> None:
        self.alone = True
        self._groups.remove(self._of[0][0])
        for number in self._of:
            self._of[number] = (self._groups.make([self._bundle]), 0)

    def _ask_again(self, number: int) -> None:
        self._groups.remove(self._of[number][0])
        beside = [{f"node:{address}": _NEXT_TO_NOTHING} for _, address in sorted(self._taken.values())]
        self._of[number] = (self._groups.make([self._bundle, *beside]), 0)

    def _waiting(self) -> list[int]:
        return sorted(set(self._of) - set(self._taken))
