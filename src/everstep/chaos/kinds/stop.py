"""SIGSTOP: the process hangs, for ever or until SIGCONT."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from everstep.chaos.beside import run_beside
from everstep.chaos.kinds.kind import Blow, FaultKind


def _strike(blow: Blow) -> None:
    if blow.fault.for_s is not None:
        run_beside(f"sleep {blow.fault.for_s:.3f}; kill -CONT {blow.pid}")
    with suppress(ProcessLookupError):
        os.kill(blow.pid, signal.SIGSTOP)


KIND = FaultKind(
    "stop",
    "SIGSTOP, with for=S until SIGCONT",
    _strike,
    takes=frozenset({"phase", "for"}),
    of_coordinator=True,
    at_once=True,
    drawn=True,
)
