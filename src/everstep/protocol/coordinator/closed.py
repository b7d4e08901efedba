"""Workers' ports that are closed. Pure."""

from __future__ import annotations

from collections.abc import Container

from everstep.base.plan import WorkerKey


class ClosedDoors:
    """Ports of workers without a connection, as reported by the kernels of their hosts."""

    def __init__(self) -> None:
        self._keys: set[WorkerKey] = set()

    def has(self, key: WorkerKey) -> bool:
        return key in self._keys

    def answer(self, key: WorkerKey, listens: bool | None) -> bool:
        """Take the kernel's answer for one port; None: no answer. Returns whether the port is closed."""
        if listens is False:
            self._keys.add(key)
        else:
            self._keys.discard(key)
        return listens is False

    def only(self, keys: Container[WorkerKey]) -> None:
        """Keep only these lives; the others have been heard again."""
        self._keys = {key for key in self._keys if key in keys}
