"""A script that a foreign launcher has started several times: each process becomes `everstep run` of it, which makes
one job of them (`cli.adoption`).

Apart from `join` because the process goes on as another program, so that the launcher sees its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from everstep.base.config import check_keys, dotted
from everstep.base.config_fields import WITH_PASSWORD
from everstep.base.errors import ConfigError
from everstep.base.foreign import Foreign, check_numbered, foreign_launcher
from everstep.runtime.process import own_command
from everstep.script.unsupported import refuse_group

RAY_PROGRAM = "default_worker.py"
"""Program that runs Ray's actors and tasks."""
_PRIVATE = ("env.", "notify.")  # may hold secrets, and every user of the host can read a command line
IN_RAY = (
    "everstep.join in a Ray actor or task, where no process can become a worker and several would be as many jobs: "
    "start the job with 'everstep launch ray SCRIPT', or run the script by itself"
)


def become_job(given: Mapping[str, Any], run_dir: Path | None) -> None:
    """Returns if this process stands alone. given: what the script has said to `join`.

    Raises: SystemExit (2) after one line, even if the script catches other exceptions: it must not train.
    """
    try:
        foreign = foreign_launcher(os.environ)
        program = getattr(sys.modules["__main__"], "__file__", None)
        if "ray" in sys.modules and Path(program or "").name == RAY_PROGRAM:
            raise ConfigError(IN_RAY)
        if foreign is not None:
            foreign.check()
            refuse_group()
            _go_on_as(command_of(foreign, program, foreign.script_words(sys.argv[1:]), given, run_dir))
        check_numbered(os.environ)
    except (ConfigError, OSError) as error:
        print(f"everstep.join: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def command_of(
    foreign: Foreign, program: str | None, argv: list[str], given: Mapping[str, Any], run_dir: Path | None
) -> list[str]:
    """The command that each of these processes becomes. program: the file of the running script, None if there is none.

    Raises: ConfigError if it is no script that could be run again, or has named an unknown key.
    """
    check_keys("join", given)
    if program is None:
        raise foreign.refuse("a notebook or an interactive session")
    script = Path(program).resolve()
    if script.suffix != ".py" or not script.is_file() or getattr(sys.modules["__main__"], "__spec__", None) is not None:
        raise foreign.refuse(f"what is no script ({program})")
    values = {key: value for key, value in dotted(given).items() if value is not None}
    said = {key: _said(key, value) for key, value in values.items()}
    private = {
        key: value for key, value in values.items() if key.startswith(_PRIVATE) or WITH_PASSWORD.search(said[key])
    }
    settings = [f"--set={key}={text}" for key, text in said.items() if key not in private]
    where = ["--run-dir", str(run_dir)] if run_dir is not None else []
    unseen = ["--config", _nameless_file(yaml.safe_dump(private))] if private else []
    return own_command("everstep", "run", str(script), *where, *unseen, *settings, *(["--", *argv] if argv else []))


def _said(key: str, value: Any) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except TypeError:
        raise ConfigError(f"{key}: expected a value that YAML has, got {type(value).__name__}") from None


def _nameless_file(text: str) -> str:
    """Path of a file that only this process, and the program that it becomes, can open."""
    fd = os.memfd_create("settings", 0)
    os.write(fd, text.encode())
    return f"/proc/self/fd/{fd}"


def _go_on_as(command: list[str]) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os.execv(command[0], command)
