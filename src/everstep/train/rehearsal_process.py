"""The process that rehearses a script which is run by itself: `python -m everstep.train.rehearsal_process WHAT [ARGV]`.

Apart from the script's own process, where the user's devices and threads may be in use already.
"""

from __future__ import annotations

import json
import sys

from everstep.runtime.host.fork_server import preload
from everstep.runtime.host.fork_server_client import DEFAULT_PRELOAD
from everstep.runtime.process import die_with_parent
from everstep.train.join import rehearsed_with
from everstep.train.rehearsal import Rehearsed
from everstep.train.rehearsing import perform


def main() -> int:
    """Rehearse the script of the first argument, with the other arguments."""
    said = json.loads(sys.argv[1])
    die_with_parent(int(said.pop("parent")))
    preload(list(DEFAULT_PRELOAD))  # once for all lives
    what = Rehearsed(str(said["script"]), tuple(sys.argv[2:]), str(said["folder"]))
    perform(what, rehearsed_with)
    return 0


if __name__ == "__main__":
    sys.exit(main())
