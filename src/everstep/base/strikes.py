"""A scripted fault of a host, of the link between two, or of the coordinator, as data. Agents strike their own hosts;
the job's process strikes the coordinator that it started. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

MEANS = {"cut": "drop", "oneway": "drop", "drop": "drop", "slow": "delay", "narrow": "rate"}
"""Ability that a host needs for its packets, by kind of fault."""
OF_COORDINATOR = ("kill", "stop", "throttle")
_MOST, _MOST_TEXT = 1e9, 500


@dataclass(frozen=True)
class Strike:
    """One fault.

    text: its specification. kind: kill, or one of `MEANS`. target: name of a host, or of the two hosts of a link with a
    hyphen between. for_s: seconds until it ends; by_s: delay in seconds; mbit: remaining bandwidth in Mbit/s; share:
    share of packets lost. index: its place in the specification. coordinator: the coordinator is struck (kill, stop
    with for_s 0: for good, or throttle); target says so, too.
    """

    text: str
    kind: str
    target: str
    link: bool = False
    for_s: float = 0.0
    by_s: float = 0.0
    mbit: float = 0.0
    share: float = 1.0
    index: int = 0
    coordinator: bool = False

    @property
    def means(self) -> str:
        """Ability that carrying out the fault needs; "" for none."""
        return MEANS.get(self.kind, "")

    @property
    def possible(self) -> bool:
        """Whether such a fault exists and its numbers make sense."""
        numbers = (self.for_s, self.by_s, self.mbit, self.share)
        known = self.kind in OF_COORDINATOR if self.coordinator else self.kind == "kill" or self.kind in MEANS
        return known and len(self.text) <= _MOST_TEXT and all(0 <= one <= _MOST for one in numbers)

    def ends(self, known: Collection[str]) -> tuple[str, ...]:
        """The target's hosts among the known ones: one, two different ones for a link, else none. Names may contain
        hyphens."""
        if not self.link:
            return (self.target,) if self.target in known else ()
        cuts = (i for i, letter in enumerate(self.target) if letter == "-")
        pairs = ((self.target[:i], self.target[i + 1 :]) for i in cuts)
        return next((pair for pair in pairs if set(pair) <= set(known) and pair[0] != pair[1]), ())

    def acts(self, name: str) -> bool:
        """Whether the host of this name is known to be one that carries out the fault."""
        if not self.link:
            return self.target == name and not self.coordinator
        return self.target.startswith(f"{name}-") or (self.both_act and self.target.endswith(f"-{name}"))

    @property
    def both_act(self) -> bool:
        """Whether both hosts of a link do a part; otherwise the first does all."""
        return self.kind in ("slow", "narrow")
