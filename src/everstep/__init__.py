"""Everstep: training that goes on when workers die, and ends with the same bits.

Public names are loaded on first use, so that `import everstep` stays cheap where torch is not needed.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

__all__ = ["TarShards", "Task", "TokenFile", "__version__", "join", "state"]


def __getattr__(name: str) -> Any:
    if name == "Task":
        from everstep.train.task import Task

        return Task
    if name == "join":
        from everstep.train.join import join

        return join
    if name == "state":
        from everstep.script.loop_values import state

        return state
    if name == "TarShards":
        from everstep.data.tar_shards import TarShards

        return TarShards
    if name == "TokenFile":
        from everstep.data.token_file import TokenFile

        return TokenFile
    raise AttributeError(f"module 'everstep' has no attribute {name!r}")
