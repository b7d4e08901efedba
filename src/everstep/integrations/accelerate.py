"""`everstep.integrations.accelerate`: an Accelerator that says what to write instead.

A loop of Accelerate's steps its optimizer between two batches. Here the batches of a step are shared by the workers,
and the update follows when all of them are computed, so such a loop cannot be carried exactly, and is refused.
"""

from __future__ import annotations

from typing import Any

from everstep.base.errors import ConfigError
from everstep.script.foreign_trainers import instead_of_accelerate
from everstep.train.script_errors import say_in_one_line


class Accelerator:
    """Stands for accelerate.Accelerator, and refuses: the message has the lines to write."""

    def __init__(
        self, *args: Any, mixed_precision: Any = None, gradient_accumulation_steps: int = 1, **arguments: Any
    ) -> None:
        """Raises: ConfigError, always."""
        say_in_one_line()
        raise ConfigError(instead_of_accelerate(mixed_precision, gradient_accumulation_steps))
