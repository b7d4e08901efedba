"""The initial states that members build: all begin with the same state, and a state that is built again must equal
it.

Pure. Apart because it outlives generations: a stage that no worker and no checkpoint has is built again by workers
that may never have seen it. So all members remember the digest that each stage began with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from everstep.protocol.step_types import Holding


class FirstStates:
    """Digests of initial states by stage. agreed: those that the members began with; built: those of the states that
    this worker built, while it is at step 0."""

    def __init__(self) -> None:
        self.agreed: Mapping[int, str] = {}
        self.built: Mapping[int, str] = {}
        self._stated: Mapping[int, Holding] = {}
        self._count = False

    def begin(self, built: Mapping[int, str]) -> None:
        """A generation begins. built: digests of the initial states that were built for it."""
        self.built, self._count = dict(built), False

    def rebuilt(self, built: Mapping[int, str]) -> None:
        """Some initial states were built again."""
        self.built, self.agreed = {**self.built, **built}, {**built, **self.agreed}

    def settled(self, step: int, stated: Mapping[int, Holding]) -> None:
        """All members go on from this step. stated: what each member holds."""
        self._stated, self._count, agreed = stated, step == 0, dict[int, str]()
        for _, holding in sorted(stated.items()):
            agreed = {**holding.first, **agreed}
        self.agreed = {**_commonest(stated), **agreed} if self._count else agreed

    @property
    def wrong(self) -> str:
        """Why this worker may not go on with the state that it built, checked before anyone copies it; "" if it may."""
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
    """The digest that most members built, by stage; on a tie, that of the lowest worker id."""
    built: dict[int, list[str]] = {}
    for _, holding in sorted(holdings.items()):
        for stage, digest in holding.built.items():
            built.setdefault(stage, []).append(digest)
    return {stage: Counter(digests).most_common(1)[0][0] for stage, digests in built.items()}
