"""Length, lanes and micro-batch of a job whose script calls `join`: from its arguments, or its DataLoader's batch size,
below what the user has set. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from everstep.base.config import LENGTHS, Config, with_batch_size
from everstep.base.errors import ConfigError


def sized(
    own: Mapping[str, Any],
    job: Mapping[str, Any],
    explicit: Collection[str] = (),
    *,
    loaded: int | None = None,
    asked: int | None = None,
) -> dict[str, Any]:
    """The script's values with `lanes` and `micro_batch` of the whole global batch.

    own: the script's, by dotted key, each valid by itself. job: the config without them. explicit: keys that the user
    has set, which are not the script's to say; a length, steps or epochs, that the user gives replaces both of the
    script's. loaded: batch size of its DataLoader; asked: samples that the user wants in a global batch, which count
    more.

    Raises: ConfigError if lanes do not divide the batch size.
    """
    values = {key: value for key, value in own.items() if key not in explicit}
    if any(job[key] is not None for key in LENGTHS if key in explicit):
        values = {key: value for key, value in values.items() if key not in LENGTHS}
    times = job["accumulate"] if "accumulate" in explicit else values.get("accumulate", 1)
    each = job["lanes"] if "lanes" in explicit else values.get("lanes", Config.lanes)
    if {"lanes", "accumulate"} <= set(explicit):
        each //= times  # the job's are all of them
    if times > 1 or "lanes" in values:
        values["lanes"] = each * times
    if asked is not None:
        return with_batch_size({"lanes": job["lanes"], **values}, asked)
    if loaded is not None and "micro_batch" not in explicit:
        values["micro_batch"] = _share(loaded, each, own.get("micro_batch"))
    return values


def _share(batch_size: int, lanes: int, said: int | None) -> int:
    """Samples per lane of a DataLoader's batch. said: by the script. Raises: ConfigError."""
    below = batch_size // lanes * lanes
    if below != batch_size:
        sizes = f"{below} or {below + lanes}" if below else f"{lanes}"
        fewer = next(n for n in range(lanes - 1, 0, -1) if batch_size % n == 0)
        more = next((n for n in range(lanes + 1, batch_size + 1) if batch_size % n == 0), None)
        counts = f"{fewer} or {more}" if more is not None else f"{fewer}"
        raise ConfigError(
            f"batch_size: expected a multiple of the {lanes} lanes, which share the DataLoader's batch, got "
            f"{batch_size}: use batch_size={sizes}, or lanes={counts}"
        )
    if said not in (None, batch_size // lanes):
        raise ConfigError(
            f"micro_batch: expected {batch_size // lanes} (the DataLoader's batch_size {batch_size} / {lanes} lanes), "
            f"got {said}: leave it out"
        )
    return batch_size // lanes
