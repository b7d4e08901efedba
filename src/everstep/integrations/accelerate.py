"""`everstep.integrations.accelerate`: an Accelerator that says what to write instead.

A loop of Accelerate's steps its optimizer between two batches. Here the batches of a step are shared by the workers,
and the update follows when all of them are computed, so such a loop cannot be carried exactly, and is refused.
"""

from __future__ import annotations

from typing import Any

from everstep.base.errors import ConfigError
from everstep.train.script_errors import say_in_one_line

_PRECISIONS = {"fp16": "fp16", "bf16": "bf16"}


class Accelerator:
    """Stands for accelerate.Accelerator, and refuses: the message has the lines to write."""

    def __init__(
        self, *args: Any, mixed_precision: Any = None, gradient_accumulation_steps: int = 1, **arguments: Any
    ) -> None:
        """Raises: ConfigError, always."""
        say_in_one_line()
        raise ConfigError(instead_of_accelerate(mixed_precision, gradient_accumulation_steps))


def instead_of_accelerate(mixed_precision: Any = None, accumulation: Any = 1) -> str:
    """What to write in place of a loop of Accelerate's with these arguments, in one line."""
    more = f", accumulate={accumulation}" if type(accumulation) is int and accumulation > 1 else ""
    if isinstance(mixed_precision, str) and mixed_precision in _PRECISIONS:
        more += f", precision={_PRECISIONS[mixed_precision]!r}"
    return (
        "accelerate.Accelerator is not carried, because its loop updates between batches that workers share here: "
        "instead of prepare, accumulate, clip_grad_norm_, step and zero_grad write 'run = everstep.join(model, "
        f"optimizer, dataloader, scheduler=scheduler{more}, clip_norm=1.0, epochs=3)', 'for step in run:', 'for batch "
        "in step:', 'step.backward(loss)'; for gather_for_metrics run.evaluate, for is_main_process run.is_main; leave "
        "out unwrap_model and save_state"
    )
