"""`run --dry-run`: the layers of each stage and each worker's part, without starting anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from everstep.base.config import Config, device_of, pool_wish
from everstep.cli.probe import Probe
from everstep.order.ledger import ranges
from everstep.placement.lanes import leaders, place
from everstep.report.words import aligned

_HEADER = ("stage", "units", "layers", "parameters", "leader", "backups", "device", "lanes")


def placement_rows(config: Config, probe: Probe) -> list[dict[str, Any]]:
    """One row per stage: stage, units, parameters, leader, backups with their roles, device, and lanes by worker id."""
    wish = pool_wish(config)
    seats = place(range(config.workers), config.lanes, stages=config.stages, wish=wish)
    named = leaders(seats, wish)
    rows = []
    for stage in range(config.stages):
        pool = [seat for seat in seats if seat.stage == stage]
        wanted = named[stage] if named else None
        leader = pool[0].worker_id if wanted is None else wanted
        own = probe.cut[stage :: config.stages]
        rows.append(
            {
                "stage": stage,
                "parts": own,
                "units": [probe.units[i] for first, last in own for i in range(first, last)],
                "parameters": probe.stage_parameters[stage] if probe.stage_parameters else None,
                "leader": leader,
                "backups": [s.worker_id for s in pool if s.worker_id != leader],
                "roles": {str(s.worker_id): s.role for s in pool},
                "device": _device(config, [s.worker_id for s in pool]),
                "devices": {str(s.worker_id): device_of(config, s.worker_id) for s in pool},
                "ms_per_lane": _measured(probe, own),
                "lanes": {str(seat.worker_id): list(seat.lanes) for seat in pool},
                "cells": {str(seat.worker_id): _cell(config, seat.lanes) for seat in pool},
            }
        )
    return rows


def _cell(config: Config, lanes: Sequence[int]) -> list[dict[str, Any]]:
    """The processes of one worker, the head first: role, host (its number in the worker), lanes in the order of the
    rounds, and shards of the model that it computes of each."""
    cell, found = config.cell, []
    for rank in range(cell.ranks):
        seat, part = divmod(rank, cell.tp)
        own = cell.shards // cell.tp
        shards = list(range(part * own, (part + 1) * own)) if cell.shards > 1 else []
        role = "limb" if rank else "head"
        host = rank * cell.hosts // cell.ranks
        found.append(
            {"rank": rank, "role": role, "host": host, "lanes": list(lanes[seat :: cell.fsdp]), "shards": shards}
        )
    return found


def _device(config: Config, pool: list[int]) -> str:
    """Device of the pool's workers; by worker if they differ: 0:cuda:0 1:cuda:1."""
    found = {i: device_of(config, i) for i in pool}
    if len(set(found.values())) == 1:
        return found[pool[0]]
    return " ".join(f"{i}:{device}" for i, device in found.items())


def _measured(probe: Probe, parts: list[list[int]]) -> float | None:
    """Time of the stage for one lane, forward and backward; None if it was not measured."""
    if not probe.unit_ms:
        return None
    return round(sum(probe.unit_ms[i] for first, last in parts for i in range(first, last)), 3)


def print_placement(config: Config, probe: Probe, *, as_json: bool) -> None:
    """Print the rows, as JSON or as a table."""
    rows = placement_rows(config, probe)
    if as_json:
        print(json.dumps({"kind": "placement", "stages": rows}))
        return
    timed = any(row["ms_per_lane"] is not None for row in rows)
    lines: list[tuple[str, ...]] = [_HEADER + ("ms per lane",) * timed]
    for row in rows:
        parts = ",".join(f"{first}-{last - 1}" if last - first > 1 else f"{first}" for first, last in row["parts"])
        parameters = f"{row['parameters']:,}" if row["parameters"] is not None else "?"
        roles = row["roles"]
        backups = ", ".join(f"{i} {roles[str(i)]}" for i in row["backups"]) or "-"
        lanes = "  ".join(f"{i}:{span(taken)}" for i, taken in row["lanes"].items())
        leader = str(row["leader"]) + (" standby" if roles[str(row["leader"])] == "standby" else "")
        time = (f"{row['ms_per_lane']:.1f}",) if timed else ()
        names = (str(row["stage"]), parts or "?", _layers(row["units"]), parameters)
        lines.append((*names, leader, backups, row["device"], lanes, *time))
    print("\n".join(aligned(lines)))
    if config.cell.ranks > 1:
        for line in _cell_lines(rows, config.cell.hosts):
            print(line)
    batch = config.lanes * config.micro_batch
    print(f"global batch {batch} = {config.lanes} lanes x {config.micro_batch}")
    if config.stages > 1:
        chunks = f", {config.chunks} chunks per stage" if config.chunks > 1 else ""
        again = ", activations computed again" if config.recompute else ""
        print(f"schedule {config.schedule}{chunks}{again}; {config.workers} workers, {config.spares} spares")


def _cell_lines(rows: list[dict[str, Any]], hosts: int) -> list[str]:
    sharded = any(one["shards"] for row in rows for ranks in row["cells"].values() for one in ranks)
    staged = len(rows) > 1
    apart = hosts > 1
    header = ("stage",) * staged + ("cell", "rank", "") + ("host",) * apart + ("lanes",) + ("shards",) * sharded
    lines: list[tuple[str, ...]] = [header]
    for row in rows:
        for worker_id, ranks in row["cells"].items():
            for one in ranks:
                shards = (span(one["shards"]),) if sharded else ()
                names = *(str(row["stage"]),) * staged, worker_id, str(one["rank"]), one["role"]
                where = (f"{one['host'] + 1} of {hosts}",) * apart
                lines.append((*names, *where, span(one["lanes"]), *shards))
    if apart:
        said = f"parameters and the optimizer's state lie once in each cell, divided among its {hosts} hosts"
    else:
        said = "parameters and the optimizer's state lie once in each cell's shared memory"
    return ["", *aligned(lines), said, ""]


def _layers(names: list[str]) -> str:
    """Layer names in short: ["Stem", "Block", "Block"] -> Stem, 2 x Block."""
    runs = [(name, sum(1 for _ in same)) for name, same in groupby(names)]
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in runs) or "?"


def span(lanes: list[int]) -> str:
    """Lanes in short: [0, 1, 2, 5] -> 0-2,5."""
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in ranges(lanes)) or "-"
