"""Search for the coordinator on one host: the result goes into a file that the host's agent and workers follow."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from everstep.base.errors import EverstepError, ProtocolError
from everstep.protocol.lease.requests import HolderSeen, Look
from everstep.protocol.roles import READ
from everstep.runtime.lead.etcd import Etcd
from everstep.runtime.lead.journal_and_lease import checked_where
from everstep.runtime.link import wire
from everstep.runtime.link.address import announce
from everstep.runtime.link.handshake import role_token
from everstep.runtime.link.tls import Tls

LOOK_S = 0.2
Where = dict[str, Any]


def in_etcd(etcd: Etcd) -> Where | None:
    """Address of the lease's holder; None if nobody holds it, or etcd does not answer."""
    answer = etcd.ask(Look())
    holder = answer.holder if isinstance(answer, HolderSeen) else None
    return checked_where(holder.where) if holder is not None and holder.where else None


def among(places: Sequence[tuple[str, int]], token: bytes, tls: Tls | None) -> Where | None:
    """The first of these places at which a coordinator of the job answers; None if nobody answers at any.

    Raises: ProtocolError, of the first stranger, if only coordinators of other jobs answer.
    """
    strangers: list[ProtocolError] = []
    for host, port in places:
        try:
            sock = socket.create_connection((host, port), LOOK_S * 5)
            with wire.secured(sock, tls) as sock:
                wire.handshake_client(sock, role_token(token, READ), READ, "agent")
                return {"pid": 1, "host": host, "port": port, "tls": "off", "ca": ""}
        except ProtocolError as error:
            strangers.append(error)
        except OSError:
            continue
    if strangers:
        raise strangers[0]
    return None


class Finder:
    """Keeps the file `path` up to date until it is closed. look: returns the coordinator's address as far as is known;
    called again and again while `wanted` says so. found: called with the path after each address that was found."""

    def __init__(
        self,
        path: Path,
        look: Callable[[], Where | None],
        wanted: Callable[[], bool],
        found: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self._path, self._look, self._wanted, self._found = path, look, wanted, found
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="finder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            with contextlib.suppress(EverstepError, OSError):
                where = self._look() if self._wanted() else None
                if where is not None:
                    announce(self._path, where, anew=True)
                    self._found(self._path)
