"""Address of the etcd with a job's lease and journal: `etcd://HOST:PORT,HOST:PORT/PREFIX`, or `etcds://` over TLS.

Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from everstep.base.errors import ConfigError

PLAIN, OVER_TLS = "etcd://", "etcds://"
SCHEMES = (PLAIN, OVER_TLS)
DEFAULT_PORT = 2379
_EXAMPLE = "etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379/jobs/mine"
_MEMBER = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:]{2,45}\])(?::(\d{1,5}))?")
_PREFIX = re.compile(r"(/[A-Za-z0-9._-]{1,100}){1,10}")


@dataclass(frozen=True)
class EtcdAddress:
    """members: each "host:port". prefix: begins all keys of the job, with a leading slash and no trailing one. tls:
    whether connections use TLS."""

    members: tuple[str, ...]
    prefix: str
    tls: bool = False

    def __str__(self) -> str:
        return f"{OVER_TLS if self.tls else PLAIN}{','.join(self.members)}{self.prefix}"

    @classmethod
    def parse(cls, name: str, text: str) -> EtcdAddress:
        """Parse an address. name: the key that holds it. Raises: ConfigError if it is no such address."""
        tls = text.startswith(OVER_TLS)
        members, slash, prefix = text.removeprefix(OVER_TLS if tls else PLAIN).partition("/")
        found = [_MEMBER.fullmatch(member) for member in members.split(",")]
        prefix = (slash + prefix).rstrip("/")
        ports = [int(m[2] or DEFAULT_PORT) for m in found if m is not None]
        whole = text.startswith(SCHEMES) and len(ports) == len(found) and all(0 < port < 65536 for port in ports)
        if not whole or _PREFIX.fullmatch(prefix) is None:
            raise ConfigError(f"{name}: expected members of etcd and a prefix like {_EXAMPLE}, got {text!r}")
        return cls(tuple(f"{m[1]}:{port}" for m, port in zip(found, ports, strict=True) if m is not None), prefix, tls)
