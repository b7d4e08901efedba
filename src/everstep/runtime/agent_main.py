"""The process of an agent: `python -m everstep.runtime.agent_main JOINING`, as the job starts it on its own host."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from everstep.base.errors import EverstepError
from everstep.runtime import wire
from everstep.runtime.board import MAX_ROWS, Board, create_board_memory
from everstep.runtime.fork_server_client import ForkServerClient, start_fork_server
from everstep.runtime.host_agent import HostAgent, Left
from everstep.runtime.joining import Joining
from everstep.runtime.process import die_with_parent, raise_descriptor_limit


def take_part(joining: Joining, token: bytes) -> Left:
    """Be the agent of this host until the job is over."""
    raise_descriptor_limit()
    if joining.server is not None:
        for fd in (joining.server.fd, joining.server.board_fd):
            os.set_inheritable(fd, False)
        board, server = Board.attach(joining.server.board_fd), ForkServerClient.adopt(joining.server)
    else:
        board = Board.attach(create_board_memory(MAX_ROWS))
        server = start_fork_server(None, board.fd, joining.threads, joining.preload)
    try:
        return HostAgent(joining, token, board, server).run()
    finally:
        board.close()


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process."""
    try:
        joining = Joining.from_json((sys.argv[1:] if argv is None else argv)[0])
        die_with_parent(joining.parent)
        left = take_part(joining, wire.read_token(Path(joining.token_file)))
    except (EverstepError, OSError) as error:
        print(f"everstep agent: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2
    if left.words:
        print(f"everstep agent: {left.words}", file=sys.stderr, flush=True)
    return left.exit_code


if __name__ == "__main__":
    sys.exit(main())
