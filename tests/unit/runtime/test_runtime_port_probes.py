"""Whether anybody listens somewhere, as the kernel there says."""

from __future__ import annotations

import asyncio
import socket

from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.types import PortProbed, ProbePort
from everstep.runtime.link.listener_probe import PortProber, listens


def test_a_port_at_which_somebody_listens_one_that_was_given_back_and_one_behind_which_nothing_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as silent:
        port = there.getsockname()[1]
        assert asyncio.run(listens("127.0.0.1", port)) is True
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        full = [socket.socket() for _ in range(4)]  # nobody accepts: those beyond the backlog are not answered
        try:
            for one in full:
                one.setblocking(False)
                one.connect_ex(silent.getsockname())
            assert asyncio.run(listens(*silent.getsockname(), 0.05)) is not False
        finally:
            for one in full:
                one.close()
    assert asyncio.run(listens("127.0.0.1", port)) is False
    assert asyncio.run(listens("256.0.0.1", port)) is None


def test_doors_are_named_by_what_others_say_and_each_is_knocked_at_once_at_a_time() -> None:
    heard: list[PortProbed] = []

    async def probe_port() -> None:
        knocker = PortProber(heard.append)
        with socket.create_server(("127.0.0.1", 0)) as there:
            for worker_id, address in enumerate(
                (f"127.0.0.1:{there.getsockname()[1]}", "", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:-1")
            ):
                for _ in range(3):
                    knocker.probe_port(ProbePort(WorkerKey(worker_id, 0), address))
            while len(heard) < 5:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(probe_port(), 60))
    assert {found.key.worker_id: found.listens for found in heard} == {0: True, 1: None, 2: None, 3: None, 4: None}
