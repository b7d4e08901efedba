"""The rules that a coordinator gets of a config, to the letter. `pytest --rewrite` writes them; read the difference."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from everstep.base.config import load_config
from everstep.runtime.lead.coordinator_setup import coordinator_config

GOLDEN = Path(__file__).with_name("coordinator_rules.txt")
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it is": ({}, {}),
    "each value another": (
        {
            "workers": 6,
            "spares": 2,
            "min_workers": 3,
            "lanes": 12,
            "stages": 2,
            "on_failure": "shrink",
            "hang_limit_s": 7.5,
            "hang_first_s": 90,
            "quorum_wait_s": 11,
            "heartbeat": {"floor_s": 0.3, "ceiling_s": 9, "interval_s": 0.2, "reconnect_s": 13},
            "checkpoint": {"grace_s": 17},
            "hosts": {"min": 2, "wait_s": 19, "return": "rebalance"},
            "network": {"address": "192.0.2.7"},
            "map": [
                {"hosts": ["far-away", "localhost", "127.0.0.1"]},
                {"hosts": ["far-away", "localhost", "far-away"]},
            ],
        },
        {"term": 3, "sudden": True},
    ),
    "workers of several hosts": ({"workers": 2, "spares": 1, "cell": {"hosts": 2, "fsdp": 2}}, {}),
    "a later term": ({"heartbeat": {"reconnect_s": 5}, "checkpoint": {"enabled": False}}, {"term": 2}),
}


def lines_of(value: Any, path: str) -> list[str]:
    if is_dataclass(value) and not isinstance(value, type):
        return [
            line for field in fields(value) for line in lines_of(getattr(value, field.name), f"{path}.{field.name}")
        ]
    return [f"  {path.removeprefix('.')} = {value!r}"]


def test_the_rules_of_a_coordinator(rewrite: bool) -> None:
    found = []
    for name, (config, more) in CONFIGS.items():
        found += [name, *lines_of(coordinator_config(load_config([("test", config)]), **more), "")]
    text = "\n".join(found) + "\n"
    if rewrite:
        GOLDEN.write_text(text)
    assert GOLDEN.read_text() == text, "other rules; if that is right: --rewrite"
