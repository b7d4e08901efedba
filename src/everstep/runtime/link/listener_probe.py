"""Whether a process still listens at an address, by the kernel of its host: a living process keeps its port, and a
refused connection is the fastest proof that the process died."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from everstep.base.doors import host_of, split_at_port
from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.types import PortProbed, ProbePort

KNOCK_S = 0.5


async def listens(host: str, port: int, within_s: float = KNOCK_S) -> bool | None:
    """Whether anybody listens there; None without an answer: there is no route, or the host is silent."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), within_s)
    except ConnectionRefusedError:
        return False
    except (OSError, TimeoutError, ValueError, OverflowError):
        return None
    writer.close()
    return True


class PortProber:
    """Probes the ports that the coordinator names. heard: called in the loop with the result."""

    def __init__(self, heard: Callable[[PortProbed], None]) -> None:
        self._heard = heard
        self._probing: dict[WorkerKey, asyncio.Task[None]] = {}

    def probe_port(self, effect: ProbePort) -> None:
        """Probe an address, unless that is under way."""
        if effect.key not in self._probing:
            self._probing[effect.key] = asyncio.get_running_loop().create_task(self._probe_port(effect))

    async def _probe_port(self, effect: ProbePort) -> None:
        known = host_of(effect.address)
        found = await listens(*split_at_port(effect.address)) if known else None
        del self._probing[effect.key]
        self._heard(PortProbed(effect.key, found))
