"""One life of a script or task that is checked, in a process with other hashes of texts: `python -m
everstep.cli.check_life QUESTION`.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace

from everstep.cli.check import life_of
from everstep.runtime.host.fork_server import preload, redirect_output
from everstep.runtime.host.fork_server_client import DEFAULT_PRELOAD
from everstep.runtime.process import die_with_parent
from everstep.script.watched_life import watch_of
from everstep.train.rehearsal import live


def main() -> int:
    """Live the life that the first argument describes."""
    question = json.loads(sys.argv[1])
    die_with_parent(int(question["parent"]))
    preload(list(DEFAULT_PRELOAD))
    what, body = life_of(question)
    what = replace(what, watch=watch_of(question["watch"]))
    life = str(question["life"])
    redirect_output(what.path(f"{life}.log"))
    with open(1, "w", 1, closefd=False) as out, redirect_stdout(out), redirect_stderr(out):
        live(what, life, body)
    return 0


if __name__ == "__main__":
    sys.exit(main())
