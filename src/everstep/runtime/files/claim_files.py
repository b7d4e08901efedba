"""Claims: the first process to claim a name wins. A claim is a file made whole and once, so it outlives its maker."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from everstep.base.below import drafted
from everstep.base.given import read_given

FOLDER = "chaos"
_NAME = re.compile(r"[0-9][0-9.-]{0,40}")
_MOST_BYTES = 4096


def claim(run_dir: Path, name: str, text: str) -> tuple[bool, str]:
    """Claim a name: (whether this is its first claim, text of the first claim). Raises: OSError; ValueError."""
    if not _NAME.fullmatch(name) or len(text) > _MOST_BYTES:
        raise ValueError(f"expected the number of a fault, got {name[:40]!r}")
    path = run_dir / FOLDER / name
    with drafted(path, 1, make=True) as draft:
        draft.write_text(text)
        try:
            os.link(draft, draft.with_name(name))
        except FileExistsError:
            return False, read_given(path, _MOST_BYTES, 1).decode(errors="replace")
    return True, text


def forget_claims(run_dir: Path) -> None:
    """Other faults follow, which have the same numbers."""
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)
