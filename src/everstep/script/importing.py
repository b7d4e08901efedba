"""Where the user's code may import from: its own folder and the working directory, in the processes that load it alone.

Apart because tasks and scripts are loaded in different places. No other process of ours has a folder of the user's on
its path: a user who can write there would run code in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """In the body, imports find files beside the task before installed packages; afterwards, after them."""
    path, known = str(folder), str(folder) in sys.path
    if not known:
        sys.path.insert(0, path)
    try:
        yield
    finally:
        if not known and path in sys.path:
            sys.path.remove(path)
            sys.path.append(path)
        _working_directory_last()


def import_from_script(script: Path) -> None:
    """A script's own folder comes first, as where Python runs it by itself."""
    sys.path.insert(0, str(script.resolve().parent))
    _working_directory_last()


def _working_directory_last() -> None:
    with suppress(OSError):  # it may be gone
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
