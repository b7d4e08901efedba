"""Parameters that are used in several stages: one gradient per place of use, each reduced where the place is.

Apart because three parties need it: who sends reduced gradients, who adds them up, and who counts them in the norm.
Each place's gradient is one message from its stage to every other stage with a place; the sum is made in unit order by
every stage, from the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn

from everstep.base.errors import check
from everstep.base.ports import Reduced
from everstep.exact.layout import GradientLayout
from everstep.exact.reduce import cross_terms, gather, tied_terms


@dataclass(frozen=True, order=True)
class TiePlace:
    """One place of use. name: the parameter's first one. unit: its number in the whole model. stage: where it is.
    entry: index in this stage's layout, -1 for a place in another stage."""

    name: str
    unit: int
    stage: int
    entry: int = field(default=-1, compare=False)


@dataclass(frozen=True)
class Tied:
    """A parameter with places in this stage and in others. places: in unit order. parameter: the optimizer's leaf."""

    name: str
    places: tuple[TiePlace, ...]
    parameter: nn.Parameter

    @cached_property
    def own(self) -> tuple[TiePlace, ...]:
        """The places that are here."""
        return tuple(place for place in self.places if place.entry >= 0)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """All stages with a place, ascending."""
        return tuple(sorted({place.stage for place in self.places}))

    @property
    def counts_here(self) -> bool:
        """Whether this stage counts its terms of the norm: the one with the first place."""
        return self.places[0].entry >= 0


def tied_out(ties: Sequence[Tied], layout: GradientLayout, reduced: Reduced) -> dict[TiePlace, Tensor | None]:
    """What this stage has to tell the others: reduced gradients (flat float32, not normalised), None where absent."""
    found: dict[TiePlace, Tensor | None] = {}
    for tied in ties:
        for place in tied.own:
            entry = layout.entries[place.entry]
            there = reduced.presence[place.entry]
            found[place] = gather(reduced, entry.offset, entry.stop) if there else None
    return found


def stage_terms(
    ties: Sequence[Tied], layout: GradientLayout, reduced: Reduced, received: Mapping[TiePlace, Tensor | None]
) -> list[float]:
    """This stage's summands of the sum of squares of the whole gradient, beside those of its blocks (see `tied_terms`).

    Over all stages they are the very summands of the unsplit model.
    """
    terms = tied_terms(layout, reduced, frozenset(p.entry for tied in ties for p in tied.own))
    for tied in ties:
        if tied.counts_here:
            own = tied_out([tied], layout, reduced)
            gradients = []
            for place in tied.places:
                check(place in own or place in received, f"the gradient of {tied.name} has not been received")
                gradient = own[place] if place in own else received[place]
                if gradient is not None:
                    gradients.append(gradient)
            terms += cross_terms(gradients)
    return terms
