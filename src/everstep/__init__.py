"""Everstep: training that goes on when workers die, and ends with the same bits.

Public names are loaded on first use, so that `import everstep` stays cheap where torch is not needed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

__version__ = "0.2.0.dev0"

__all__ = ["PictureFolder", "TarShards", "Task", "TokenFile", "__version__", "join", "state"]

_MODULES = {
    "PictureFolder": "everstep.data.folder",
    "TarShards": "everstep.data.tar_shards",
    "Task": "everstep.train.task",
    "TokenFile": "everstep.data.token_file",
    "join": "everstep.train.join",
    "state": "everstep.script.loop_values",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'everstep' has no attribute {name!r}")
    if sys.excepthook is sys.__excepthook__:
        from everstep.train.script_errors import say_in_one_line

        say_in_one_line()
    return getattr(import_module(_MODULES[name]), name)
