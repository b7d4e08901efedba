"""Who was first: claims that survive whoever made them, each a file that is made whole and once."""

from __future__ import annotations

import os
import re
from pathlib import Path

from everstep.base.given import read_given
from everstep.runtime.address import drafted

FOLDER = "chaos"
_NAME = re.compile(r"[0-9][0-9.-]{0,40}")
_MOST_BYTES = 4096


def claim(run_dir: Path, name: str, text: str) -> tuple[bool, str]:
    """Whether this is the first claim of that name, and what the first one said. Raises: OSError; ValueError."""
    if not _NAME.fullmatch(name) or len(text) > _MOST_BYTES:
        raise ValueError(f"expected the number of a fault, got {name[:40]!r}")
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    with drafted(path) as draft:
        draft.write_text(text)
        try:
            os.link(draft, path)
        except FileExistsError:
            return False, read_given(path, _MOST_BYTES).decode(errors="replace")
    return True, text
