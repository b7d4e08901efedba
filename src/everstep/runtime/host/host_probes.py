"""Looks whether other hosts answer, in threads of their own: the fastest proof that no packet gets through."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from everstep.base.doors import split_at_port
from everstep.protocol.messages import ProbeHosts

PROBE_S = 0.7
_TRIES = 2
"""Connections tried at once, so that one lost packet proves nothing."""
_MOST_HOSTS = 64


def probe_hosts(asked: ProbeHosts, answer: Callable[[int, list[str]], None]) -> None:
    """Connect to each address; `answer` is called, from another thread, with the request's number and the hosts that
    have not answered, not even with a refusal."""
    wanted = list(asked.addresses.items())[:_MOST_HOSTS]
    tries = [(host, address) for host, address in wanted for _ in range(_TRIES)]

    def run() -> None:
        with ThreadPoolExecutor(max(1, len(tries)), thread_name_prefix="probe") as pool:
            heard = list(pool.map(lambda one: _answers(one[1]), tries))
        found = {host for (host, _), there in zip(tries, heard, strict=True) if there}
        answer(asked.number, [host for host, _ in wanted if host not in found])

    threading.Thread(target=run, name="probes", daemon=True).start()


def _answers(address: str) -> bool:
    try:
        socket.create_connection(split_at_port(address), PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True
