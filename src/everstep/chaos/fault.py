"""One fault as data: which kind strikes whom, at which step and in which phase. Pure.

Apart from the specification's parser, which knows all kinds, because each kind knows this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from everstep.chaos.targets import Target

COMPUTE_PHASES = ("load", "forward", "backward", "reduce", "agree", "update")
PHASES = (*COMPUTE_PHASES, "settle", "heal", "finish")


@dataclass(frozen=True)
class Fault:
    """One fault that strikes each of its victims once.

    kind: a name of `chaos/kinds`.
    `at`: 0, at once; else the step being computed (with phase heal: the step being healed to; with phase settle: the
    last step done; with phase finish, when final/ is about to be made: the last step), or the first later one in which
    the target takes part. `phase` None: as soon as the target computes the step.
    `for_s`: seconds until it is over (None: never).
    `until`: slow until so many events of this kind were reported. `peers`: a partition from the other workers too.
    `index`: its place in the specification.
    """

    kind: str
    target: Target
    at: int
    phase: str | None = None
    for_s: float | None = None
    index: int = 0
    peers: bool = False
    by_s: float = 0.0
    until: tuple[str, int] | None = None

    def __str__(self) -> str:
        parts = [f"target={self.target}", *([f"at={self.at}"] if self.at else [])]
        if self.phase is not None:
            parts.append(f"phase={self.phase}")
        if self.for_s is not None:
            parts.append(f"for={self.for_s:g}")
        if self.peers:
            parts.append("from=peers")
        if self.by_s:
            parts.append(f"by={self.by_s:g}")
        if self.until is not None:
            parts.append(f"until={self.until[0]}*{self.until[1]}")
        return f"{self.kind}:{','.join(parts)}"

    def request(self) -> dict[str, Any]:
        """What a coordinator is asked, who looks whether there is anybody whom the fault means."""
        target = self.target
        stages = target.numbers("leader", "backups", "stage")
        return {"fault": str(self), "workers": list(target.numbers("worker")), "stages": list(stages)}
