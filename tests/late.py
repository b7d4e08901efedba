"""`make late`: threads, messages and wakeups that are late, at random: a test that takes their order for granted fails.

A plugin of pytest: `LATE=threads LATE_SEED=1 PYTHONPATH=tests python -m pytest -p late tests/unit`. What may be late:
threads when they start; the words of a coordinator or of a fork server on their way to whoever reads them; what is put
into an inbox; whoever is woken, by a descriptor or by another thread; whoever has started a process.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from everstep.base import readable
from everstep.runtime import process
from everstep.runtime.host.fork_server_client import ForkServerClient
from everstep.runtime.link.control_client import ControlClient

LATE = os.environ.get("LATE", "threads")
SEED = int(os.environ.get("LATE_SEED", "1"))
_DRAW = random.Random(SEED)


def _sleep(most_s: float) -> None:
    time.sleep(_DRAW.random() * most_s)


def _before(owner: Any, name: str, most_s: float) -> None:
    """Calls of this begin late."""
    call = getattr(owner, name)

    def late(*args: Any, **kwargs: Any) -> Any:
        _sleep(most_s)
        return call(*args, **kwargs)

    setattr(owner, name, late)


def _after(owner: Any, name: str, most_s: float) -> None:
    """Calls of this return late."""
    call = getattr(owner, name)

    def late(*args: Any, **kwargs: Any) -> Any:
        found = call(*args, **kwargs)
        _sleep(most_s)
        return found

    setattr(owner, name, late)


def _messages() -> None:
    """To whoever has a control connection."""
    begin: Any = ControlClient.__init__

    def late(self: ControlClient, *args: Any, **kwargs: Any) -> None:
        hear = args[5]

        def taken(message: Any) -> None:
            _sleep(0.3)
            hear(message)

        begin(self, *args[:5], taken, *args[6:], **kwargs)

    ControlClient.__init__ = late  # type: ignore[method-assign]


def _looks() -> None:
    """Modules have this function under its own name."""
    looked = readable.readable
    _after(readable, "readable", 0.05)
    for name, module in list(sys.modules.items()):
        if name.startswith("everstep.") and getattr(module, "readable", None) is looked:
            setattr(module, "readable", readable.readable)  # noqa: B010


KINDS: dict[str, Callable[[], None]] = {
    "threads": lambda: _before(threading.Thread, "run", 0.2),
    "messages": _messages,
    "words": lambda: _before(ForkServerClient, "receive", 0.3),
    "inbox": lambda: _before(process.Inbox, "put", 0.1),
    "looks": _looks,
    "wakes": lambda: _after(threading.Condition, "wait", 0.03),
    "processes": lambda: _after(subprocess.Popen, "__init__", 0.3),
}


def pytest_collection_finish(session: pytest.Session) -> None:
    """All modules are there by now."""
    KINDS[LATE]()


def pytest_report_header() -> str:
    return f"late: {LATE}, LATE_SEED={SEED}"
