"""How an agent has the job let its host go: it asks for what `everstep drain --host` asks for, until it is answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from everstep.base.errors import EverstepError
from everstep.protocol.roles import OPERATE
from everstep.runtime.address import read_address
from everstep.runtime.commands import ask_at
from everstep.runtime.context import Joining
from everstep.runtime.handshake import role_token
from everstep.runtime.tls import Shown, Tls

PATIENCE_S = 60.0
_ANSWER_S = 5.0
_AGAIN_S = 0.25


class LeaveAnswer(NamedTuple):
    """What came of the request."""

    ok: bool
    words: str


class Leaving:
    """One request, in a thread of its own. token: the job's. shown: as the agent's connection has it. put: gets the
    answer, in that thread."""

    def __init__(self, joining: Joining, token: bytes, shown: Shown | None, put: Callable[[LeaveAnswer], None]) -> None:
        self._joining = joining
        self._key = role_token(token, OPERATE)
        self._tls = Tls.of(shown)
        self._put = put

    def start(self) -> None:
        """Ask, now."""
        threading.Thread(target=self._ask, name="leaving", daemon=True).start()

    def _ask(self) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                args = {"host": self._joining.host}
                reply = ask_at(self._where(), OPERATE, self._key, self._tls, "drain", args, _ANSWER_S)
                return self._put(LeaveAnswer(reply.ok, reply.error))
            except (OSError, EverstepError) as error:
                why = str(error)
            if time.monotonic() > end_s:
                return self._put(LeaveAnswer(False, f"the job does not answer: {why}"))
            time.sleep(_AGAIN_S)

    def _where(self) -> tuple[str, int]:
        where = self._joining.where()
        if isinstance(where, Path):
            found = read_address(where)
            return found.host, found.port
        return where
