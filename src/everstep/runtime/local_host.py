"""The agent of the job's own host, as a process that the job starts, and starts again when it dies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from everstep.base.cause import Why
from everstep.base.config import Config
from everstep.runtime.address import COORDINATOR_FILE, LOGS_FOLDER, TOKEN_FILE
from everstep.runtime.fork_server import DEFAULT_PRELOAD
from everstep.runtime.fork_server_client import EarlyForkServer, Handed
from everstep.runtime.joining import Joining
from everstep.runtime.process import own_command
from everstep.runtime.supervisor import Supervised

MODULE = "everstep.runtime.agent_main"
LAST_WAIT_S = 15.0
_SERVER_WAIT_S = 0.5


class LocalHost(Supervised):
    """One agent process after the other. entry, preload, ranks: as `Joining` has them.

    early: a fork server that may be running already; the first agent takes it over, later ones start their own.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        entry: str,
        *,
        preload: Sequence[str] = DEFAULT_PRELOAD,
        early: EarlyForkServer | None = None,
        ranks: int = 1,
    ) -> None:
        super().__init__(run_dir / LOGS_FOLDER / "agent.log")
        self._run_dir = run_dir
        self._config = config
        self._entry = entry
        self._preload = tuple(preload)
        self._early = early
        self._ranks = ranks
        self._handed = False

    def start(self) -> None:
        """Start an agent, with the early fork server if there is one that nobody has had yet."""
        if self._early is None or self._handed:
            self.spawn(self._command(None))
            return
        self._handed = True
        handed = self._early.hand_over(self._config.threads)
        self.spawn(self._command(handed), (handed.fd, handed.board_fd))
        self._early.let_go()

    def died(self, now_s: float) -> tuple[Why, bool]:
        """As ever; but an agent that was told of the job's end, maybe before the job was, is not started again."""
        if self._early is not None:  # a child of this process, which does not outlive the agent that had it
            self._early.close(_SERVER_WAIT_S)
        found = super().died(now_s)
        if self.exit_code == 0:
            self.restart_at_s = None
        return found

    def end(self, timeout_s: float = LAST_WAIT_S) -> None:
        """Stop it for good, and its workers with it."""
        super().end(timeout_s)
        if self._early is not None:
            self._early.close(_SERVER_WAIT_S)

    def _command(self, server: Handed | None) -> list[str]:
        joining = Joining(
            address=str((self._run_dir / COORDINATOR_FILE).resolve()),
            token_file=str(self._run_dir / TOKEN_FILE),
            entry=self._entry,
            preload=list(self._preload),
            host=self._config.network.address,
            threads=self._config.threads,
            ranks=self._ranks,
            server=server,
            parent=os.getpid(),
        )
        return own_command(MODULE, joining.to_json())
