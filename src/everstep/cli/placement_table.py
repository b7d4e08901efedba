"""`run --dry-run`: who would do what, without starting anything."""

from __future__ import annotations

import json
from typing import Any

from everstep.base.config import Config
from everstep.base.plan import Seat
from everstep.cli.probe import Probe
from everstep.placement.lanes import place


def placement_rows(config: Config, probe: Probe) -> list[dict[str, Any]]:
    """One row per stage: stage, units, parameters, leader, backups, device, and lanes by worker id."""
    seats = place(range(config.workers), config.lanes)
    stages: dict[int, list[Seat]] = {}
    for seat in seats:
        stages.setdefault(seat.stage, []).append(seat)
    return [
        {
            "stage": stage,
            "units": [unit.name for unit in probe.units],
            "parameters": sum(unit.parameters for unit in probe.units) if probe.units else None,
            "leader": pool[0].worker_id,
            "backups": [seat.worker_id for seat in pool[1:]],
            "device": config.device,
            "lanes": {str(seat.worker_id): list(seat.lanes) for seat in pool},
        }
        for stage, pool in sorted(stages.items())
    ]


def print_placement(config: Config, probe: Probe, *, as_json: bool) -> None:
    """Print the rows, as JSON or as a table."""
    rows = placement_rows(config, probe)
    if as_json:
        print(json.dumps({"kind": "placement", "stages": rows}))
        return
    header = ("stage", "units", "parameters", "leader", "backups", "device", "lanes")
    lines = [header]
    for row in rows:
        units = f"{len(row['units'])}" if row["units"] else "?"
        parameters = f"{row['parameters']:,}" if row["parameters"] is not None else "?"
        lanes = "  ".join(f"{i}:{span(taken)}" for i, taken in row["lanes"].items())
        backups = ",".join(str(i) for i in row["backups"]) or "-"
        lines.append((str(row["stage"]), units, parameters, str(row["leader"]), backups, row["device"], lanes))
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    batch = config.lanes * config.micro_batch
    print(f"global batch {batch} = {config.lanes} lanes x {config.micro_batch}")


def span(lanes: list[int]) -> str:
    """[0, 1, 2, 5] -> 0-2,5."""
    parts: list[list[int]] = []
    for lane in lanes:
        if parts and parts[-1][1] == lane - 1:
            parts[-1][1] = lane
        else:
            parts.append([lane, lane])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in parts) or "-"
