"""Calling the user's code: what it raises becomes one line that names the method and the line.

Apart because everybody who calls a task does it in this way, the command line included.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

from everstep.base.errors import EverstepError, TaskError
from everstep.train.task import Task

_PACKAGE = str(Path(__file__).resolve().parents[1])


def calling(task: Task, method: str, *arguments: Any) -> Any:
    """Call one of the task's methods.

    Raises: TaskError from whatever it raised, naming the method and the user's line.
    """
    try:
        return getattr(task, method)(*arguments)
    except EverstepError:
        raise
    except Exception as error:
        name = f"{type(task).__name__}.{method}"
        raise TaskError(f"{name} raised {type(error).__name__}: {error}{where(error)}") from error


def where(error: BaseException) -> str:
    """The innermost line of the user's own code that an exception has passed, as " (file.py:12)"; else of any code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((_PACKAGE, "<")) and "site-packages" not in f.filename]
    found = (own or list(frames))[-1:]
    return f" ({os.path.basename(found[0].filename)}:{found[0].lineno})" if found else ""
