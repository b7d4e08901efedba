"""Activations between two workers: our channels against plain gloo send and recv, alternating, in the same run.

    python bench/channel.py [--out FILE] [--repeats N] [--sizes 0.25,4,32]

Two processes with one thread each on this host; sizes in MB of float32. One sample is a message there and one back,
halved: what a stage waits for when it has nothing else to do. Every receiver has a fresh tensor each time, as a
training step needs it. Medians and quartiles in milliseconds; ratios are of neighbours in time (ours to gloo's just
before).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from everstep.base.plan import Member, Plan, Seat, WorkerKey
from everstep.base.ports import Hop
from everstep.exact.accumulate import keep_freed_memory
from everstep.exact.layout import GradientLayout
from everstep.parallel.staged import StagedTransport

LANES = 8
KINDS = ("shm", "sockets")
WARM_UP = 5
TARGET = 1.0
NO_GRADIENTS = GradientLayout((), (), 0)


def plan_for(members: list[Member]) -> Plan:
    seats = tuple(Seat(m.worker_id, m.worker_id, "active", tuple(range(LANES))) for m in members)
    return Plan(1, "bench", tuple(members), seats, LANES, stages=2)


def over_channel(transport: StagedTransport, me: int, step: int, given: torch.Tensor) -> None:
    channel = transport.channel
    there, back = Hop(step, "act", 1, 0), Hop(step, "grad", 0, 0)
    if me == 0:
        channel.expect(1, back)
        channel.send(1, there, [given])
        channel.recv(1, back)
    else:
        channel.expect(0, there)
        (found,), _ = channel.recv(0, there)
        channel.send(0, back, [found])


def over_gloo(me: int, given: torch.Tensor) -> None:
    if me == 0:
        dist.send(given, 1)
        dist.recv(torch.empty_like(given), 1)
    else:
        found = torch.empty_like(given)
        dist.recv(found, 0)
        dist.send(found, 0)


def timed(call: Callable[[], None]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) / 2


def work(me: int, sizes: list[float], repeats: int, folder: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as training does
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/default", 2), rank=me, world_size=2)
    transports = {}
    for kind in KINDS:
        store = dist.FileStore(f"{folder}/channel-{kind}", 2)
        transports[kind] = StagedTransport(WorkerKey(me, 0), LANES, lambda: None, kind=kind, store=store, key=b"k" * 32)
    connection.send(Member(me, 0, "here", os.getpid(), "", transports["shm"].segment))
    plan = plan_for(connection.recv())
    for transport in transports.values():
        transport.open(plan, {me: NO_GRADIENTS})
    found: list[dict[str, list[float]]] = []
    step = 0
    for size in sizes:
        given = torch.randn(int(size * 1e6 / 4))
        times: dict[str, list[float]] = {name: [] for name in (*KINDS, *(f"plain_before_{kind}" for kind in KINDS))}
        for k in range(WARM_UP + repeats):
            step += 1
            for kind, transport in transports.items():
                plain = timed(lambda given=given: over_gloo(me, given))  # type: ignore[misc]
                ours = timed(
                    lambda t=transport, step=step, given=given: over_channel(t, me, step, given)  # type: ignore[misc]
                )
                if k >= WARM_UP:
                    times[f"plain_before_{kind}"].append(1e3 * plain)
                    times[kind].append(1e3 * ours)
            dist.barrier()  # in a job, the step's agree
            for transport in transports.values():
                transport.channel.forget(step)
        found.append(times)
    connection.send(found)
    dist.barrier()
    for transport in transports.values():
        transport.close()


def spread(values: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]}


def measure(sizes: list[float], repeats: int) -> list[dict[str, Any]]:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe() for _ in range(2)]
        workers = [
            context.Process(target=work, args=(i, sizes, repeats, folder, ends[i][1]), daemon=True) for i in range(2)
        ]
        for worker in workers:
            worker.start()
        members = [ours.recv() for ours, _ in ends]
        for ours, _ in ends:
            ours.send(members)
        found = ends[0][0].recv()
        for worker in workers:
            worker.join()
    cases = []
    for size, times in zip(sizes, found, strict=True):
        case: dict[str, Any] = {"megabytes": size, "repeats": repeats}
        case["plain_gloo_ms"] = spread([value for kind in KINDS for value in times[f"plain_before_{kind}"]])
        for kind in KINDS:
            case[f"{kind}_ms"] = spread(times[kind])
            pairs = zip(times[kind], times[f"plain_before_{kind}"], strict=True)
            case[f"{kind}_to_plain_gloo"] = spread([ours / plain for ours, plain in pairs])
        case["shm_target"] = TARGET
        cases.append(case)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="also write the JSON here")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--sizes", default="0.25,4,32")
    options = parser.parse_args()
    cases = measure([float(size) for size in options.sizes.split(",")], options.repeats)
    report = {"bench": "channel", "torch": torch.__version__, "cpus": os.cpu_count(), "cases": cases}
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        with open(options.out, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
