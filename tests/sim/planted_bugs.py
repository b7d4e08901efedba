"""Step machines with a bug in one part, for tests of what must notice it."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.base.plan import WorkerKey
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_types import Record
from everstep.protocol.stepping.deciding import Deciding


def machine_with(bug: type) -> type[StepMachine]:
    """A machine whose part is of this class, which is derived from that of the part."""

    class Broken(StepMachine):
        def __init__(self, me: WorkerKey, digest: str = "") -> None:
            super().__init__(me, digest)
            parts = {type(part): part for part in [*vars(self._known).values(), *vars(self).values()]}
            parts[bug.__base__].__class__ = bug

    Broken.__name__ = bug.__name__
    return Broken


class OneRecordTooFew(Deciding):
    """Decides without waiting for the last member."""

    def _complete(self, records: Mapping[int, Record]) -> bool:
        return len(records) >= max(1, len(self._known.plans.current.members) - 1)
