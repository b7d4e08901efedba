"""How the coordinator names workers to people. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.base.plan import WorkerKey


def describe(key: WorkerKey) -> str:
    """One life of a worker."""
    return f"worker {key.worker_id} (incarnation {key.incarnation})"


def listed(ids: Iterable[int]) -> str:
    """Worker ids, slots or stages in plain words."""
    return ", ".join(str(i) for i in sorted(ids)) or "none"
