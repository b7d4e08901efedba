"""`everstep run` starts its fork server before all else: nothing takes as long as importing torch."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from everstep.base.foreign import foreign_launcher
from everstep.runtime.host.fork_server_client import DEFAULT_PRELOAD, EarlyForkServer

PRELOAD = (
    *DEFAULT_PRELOAD,
    "everstep.train.worker",
    "everstep.train.cell_deputy",
    "everstep.train.cell_limb",
    "everstep.cli.worker",
    "everstep.zoo.digits",
    "everstep.zoo.text",
)
"""Modules that the fork server imports, so that no life of a worker pays for them (0.1 s on an idle machine)."""
_META = "everstep.early_server"
_BEGINS_NO_JOB = {"-h", "--help", "--dry-run", "--rank"}


def start_early(context: click.Context, args: Sequence[str]) -> None:
    """Start the server before the command line is parsed; it ends with the command. args: of `everstep run`.

    Not where no job may begin in this process. Raises: ConfigError for an environment that contradicts itself."""
    named = {word.partition("=")[0] for word in args}
    if not (context.resilient_parsing or named & _BEGINS_NO_JOB or foreign_launcher(os.environ)):
        server = EarlyForkServer(1, PRELOAD)
        context.meta[_META] = server
        context.call_on_close(server.close)
        server.start()


def take_early(threads: int, preload: Sequence[str]) -> EarlyForkServer:
    """The server of this command, which imports already if it has as many threads; else one that starts when it is
    first needed."""
    server: EarlyForkServer | None = click.get_current_context().meta.pop(_META, None)
    if server is not None and threads == 1:
        return server
    if server is not None:
        server.close()
    return EarlyForkServer(threads, preload)
