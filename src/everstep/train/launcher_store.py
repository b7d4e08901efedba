"""Passes the job's address on through the store that torchrun's own processes keep: a process of its own, since neither
the job's process nor an agent imports torch.

A reader takes nothing from the store but an address, and proves the job's token there.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from typing import Protocol

from everstep.base.doors import at_port, split_at_port
from everstep.base.errors import ConfigError, NoHead
from everstep.base.exit_codes import NO_HEAD
from everstep.runtime.link.rendezvous import PATIENCE_S, address_towards, is_reachable
from everstep.runtime.process import own_command

MODULE = "everstep.train.launcher_store"
_MOST_ADDRESS_BYTES = 60


class Store(Protocol):
    """The part of torch's store that is needed here."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


def exchange(store: Store, port: int, master: str) -> str:
    """ "address:port" of the job. port: of the job, on its own host, which says so; 0 on the others, which say from
    where they see `master`, so that the job's host takes an address that they reach.

    Raises: ConfigError for what cannot be an address.
    """
    if not port:
        store.set("host", address_towards(master))
        said = store.get("job")[:_MOST_ADDRESS_BYTES].decode(errors="replace")
        try:
            found = split_at_port(said)
        except ValueError:
            found = "", 0
        if not is_reachable(found[0]) or not found[1]:
            raise ConfigError("expected the job's address there, found something else")
        return at_port(*found)
    other = store.get("host").decode(errors="replace")[:_MOST_ADDRESS_BYTES]
    own = address_towards(other) if is_reachable(other) else ""
    if not is_reachable(own):
        raise ConfigError(f"this host has no address that the others reach: they see it from {other or 'nowhere'}")
    store.set("job", at_port(own, port))
    return at_port(own, port)


def ask_store(host: str, store_port: int, prefix: str, port: int) -> str:
    """`exchange` in a process of its own, over the store at this address, under this prefix.

    Raises: ConfigError with its words; NoHead if the others do not come.
    """
    command = own_command(MODULE, json.dumps([host, store_port, prefix, port]))
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S + 60.0)
    except subprocess.TimeoutExpired:
        raise NoHead(f"torchrun's store at {at_port(host, store_port)} does not answer") from None
    said = ended.stdout.decode(errors="replace").strip()
    if ended.returncode:
        last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
        kind = NoHead if ended.returncode == NO_HEAD else ConfigError
        raise kind(f"torchrun's store at {at_port(host, store_port)}: {last or 'it ended without a word'}")
    return said


def main() -> int:
    """Entry point of the process."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed import DistError

    host, store_port, prefix, port = json.loads(sys.argv[1])
    try:
        patience = datetime.timedelta(seconds=PATIENCE_S)
        store = PrefixStore(prefix, TCPStore(host, store_port, None, False, patience, wait_for_workers=False))
        print(exchange(store, port, host))
        return 0
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (DistError, RuntimeError, OSError) as error:
        print(str(error).splitlines()[0][:300], file=sys.stderr)
        return NO_HEAD


if __name__ == "__main__":
    sys.exit(main())
