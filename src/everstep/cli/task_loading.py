"""From the user's TASK to a trainable object: a `Task`, or the path of a script.

The words are taken apart without importing anything; only `load_task` runs the user's code. The command line uses this
to check a job before it starts; every worker uses it to build the job.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from everstep.base.config import Config
from everstep.base.errors import ConfigError, did_you_mean
from everstep.script.importing import importing_from

if TYPE_CHECKING:
    from everstep.train.task import Task


@dataclass(frozen=True)
class TaskSpec:
    """A parsed TASK. `where`: zoo name, dotted module or file; `what`: the zoo task's PATH, or the class."""

    kind: Literal["zoo", "module", "file", "script"]
    where: str
    what: str
    text: str

    @property
    def short(self) -> str:
        """A name fit for a directory."""
        name = self.where if self.kind == "zoo" else Path(self.where).stem if self.kind == "script" else self.what
        return "".join(c if c.isalnum() or c in "-_." else "-" for c in name) or "task"

    @property
    def canonical(self) -> str:
        """The task's name in job.json: the same from wherever the job is started."""
        path = Path(self.what)
        what = path.resolve() if self.kind == "zoo" and path.exists() else self.what
        return f"{self.where}:{what}" if self.what else self.where


def parse_task(text: str) -> TaskSpec:
    """Take a TASK apart: zoo name (`name` or `name:PATH`), `module:Class`, `path/file.py:Class` or `script.py`.

    Raises: ConfigError if it is none of these, or names a file that does not exist.
    """
    head, colon, tail = text.partition(":")
    if head.endswith(".py"):
        path = Path(head)
        if not path.is_file():
            raise ConfigError(f"task {text!r}: there is no file {head}")
        if colon and not tail:
            raise ConfigError(f"task {text!r}: expected a class after the colon, such as {head}:MyTask")
        return TaskSpec("file" if colon else "script", str(path.resolve()), tail, text)
    known = zoo_names()
    if head in known:
        return TaskSpec("zoo", head, tail, text)
    if colon and tail.isidentifier() and all(part.isidentifier() for part in head.split(".")):
        return TaskSpec("module", head, tail, text)
    raise ConfigError(
        f"task {text!r} is no ready task ({', '.join(known)}), no module:Class, no file.py:Class and no "
        f"script.py{did_you_mean(head, known)}"
    )


def is_script(text: str) -> bool:
    """Whether a TASK is a script that calls `everstep.join`, by its name alone."""
    return text.endswith(".py") and ":" not in text


def zoo_names() -> tuple[str, ...]:
    """The ready tasks."""
    from everstep.zoo.registry import names

    return names()


def load_class(spec: TaskSpec) -> type[Task]:
    """Import the class of a task. Runs the user's module.

    Raises: ConfigError, in one line: the failed import and its reason.
    """
    if spec.kind == "zoo":
        from everstep.zoo.registry import load

        return load(spec.where)
    module = _import_file(spec) if spec.kind == "file" else _import_module(spec)
    found = getattr(module, spec.what, None)
    from everstep.train.task import Task

    if found is None:
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Task) and v is not Task]
        has = f"; it has {', '.join(sorted(classes))}" if classes else ""
        raise ConfigError(f"task {spec.text!r}: {spec.where} has no {spec.what!r}{has}")
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(f"task {spec.text!r}: {spec.what} must be a subclass of everstep.Task, got {_kind(found)}")
    return found


def make_task(spec: TaskSpec) -> Task:
    """Import and construct; `config` is not set yet.

    Raises: ConfigError, in one line.
    """
    task_class = load_class(spec)
    try:
        if spec.kind == "zoo" and spec.what:
            return task_class(spec.what)  # type: ignore[call-arg]
        return task_class()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"task {spec.text!r} cannot be constructed: {_one_line(error)}") from error


def load_task(text: str, config: Config) -> Task:
    """The task that TASK names, with its config set.

    Raises: ConfigError, in one line: the failed import and its reason, or that TASK is a script.
    """
    spec = parse_task(text)
    if spec.kind == "script":
        raise ConfigError(f"task {text!r} is a script: expected file.py:Class, module:Class or a ready task")
    task = make_task(spec)
    task.config = config
    return task


def _import_module(spec: TaskSpec) -> ModuleType:
    try:
        with importing_from(Path.cwd()):
            return importlib.import_module(spec.where)
    except Exception as error:
        raise ConfigError(f"task {spec.text!r}: module {spec.where!r} does not import: {_one_line(error)}") from error


def _import_file(spec: TaskSpec) -> ModuleType:
    path = Path(spec.where)
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"everstep_task_{path.stem}"
    loaded = importlib.util.spec_from_file_location(name, path)
    if loaded is None or loaded.loader is None:
        raise ConfigError(f"task {spec.text!r}: {path} cannot be imported as Python")
    module = importlib.util.module_from_spec(loaded)
    sys.modules[name] = module
    try:
        with importing_from(path.parent):
            loaded.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        raise ConfigError(f"task {spec.text!r}: {path.name} does not import: {_one_line(error)}") from error
    return module


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
