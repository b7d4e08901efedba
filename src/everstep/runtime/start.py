"""The facts that a host knows of a job before anything of it starts, the same for all commands that start a part of it.

`run`, `takeover` and `agent --standby` start a process that leads the job, or may have to. `agent`, and the hosts after
the first that a launcher starts, start an agent alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.base.config import Config
from everstep.base.errors import InvariantViolation
from everstep.base.strikes import Strike
from everstep.runtime.host.fork_server_client import DEFAULT_PRELOAD, EarlyForkServer
from everstep.runtime.lead.succession import Succession
from everstep.runtime.link.context import Joining


@dataclass(frozen=True)
class Start:
    """Start of a job's part on this host. config: the job's; before that is known, this host's own keys. entry,
    preload, files, ranks: as `Joining` has them. host, own: this host's name and its address, "": both are the config's
    address. room: most workers here, 0: any number, None: this host has none. domains: failure domains of this host, by
    label. run_dir: the job's directory as this host sees it, None if the job says. where: address of the job, as --join
    takes it, "" if this host begins the job. task, argv: handed to the workers; an agent runs no other task than this.
    token: the job's secret, b"": a new one, or that in the job's directory. secrets: of this host's user in etcd. port:
    where the coordinator listens for other hosts, 0: anywhere, None: no other host may come. strikes: scripted faults
    of hosts and links. succession: how this process leads the job. early: a fork server that may be running already;
    the first agent takes it over. stays: if a scheduler stops the job, this host waits for its next process. agent: pid
    of this host's agent if it runs already, 0 if not."""

    config: Config
    entry: str = ""
    preload: tuple[str, ...] = DEFAULT_PRELOAD
    files: str = ""
    ranks: int = 1
    host: str = ""
    own: str = ""
    room: int | None = 0
    domains: Mapping[str, str] = field(default_factory=dict)
    run_dir: Path | None = None
    where: str = ""
    task: str = ""
    argv: tuple[str, ...] = ()
    token: bytes = field(default=b"", repr=False)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    port: int | None = None
    strikes: tuple[Strike, ...] = ()
    succession: Succession = field(default_factory=Succession)
    early: EarlyForkServer | None = None
    stays: bool = False
    agent: int = 0

    @property
    def name(self) -> str:
        """Name of this host's agent."""
        return self.host or self.config.network.address

    @property
    def address(self) -> str:
        """Address at which others find this host."""
        return self.own or self.config.network.address

    @property
    def folder(self) -> Path:
        """The job's directory, where it is known. Raises: InvariantViolation if it is not."""
        if self.run_dir is None:
            raise InvariantViolation("expected a start with the job's directory, got one that has yet to be told")
        return self.run_dir

    @property
    def imports(self) -> tuple[str, ...]:
        """Names that the fork server imports: `preload`, without the task's packages if these might read variables that
        only the workers have."""
        return tuple(name for name in self.preload if ":" not in name) if self.config.env else self.preload

    @property
    def keeps_apart(self) -> bool:
        """Whether this host's agent has a folder of its own, and so outlives that another host leads in another
        directory."""
        succession = self.succession
        first = succession.begins and bool(succession.owner) and self.port is not None
        return first or bool(succession.copying_host)

    def joining(self, address: str, **more: Any) -> Joining:
        """Facts for the agent of this host. address: as `Joining` has it; more: its other fields."""
        own = {"entry": self.entry, "preload": list(self.imports), "files": self.files, "ranks": self.ranks}
        own |= {"host": self.name, "own": self.address, "room": self.room or 0, "domains": dict(self.domains)}
        return Joining(**{"address": address, **own, "tls": self.config.security.tls, **more})
