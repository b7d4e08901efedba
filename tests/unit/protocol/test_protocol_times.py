"""All times and sizes by which the protocol decides, in one table: one that changes by accident shows, also where each
test takes it from the code."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import everstep.protocol

TIMES_S = {
    "coordinator.arrivals": {"START_PATIENCE_NS": 10, "RETRY_NS": 0.2, "RETRY_MOST_NS": 5},
    "coordinator.claims": {"ASK_AGAIN_NS": 1, "GIVE_UP_NS": 15},
    "coordinator.coordinator": {"LATE_NS": 0.5},
    "coordinator.environment": {"MILLISECOND_NS": 0.001, "SECOND_NS": 1},
    "coordinator.joins": {"BATCH_NS": 0.25},
    "coordinator.links": {"WINDOW_NS": 0.1, "REPEAT_NS": 60, "PROBE_NS": 1.5, "APART_NS": 20},
    "coordinator.liveness": {
        "HANG_FLOOR_NS": 10,
        "HANG_UNKNOWN_NS": 60,
        "ALONE_LIMIT_NS": 1,
        "KNOCK_NS": 0.05,
        "STALE_NS": 0.2,
        "READING_NS": 0.02,
    },
    "coordinator.loops_left": {"FOLLOW_NS": 1},
    "coordinator.membership": {"HEARTBEAT_LEAST_NS": 0.2, "HEARTBEAT_MOST_NS": 5},
    "coordinator.port_checks": {"AGAIN_NS": 0.2},
    "coordinator.profiles": {"STANDSTILL_NS": 120, "_LEAD_NS": 0.5},
    "coordinator.user_commands": {"_MOST_GRACE_S": 1_000_000},
    "coordinator.workers": {"KILL_AGAIN_NS": 5},
    "detector": {"_MIN_DEVIATION_NS": 0.01},
    "driver.saver": {"GIVE_UP_S": 300},
    "lease.candidate": {"SECOND_NS": 1, "_AGAIN_NS": 0.05},
    "patience": {
        "PING_S": 0.25,
        "LATE_S": 0.5,
        "LIFELESS_S": 60,
        "FIRST_S": 600,
        "_HEALTHY_S": 60,
        "_LIFE_WINDOW_S": 5,
    },
}
SIZES = {
    "coordinator.plans": {"SMALL_STATE_BYTES": 32 << 20},
    "driver.records": {"SETTING_BYTES": 4},
    "lease.writer": {"MOST_BYTES": 1 << 20},
    "messages": {"MAX_FRAME_BYTES": 64 << 20},
}


def constants(*ends: str) -> dict[str, dict[str, float]]:
    """Numbers with a name that ends so, by module."""
    found: dict[str, dict[str, float]] = {}
    for one in pkgutil.walk_packages(everstep.protocol.__path__, "everstep.protocol."):
        module = importlib.import_module(one.name)
        names = [t.id for node in ast.parse(Path(str(module.__file__)).read_text()).body for t in targets(node)]
        for name in (name for name in names if name.endswith(ends)):
            value = getattr(module, name)
            found.setdefault(one.name.removeprefix("everstep.protocol."), {})[name] = value
    return found


def targets(node: ast.stmt) -> list[ast.Name]:
    return [t for t in node.targets if isinstance(t, ast.Name)] if isinstance(node, ast.Assign) else []


def test_each_time_is_what_the_table_says() -> None:
    known = constants("_NS", "_S")
    in_s = {
        module: {name: value / 1e9 if name.endswith("_NS") else value for name, value in of.items()}
        for module, of in known.items()
    }
    assert in_s == TIMES_S


def test_each_size_is_what_the_table_says() -> None:
    assert constants("_BYTES") == SIZES
