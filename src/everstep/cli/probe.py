"""Look at a task before its job starts, in a process of its own: defaults, size of the dataset, units of the model.

Apart from the launcher's process, so that neither torch nor the user's code ever runs there. What the user's code
raises is not reported from here: the workers meet it too, and their logs keep the traceback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from everstep.base.errors import ConfigError
from everstep.cli.job import Request, effective_config
from everstep.cli.task_loading import make_task, parse_task


@dataclass(frozen=True)
class UnitSize:
    """One unit of the model: class name, number of parameter elements."""

    name: str
    parameters: int


@dataclass(frozen=True)
class Probe:
    """What was found. `error`: a ConfigError's line, "" if none. `dataset_size` None: it could not be built."""

    defaults: dict[str, Any] = field(default_factory=dict)
    dataset_size: int | None = None
    units: list[UnitSize] = field(default_factory=list)
    error: str = ""


def probe_task(task: str, request: Request, *, units: bool = False) -> Probe:
    """Run `look` in a process of its own. units: build the model too.

    Raises: ConfigError with the line that the task's import, its defaults or the config deserve.
    """
    read_end, write_end = os.pipe()
    question = json.dumps({"task": task, "request": asdict(request), "units": units})
    try:
        with open(read_end, "rb") as answers:
            process = subprocess.Popen(
                [sys.executable, "-m", "everstep.cli.probe", str(write_end)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(write_end,),
            )
            try:
                os.close(write_end)
                write_end = -1
                process.communicate(question.encode())
                answer = answers.read()
            finally:
                process.kill()
                process.wait()
    finally:
        if write_end >= 0:
            os.close(write_end)
    if not answer:
        raise ConfigError(f"task {task!r}: its process ended while importing it (exit code {process.returncode})")
    data = json.loads(answer)
    data["units"] = [UnitSize(**unit) for unit in data["units"]]
    probe = Probe(**data)
    if probe.error:
        raise ConfigError(probe.error)
    return probe


def look(task_text: str, request: Request, units: bool) -> Probe:
    """Import the task, and build its dataset (and model) under the effective config, in this process."""
    try:
        task = make_task(parse_task(task_text))
        defaults = json.loads(json.dumps(dict(task.defaults)))
        task.config = effective_config(defaults, request)
    except (ConfigError, TypeError, ValueError) as error:
        return Probe(
            error=f"{error}" if isinstance(error, ConfigError) else f"task {task_text!r}: its defaults: {error}"
        )
    size: int | None = None
    sizes: list[UnitSize] = []
    try:
        size = len(task.build_dataset("train"))  # type: ignore[arg-type]
        if units:
            model = task.build_model()
            sizes = [
                UnitSize(type(unit).__name__, sum(p.numel() for p in unit.parameters())) for unit in task.units(model)
            ]
    except ConfigError as error:
        return Probe(error=str(error))
    except Exception:
        pass  # the workers meet it too, and say so
    return Probe(defaults, size, sizes)


def main() -> None:
    """Entry of the process: the question on stdin as JSON, the answer on the descriptor named in argv."""
    question = json.load(sys.stdin)
    asked = question["request"]
    request = Request(
        tuple((name, layer) for name, layer in asked["layers"]), asked["batch_size"], asked["simulate_failure"]
    )
    probe = look(question["task"], request, question["units"])
    with open(int(sys.argv[1]), "w") as answers:
        json.dump(asdict(probe), answers)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
