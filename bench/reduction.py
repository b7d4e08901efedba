"""The reduction alone, and agree: our transports against torch's all_reduce over gloo, alternating, in the same run.

    python bench/reduction.py [--out FILE] [--repeats N] [--workers 2,4] [--sizes 25000000,11000000]

Every worker is a process with one thread on this host. An iteration is timed from a common start until the slowest
worker has its result; medians and quartiles over the iterations, in milliseconds. The ratios are those of neighbours in
time (ours to the mean of the all_reduce before it and the one after it), median and quartiles; `cpu` is processor time
of all workers together; `others_busy` the mean number of processors that other programs took meanwhile. Our results lie
in the owners' memory (shared) or in one's own (sockets: our own, in the clear and over TLS), complete
and readable in both cases, as all_reduce's are.
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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from everstep.base.config_keys import TlsConfig
from everstep.base.plan import Member, Plan, Seat, WorkerKey
from everstep.base.ports import Tag, Transport
from everstep.exact.layout import BLOCK_ELEMENTS, Entry, GradientLayout, UnitRange
from everstep.parallel.group import GroupTransport
from everstep.parallel.shared_memory import SharedMemoryTransport
from everstep.placement.tree import cover
from everstep.runtime.link.tls import Tls, shown_by

LANES = 8
WARM_UP = 3
EXCHANGES = 300
TARGETS = {"shared_memory": 0.6, "sockets": 1.2, "sockets_tls": 3.5}
TOKEN = b"k" * 32


def layout(numel: int) -> GradientLayout:
    n = -(-numel // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
    return GradientLayout((Entry("w", 0, "param", (n,), n, 0, (1,), "float32"),), (UnitRange(0, n, n),), n)


def plan_for(members: list[Member]) -> Plan:
    n = len(members)
    lanes = [tuple(range(k * LANES // n, (k + 1) * LANES // n)) for k in range(n)]
    seats = tuple(Seat(m.worker_id, 0, "active", lanes[k]) for k, m in enumerate(members))
    return Plan(1, "bench", tuple(members), seats, LANES)


class Sample(NamedTuple):
    """One iteration of one worker, in seconds."""

    wall: float
    cpu: float


def timed(call: Callable[[], object]) -> Sample:
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return Sample(time.perf_counter() - wall, time.process_time() - cpu)


def timed_reduce(transport: Transport, plan: Plan, me: int, step: int) -> Sample:
    presence = {}
    for node in cover(plan.lanes_of(me), LANES):
        transport.node(step, node).fill_(float(node.lo + step))
        presence[node] = b"\x01"
    return timed(lambda: transport.reduce(step, presence))


def timed_all_reduce(flat: torch.Tensor, step: int) -> Sample:
    flat.fill_(float(step))
    return timed(lambda: dist.all_reduce(flat))


def timed_exchange(transport: Transport, number: int) -> Sample:
    begin = time.perf_counter()
    transport.exchange(Tag("decide", number, 0), b"r" * 300)
    return Sample(time.perf_counter() - begin, 0.0)


def work(me: int, n: int, numel: int, repeats: int, folder: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/default", n), rank=me, world_size=n)
    shape = layout(numel)
    key = WorkerKey(me, 0)

    tls = Tls.of(shown_by(TlsConfig("on"), TOKEN, "127.0.0.1"))

    def store(name: str) -> dist.FileStore:
        return dist.FileStore(f"{folder}/{name}", n)

    transports: dict[str, Transport] = {
        "shared_memory": SharedMemoryTransport(key, shape, LANES, lambda: None),
        "sockets": GroupTransport(key, shape, LANES, store("sockets"), lambda: None, key=TOKEN),
        "sockets_tls": GroupTransport(key, shape, LANES, store("sockets_tls"), lambda: None, key=TOKEN, tls=tls),
    }
    connection.send(Member(me, 0, "here", os.getpid(), "", transports["shared_memory"].segment))
    plan = plan_for(connection.recv())
    whole = time.process_time()
    for transport in transports.values():
        transport.open(plan)
    times: dict[str, list[Sample]] = {name: [] for name in ("all_reduce", *transports)}
    flat = torch.empty(shape.numel)
    for step in range(1, WARM_UP + repeats + 1):
        for name, transport in transports.items():
            times["all_reduce"].append(timed_all_reduce(flat, step))
            times[name].append(timed_reduce(transport, plan, me, step))
    times["all_reduce"].append(timed_all_reduce(flat, step))
    found = {
        name: values[WARM_UP * (len(transports) if name == "all_reduce" else 1) :] for name, values in times.items()
    }
    for name, transport in transports.items():
        dist.barrier()
        found[f"exchange_{name}"] = [timed_exchange(transport, k) for k in range(EXCHANGES)]
    found["whole"] = [Sample(0.0, time.process_time() - whole)]
    connection.send(found)
    dist.barrier()
    for transport in transports.values():
        transport.close()


def ratios(figures: dict[str, list[float]], name: str, k: int) -> list[float]:
    """Ours to the all_reduces just before and just after; `k`: the transport's place in the alternation."""
    base = figures["all_reduce"]
    n = len(TARGETS)
    return [2 * ours / (base[i * n + k] + base[i * n + k + 1]) for i, ours in enumerate(figures[name])]


def spread(values: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]}


def busy_s() -> float:
    """Processor seconds that all programs of this machine have taken so far."""
    with open("/proc/stat") as lines:
        fields = [int(field) for field in lines.readline().split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:7])) / os.sysconf("SC_CLK_TCK")


def measure(n: int, numel: int, repeats: int) -> dict[str, Any]:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe() for _ in range(n)]
        workers = [
            context.Process(target=work, args=(i, n, numel, repeats, folder, ends[i][1]), daemon=True) for i in range(n)
        ]
        for worker in workers:
            worker.start()
        members = [ours.recv() for ours, _ in ends]
        for ours, _ in ends:
            ours.send(members)
        all_programs, begin = busy_s(), time.monotonic()
        found = [ours.recv() for ours, _ in ends]
        own = sum(sample.cpu for f in found for sample in f.pop("whole"))
        others = (busy_s() - all_programs - own) / (time.monotonic() - begin)
        for worker in workers:
            worker.join()
    report: dict[str, Any] = {"workers": n, "float32_elements": numel, "repeats": repeats}
    report["others_busy"] = round(others, 2)
    wall = {
        name: [1e3 * max(s.wall for s in of) for of in zip(*(f[name] for f in found), strict=True)] for name in found[0]
    }
    cpu = {
        name: [1e3 * sum(s.cpu for s in of) for of in zip(*(f[name] for f in found), strict=True)] for name in found[0]
    }
    for name, values in wall.items():
        report[name + "_ms"] = spread(values)
    for k, (name, target) in enumerate(TARGETS.items()):
        report[f"{name}_to_all_reduce"] = spread(ratios(wall, name, k))
        report[f"{name}_to_all_reduce_cpu"] = spread(ratios(cpu, name, k))
        report[f"{name}_target"] = target
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="also write the JSON here")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--sizes", default="25000000,11000000")
    options = parser.parse_args()
    cases = []
    for numel in map(int, options.sizes.split(",")):
        for n in map(int, options.workers.split(",")):
            cases.append(measure(n, numel, options.repeats))
    report = {"bench": "reduction", "torch": torch.__version__, "cpus": os.cpu_count(), "cases": cases}
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        with open(options.out, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
