"""The names of files in a checkpoint directory. Names also come from manifests and listings of untrusted writers:
any other name is refused.
"""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
LATEST, BEST, PINS = "latest.json", "best.json", "pins.json"
DAMAGED = "damaged-"
"""Prefix of damaged files that were set aside; they are never deleted automatically."""

MAX_STEP = 10**10 - 1
PART_EXAMPLE = "step-0000000010/part-s0-w0-g1.safetensors"

_STEP = re.compile(r"step-([0-9]{10})")
_NUMBER = "(?:0|[1-9][0-9]{0,9})"
_PART = re.compile(
    rf"step-[0-9]{{10}}/part-s{_NUMBER}-w{_NUMBER}(?:-r{_NUMBER})?-g{_NUMBER}(?:-[1-9][0-9]{{0,3}})?\.safetensors"
)
_WORDS = re.compile(r"[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")


def step_name(step: int) -> str:
    """The folder of the checkpoint of a step."""
    return f"step-{step:010d}"


def step_of(name: str) -> int | None:
    """The step whose folder a name is or lies in; None if it is no such name."""
    found = _STEP.fullmatch(name.partition("/")[0])
    return int(found[1]) if found else None


def is_plain(name: str) -> bool:
    """Whether it may be the name of anything here: ASCII words with slashes between them, none of them `.` or `..`."""
    return _WORDS.fullmatch(name) is not None and not {".", ".."} & set(name.split("/"))


def is_part(name: str) -> bool:
    """Whether `part_name` makes such names."""
    return _PART.fullmatch(name) is not None


def is_damaged(name: str) -> bool:
    """Whether it names something that was set aside."""
    return name.partition("/")[2].startswith(DAMAGED)


def manifest_name(step: int) -> str:
    """Path of the manifest of a step."""
    return f"{step_name(step)}/{MANIFEST}"


def part_name(
    step: int, stage: int, worker_id: int, generation: int, attempt: int = 0, cell_rank: int | None = None
) -> str:
    """Where a worker's part is, or that of a rank of it, where its cell has several. Of an older generation it has
    another name: nothing is written over. attempt: for a name that is still free where that is taken (the step is done
    again in the same generation)."""
    again = f"-{attempt}" if attempt else ""
    rank = "" if cell_rank is None else f"-r{cell_rank}"
    return f"{step_name(step)}/part-s{stage}-w{worker_id}{rank}-g{generation}{again}.safetensors"
