"""A scripted fault of a host, of the link between two, or of the coordinator, as data: what agents are told to do to
themselves, and the job's process to the coordinator that it has started. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

MEANS = {"cut": "drop", "oneway": "drop", "drop": "drop", "slow": "delay", "narrow": "rate"}
"""By kind of fault: what a host has to be able to do to its packets."""
OF_COORDINATOR = ("kill", "stop", "throttle")
_MOST, _MOST_TEXT = 1e9, 500


@dataclass(frozen=True)
class Strike:
    """One fault.

    text: as a specification says it. kind: kill, or one of `MEANS`. target: the name of a host; of a link those of two,
    with a hyphen between them. for_s: seconds until it is over; by_s: of delay; mbit: bandwidth that is left, in
    Mbit/s; share: of packets that are lost. index: its place in the specification. coordinator: it is that which is
    struck (kill, stop, for_s 0: for good, or throttle); target says the same.
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
        """What whoever carries it out needs to be able to do; "" for nothing."""
        return MEANS.get(self.kind, "")

    @property
    def possible(self) -> bool:
        """Whether there is such a fault, with numbers that make sense."""
        numbers = (self.for_s, self.by_s, self.mbit, self.share)
        known = self.kind in OF_COORDINATOR if self.coordinator else self.kind == "kill" or self.kind in MEANS
        return known and len(self.text) <= _MOST_TEXT and all(0 <= one <= _MOST for one in numbers)

    def ends(self, known: Collection[str]) -> tuple[str, ...]:
        """The hosts that it names, of those that are known: one, of a link two that differ, else none. Names may have
        hyphens."""
        if not self.link:
            return (self.target,) if self.target in known else ()
        cuts = (i for i, letter in enumerate(self.target) if letter == "-")
        pairs = ((self.target[:i], self.target[i + 1 :]) for i in cuts)
        return next((pair for pair in pairs if set(pair) <= set(known) and pair[0] != pair[1]), ())

    def acts(self, name: str) -> bool:
        """Whether the host of this name is, for all that is known, one that has to carry it out."""
        if not self.link:
            return self.target == name and not self.coordinator
        return self.target.startswith(f"{name}-") or (self.both_act and self.target.endswith(f"-{name}"))

    @property
    def both_act(self) -> bool:
        """Whether each end of a link does its part; else the first does all of it."""
        return self.kind in ("slow", "narrow")
