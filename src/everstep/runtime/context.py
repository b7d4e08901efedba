"""What a process of a worker is given when it starts: everything it needs to find its job, as plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.config import Config, load_config
from everstep.base.plan import WorkerKey


@dataclass(frozen=True)
class WorkerContext:
    """The start-up facts of one life of one worker; JSON-able.

    `token` is the job's secret in hex. `coordinator_file` names coordinator.json, which is rewritten when the
    coordinator restarts. `board_fd` and `board_row` locate the progress row. `config` is the effective config as
    `base.config.to_dict` makes it. `argv` are the task's own arguments. `spare`: this slot is beyond those of the
    wanted workers. `cell_rank`, `cell_size`: which of the worker's processes this is, 0 for the head, and how many
    there are; `cell_fds`: its ends of the sockets between head and limbs, the head's from rank 1 on.
    """

    run_dir: str
    worker_id: int
    incarnation: int
    host: str
    token: str
    coordinator_file: str
    board_fd: int
    board_row: int
    config: dict[str, Any]
    task: str
    argv: list[str] = field(default_factory=list)
    spare: bool = False
    cell_rank: int = 0
    cell_size: int = 1
    cell_fds: list[int] = field(default_factory=list)

    @property
    def key(self) -> WorkerKey:
        return WorkerKey(self.worker_id, self.incarnation)

    @property
    def run_path(self) -> Path:
        return Path(self.run_dir)

    @property
    def log_path(self) -> Path:
        """Where the agent writes what this worker prints and logs."""
        return self.run_path / "logs" / f"worker-{self.worker_id}.jsonl"

    @property
    def last_words_path(self) -> Path:
        """Says why this worker died, written by itself; the agent adds it to the reason."""
        return self.run_path / "logs" / f"worker-{self.worker_id}.error"

    def write_last_words(self, why: Why) -> None:
        """Raises: OSError."""
        self.last_words_path.write_text(json.dumps({"cause": why.cause, "reason": why.reason}) + "\n")

    def read_last_words(self) -> Why | None:
        """What this worker wrote, None if it died without a word."""
        try:
            found = json.loads(self.last_words_path.read_text(errors="replace"))
            return Why(Cause.read(found["cause"]), " ".join(str(found["reason"])[:2000].split()))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def token_bytes(self) -> bytes:
        """The job's secret as the control connection wants it."""
        return bytes.fromhex(self.token)

    def load_config(self) -> Config:
        """The effective config. Raises: ConfigError."""
        return load_config([("job.json", self.config)])
