"""An exception out of the user's loop or out of Everstep, wherever the worker is."""

from __future__ import annotations

from everstep.base.cause import Cause
from everstep.base.errors import EverstepError
from everstep.chaos.kinds.kind import Blow, FaultKind


class ChaosError(EverstepError):
    """The exception of a `raise` fault.

    `signature` differs from fault to fault, so that the coordinator never takes it for an error of the user's task
    that every restart would repeat.
    """

    cause = Cause.EXCEPTION

    def __init__(self, message: str, signature: str) -> None:
        super().__init__(message)
        self.signature = signature


def _strike(blow: Blow) -> None:
    raise ChaosError(f"chaos fault {str(blow.fault)!r} raised in {blow.moment}", blow.signature)


KIND = FaultKind("raise", "an exception", _strike, drawn=True)
