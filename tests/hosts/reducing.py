"""Two workers of a host that reduce made-up gradients with those of other hosts: HOST HOSTS ADDRESS KIND STEPS BLOCKS.

The hosts meet at a store on 10.77.0.1. Each worker prints one line of JSON: whether its results are those of one worker
that adds up everything, and what has left and reached its host in a step, in gradients, by the kernel's count.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "parallel"))

from parallel_cases import fill, layout, plan_of, reference, same_bits, whole

from everstep.base.plan import Member, WorkerKey
from everstep.base.ports import Tag
from everstep.parallel.staged import StagedTransport
from everstep.placement.tree import cover
from everstep.runtime.process import machine

LANES = 8
WORKERS = 2
PORT = 29600


def traffic() -> tuple[int, int]:
    """Bytes that have reached, and left, this host."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[0]), int(numbers.split()[8])
    return 0, 0


def work(host: int, hosts: int, address: str, kind: str, steps: int, blocks: int, turn: int) -> None:
    """One worker."""
    me, everybody = (host - 1) * WORKERS + turn, hosts * WORKERS
    store = TCPStore("10.77.0.1", PORT, everybody, is_master=me == 0, timeout=timedelta(seconds=120))
    shape = layout(blocks)
    name = hashlib.sha256(machine().encode()).hexdigest()[:16]
    transport = StagedTransport(
        WorkerKey(me, 0), LANES, lambda: None, kind=kind, store=store, key=b"k" * 32, machine=name
    )
    store.set(f"segment{me}", f"{os.getpid()} {address}:1 {transport.segment}")
    members = []
    for i in range(everybody):
        pid, there, segment = store.get(f"segment{i}").decode().split(" ", 2)
        members.append(Member(i, 0, there, int(pid), there, segment))
    plan = plan_of(1, members, LANES)
    transport.open(plan, {0: shape})
    before, equal = (0, 0), True
    for step in range(1, steps + 2):
        nodes = cover(plan.lanes_of(me), LANES)
        presence = fill(transport._pools[0], shape, step, nodes)
        offer = transport.offering(0, step)
        for node in nodes if offer is not None else ():
            for first in range(blocks - 1, 0, -2):  # from the last on, as autograd finishes them
                offer(node, max(first - 1, 1), first + 1)
        reduced = transport.reduce(0, step, presence)
        expected, present = reference(shape, LANES, step)
        equal = equal and reduced.presence == present and same_bits(whole(reduced), expected)
        transport.exchange(Tag("agree", step, 0), b"x")
        if step == 1:  # from here on everybody is connected; nobody sends the next step before all have counted
            before = traffic()
            transport.exchange(Tag("counted", step, 0), b"x")
    transport.exchange(Tag("end", steps, 0), b"x")
    after = traffic()
    moved = [(now - then) / steps / (4 * shape.numel) for now, then in zip(after, before, strict=True)]
    line = json.dumps({"worker": me, "equal": equal, "in": moved[0], "out": moved[1]})
    os.write(1, f"{line}\n".encode())  # at once: others write there too
    transport.exchange(Tag("bye", steps, 0), b"x")
    transport.close()


def main(argv: list[str]) -> int:
    """The workers of one host. Returns 0 if all went well."""
    host, hosts, address, kind, steps, blocks = int(argv[0]), int(argv[1]), argv[2], argv[3], int(argv[4]), int(argv[5])
    torch.set_num_threads(1)
    pids = []
    for turn in range(WORKERS):
        pid = os.fork()
        if pid == 0:
            work(host, hosts, address, kind, steps, blocks, turn)
            os._exit(0)
        pids.append(pid)
    return int(any(os.waitpid(pid, 0)[1] for pid in pids))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
