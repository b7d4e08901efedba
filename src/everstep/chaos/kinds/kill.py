"""SIGKILL: the process is gone between two instructions."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from everstep.chaos.kinds.kind import Blow, FaultKind


def _strike(blow: Blow) -> None:
    with suppress(ProcessLookupError):  # a coordinator that is dead already cannot die again
        os.kill(blow.pid, signal.SIGKILL)


KIND = FaultKind("kill", "SIGKILL", _strike, of_coordinator=True, at_once=True, drawn=True)
