"""Step machines with a bug in one part, for tests of what must notice it."""

from __future__ import annotations

from everstep.base.plan import WorkerKey
from everstep.protocol.step_machine import StepMachine


def machine_with(bug: type) -> type[StepMachine]:
    """A machine whose part is of this class, which is derived from that of the part."""

    class Broken(StepMachine):
        def __init__(self, me: WorkerKey, digest: str = "") -> None:
            super().__init__(me, digest)
            parts = {type(part): part for part in [*vars(self._known).values(), *vars(self).values()]}
            parts[bug.__base__].__class__ = bug

    Broken.__name__ = bug.__name__
    return Broken
