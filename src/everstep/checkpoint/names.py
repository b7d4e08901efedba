"""The names of what a checkpoint directory holds."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
LATEST, BEST, PINS = "latest.json", "best.json", "pins.json"
DAMAGED = "damaged-"
"""Begins the name of what was found damaged and set aside; nothing that bears it is ever deleted by itself."""

_STEP = re.compile(r"step-(\d{10})")


def step_name(step: int) -> str:
    """The folder of the checkpoint of a step."""
    return f"step-{step:010d}"


def step_of(name: str) -> int | None:
    """The step whose folder a name is or lies in; None if it is no such name."""
    found = _STEP.fullmatch(name.partition("/")[0])
    return int(found[1]) if found else None


def manifest_name(step: int) -> str:
    """Where the manifest of a step is."""
    return f"{step_name(step)}/{MANIFEST}"


def part_name(step: int, stage: int, worker_id: int, generation: int, attempt: int = 0) -> str:
    """Where a worker's part is. Of an older generation it has another name: nothing is written over. attempt: for a
    name that is still free where that is taken (the step is done again in the same generation)."""
    again = f"-{attempt}" if attempt else ""
    return f"{step_name(step)}/part-s{stage}-w{worker_id}-g{generation}{again}.safetensors"
