"""Waiting until something can be read, however many descriptors a process has."""

from __future__ import annotations

import select
from collections.abc import Iterable


def readable(fds: Iterable[int], timeout_s: float | None) -> set[int]:
    """Descriptors that can be read or have come to an end; negative ones are skipped. timeout_s: None to wait without
    end.

    Source: select(2) knows only descriptors up to 1023; poll(2) has no such limit.
    """
    poller = select.poll()
    for fd in fds:
        if fd >= 0:
            poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)}
