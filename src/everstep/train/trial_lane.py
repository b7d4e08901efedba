"""One lane of a task, computed for real and thrown away: does it end?"""

from __future__ import annotations

import torch

from everstep.data.batch import to_device
from everstep.data.reading import first_samples
from everstep.train.precision import computing, resolve_device
from everstep.train.task import Task


def lane_ends(task: Task, micro_batch: int) -> bool:
    """Whether a forward and a backward pass of so many samples end, and not for want of memory.

    Other errors of the user's code count as an end: workers meet them, too, and report them.
    """
    config = task.config
    try:
        device = resolve_device(config.device)
        model = task.build_model().to(device).train()
        batch = to_device(task.collate(first_samples(task.build_dataset("train"), micro_batch)), device)
        with computing(config, device, task.units(model)):
            loss = task.loss(model, batch)
        torch.autograd.backward(loss[0] if isinstance(loss, tuple) else loss)
    except (MemoryError, torch.OutOfMemoryError):
        return False
    except RuntimeError as error:
        return "alloc" not in str(error).lower()
    except Exception:
        return True
    return True
