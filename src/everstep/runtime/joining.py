"""What the agent of a host is started with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from everstep.base.errors import ConfigError
from everstep.runtime.fork_server_client import Handed


@dataclass(frozen=True)
class Joining:
    """Which job an agent takes part in, and as what.

    address: "host:port" of the coordinator, or the path of coordinator.json. entry: "module:function", called in each
    worker with its `WorkerContext`; what it returns is the worker's exit code, and 0 means that it left in order (done,
    or dismissed by request). preload: modules that the fork server imports. host: a name that no other agent of the job
    has. room: for how many workers, 0 if that does not matter. run_dir: how the job's directory is called here, "" if
    as the job says. threads: with how many the fork server is started, as far as is known. server: a fork server that
    runs already. parent: dies with this process, 0 if with none. ranks: processes of each worker.
    """

    address: str
    token_file: str
    entry: str
    preload: list[str]
    host: str
    room: int = 0
    run_dir: str = ""
    threads: int = 1
    server: Handed | None = None
    parent: int = 0
    ranks: int = 1

    def where(self) -> Path | tuple[str, int]:
        """As a control connection wants it. Raises: ConfigError if it is no address."""
        if "/" in self.address:
            return Path(self.address)
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
            raise ConfigError(f"--join: expected ADDR:PORT like 127.0.0.1:29400, got {self.address!r}")
        return host, int(port)

    def to_json(self) -> str:
        """As text; `from_json` undoes it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Joining:
        """Raises: ConfigError for anything else than `to_json` makes."""
        try:
            data = json.loads(text)
            server = Handed(**data["server"]) if data["server"] is not None else None
            return cls(**{**data, "server": server})
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"expected what an agent is started with as JSON, got something else: {error}") from None
