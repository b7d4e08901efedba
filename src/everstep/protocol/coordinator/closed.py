"""At whose doors nobody listens any more. Pure."""

from __future__ import annotations

from collections.abc import Container

from everstep.base.plan import WorkerKey


class ClosedDoors:
    """Ports of workers without a connection, as the kernels of their hosts have reported them."""

    def __init__(self) -> None:
        self._keys: set[WorkerKey] = set()

    def has(self, key: WorkerKey) -> bool:
        """Whether nobody listens there."""
        return key in self._keys

    def answer(self, key: WorkerKey, listens: bool | None) -> bool:
        """Take the kernel's answer for one port; None: no answer. Returns whether nobody listens there."""
        if listens is False:
            self._keys.add(key)
        else:
            self._keys.discard(key)
        return listens is False

    def only(self, keys: Container[WorkerKey]) -> None:
        """The others have been heard of meanwhile."""
        self._keys = {key for key in self._keys if key in keys}
