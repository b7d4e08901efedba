"""The digest of the job's first lane, by which hosts compare their data before any worker starts, and of the code that
a task imports. Runs in a fork of the fork server, since it runs the task's code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from everstep.base.config import load_config
from everstep.base.errors import ConfigError, EverstepError
from everstep.cli.task_loading import load_task
from everstep.protocol.identity import told

if TYPE_CHECKING:
    from everstep.train.task import Task


def lane_digest(task: Task, dataset: Any) -> str:
    """Digest, 16 digits, of the batch of lane 0 in step 1. Raises: what the task's code raises."""
    from torch import Tensor

    from everstep.data.batch import map_tensors
    from everstep.data.loader import Recipe, fetch
    from everstep.exact.digest import named_digest
    from everstep.train.job_data import read_by_order

    recipe = Recipe(*read_by_order(task.config, dataset), task.collate, task.config.seed)
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, fetch(recipe, 1, 0)[0])
    return named_digest((str(number), tensor) for number, tensor in enumerate(found))[:16]


def look_here(question: dict[str, Any]) -> dict[str, Any]:
    """Answer about a job's task on this host, as JSON: its imported code and its first lane, or the error."""
    from everstep.script.imported import code_here

    try:
        task = load_task(str(question["task"]), load_config([("the job", question["config"])]))
    except (EverstepError, ValueError, KeyError, TypeError) as error:
        return {"error": str(error)}
    try:
        digest = lane_digest(task, task.build_dataset("train"))
    except Exception as error:
        why = error if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        return {"code": told(code_here()), "data_error": " ".join(str(why).split())}
    return {"code": told(code_here()), "lane": digest}
