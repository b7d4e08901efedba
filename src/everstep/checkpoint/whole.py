"""A checkpoint of a state that one process holds, written at once: for weights that come from elsewhere.

Apart from the writer of running jobs, of which it uses the parts: nobody trains meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from everstep.base.errors import BlobExists, ConfigError, StoreError
from everstep.checkpoint.assembly import Assembly, assemble
from everstep.checkpoint.live import LiveState
from everstep.checkpoint.manifest import JobIdentity, Manifest
from everstep.checkpoint.names import manifest_name
from everstep.checkpoint.part import Base, PartJob, PartReport, PartWriter
from everstep.checkpoint.store import DirectoryStore
from everstep.exact.state import ModelState


def write_whole(
    store: DirectoryStore,
    state: ModelState,
    identity: JobIdentity,
    *,
    step: int = 0,
    reason: str = "",
    application: Mapping[str, bytes] | None = None,
) -> Manifest:
    """Writes the state as the checkpoint of a step; durable when it returns.

    Raises: ConfigError if the store has that step already. StoreError.
    """
    live = LiveState.of(state)
    reports: list[PartReport] = []
    job = PartJob(step, 0, 0, 0, 0, live.n_blocks, True, 0, {"job": identity.job})
    writer = PartWriter(store, job, live, Base, reports.append)
    writer.start()
    writer.join(None)
    assembly = Assembly(step, 0, 1)
    for report in reports:
        assembly.add(report)
    failed = assembly.failed
    if failed is not None or not reports:
        raise StoreError(f"cannot write {store.url}: {failed.reason if failed else 'nothing was written'}")
    facts = {
        "identity": identity.to_dict(),
        "created_unix_ns": time.time_ns(),
        "reason": reason,
        "application": dict(application or {}),
    }
    manifest = assemble(assembly, lambda _: None, facts)
    text = manifest.encode()
    try:
        store.write(manifest_name(step), [text], len(text), if_absent=True)
    except BlobExists:
        for name in assembly.files():
            store.delete(name)
        raise ConfigError(f"{store.url} has a checkpoint of step {step} already: choose another directory") from None
    return manifest
