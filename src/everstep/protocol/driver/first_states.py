"""The initial states that members build: all begin with the same, and what is built anew later is that one. Pure.

Apart because it outlives generations: a stage that nobody holds any more, and no checkpoint has, is built anew by
workers that may never have seen it. So all members remember the digest of what each stage began with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from everstep.protocol.step_types import Holding


class FirstStates:
    """By stage, digests of initial states. agreed: what members have begun with. built: what this worker has built,
    if its state is that of step 0."""

    def __init__(self) -> None:
        self.agreed: Mapping[int, str] = {}
        self.built: Mapping[int, str] = {}
        self._stated: Mapping[int, Holding] = {}
        self._count = False

    def begin(self, built: Mapping[int, str]) -> None:
        """A generation does; these were built here."""
        self.built, self._count = dict(built), False

    def rebuilt(self, built: Mapping[int, str]) -> None:
        """These were built anew here."""
        self.built, self.agreed = {**self.built, **built}, {**built, **self.agreed}

    def settled(self, step: int, stated: Mapping[int, Holding]) -> None:
        """All go on from this step; `stated` is what all members hold."""
        self._stated, self._count, agreed = stated, step == 0, dict[int, str]()
        for _, holding in sorted(stated.items()):
            agreed = {**holding.first, **agreed}
        self.agreed = {**_commonest(stated), **agreed} if self._count else agreed

    @property
    def wrong(self) -> str:
        """Why this worker cannot go on with what it has built, before anybody copies that; "" if it can."""
        wrong = [k for k, digest in sorted(self.built.items()) if self._count and self.agreed.get(k, digest) != digest]
        if not wrong:
            return ""
        stage, right = wrong[0], self.agreed[wrong[0]]
        like = [i for i, h in sorted(self._stated.items()) if right in (h.first.get(stage), h.built.get(stage))]
        others = f"worker{'s' if len(like) > 1 else ''} {', '.join(map(str, like))}"
        return (
            f"the initial state of stage {stage} that was built here ({self.built[stage][:12]}) is not the one that "
            f"the job began with ({right[:12]}, says {others}): build the model and the optimizer alike each time, "
            "with random numbers from torch's, numpy's or random's global generators alone (seeded alike for all)"
        )


def _commonest(holdings: Mapping[int, Holding]) -> dict[int, str]:
    """By stage what most have built; of as many, that of the lowest id."""
    built: dict[int, list[str]] = {}
    for _, holding in sorted(holdings.items()):
        for stage, digest in holding.built.items():
            built.setdefault(stage, []).append(digest)
    return {stage: Counter(digests).most_common(1)[0][0] for stage, digests in built.items()}
