"""Training over a wire: two network-namespace hosts, against DistributedDataParallel on gloo or at a distance.

    python bench/wire.py [--models resnet18,transformer-25m] [--rates 1000,100] [--workers 1,2] [--rounds 3]
                         [--tls off] [--delays 5,25] [--out FILE]

Needs root.
- rates (Mbit/s): each host's link takes so much (tbf). Fresh jobs in turn: ours, then DDP with the same micro-batches
  under `no_sync`, one intra-op thread per worker, our allocator settings. The ratio of a round is that of the medians
  of its steps; bytes are what the kernel counts as sent at a host's link, per step, beside what a ring of all workers
  sends of gradients over it: 2 (n - 1) / n of them.
- delays (ms, each way): small models (0.1M and 0.9M parameters) over links that the fault `slow` delays, against the
  same without delay; told as round trips by which a step is longer.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measure import BENCH, committed, environment, machine, read_events, spread, write_report
from models import MODELS

sys.path.insert(0, str(BENCH.parent / "tests" / "hosts"))
from net import Host, Net, why_not

from everstep.protocol.messages import StrikeNow
from everstep.runtime.host.packet_faults import harm

PORT, WARM_UP, LIMIT_S = 29400, 3, 300.0
EVERSTEP = [sys.executable, "-P", "-m", "everstep"]
TARGETS = {"1000": 0.95, "100": 1.02, "two workers per host": 0.7, "bytes": 1.01, "round trips": 2.0}


def sent_bytes(host: Host) -> int:
    """So far, by its link."""
    return int(host.run("cat", "/sys/class/net/eth0/statistics/tx_bytes").stdout)


def limit(host: Host, mbit: int) -> None:
    """What its link takes at most of what it sends."""
    shape = f"tc qdisc replace dev eth0 root tbf rate {mbit}mbit burst 64kb latency 50ms"
    subprocess.run(["ip", "netns", "exec", host.namespace, *shape.split()], check=True)


@contextlib.contextmanager
def delayed(host: Host, delay_ms: float) -> Iterator[None]:
    """What it sends takes so long; 0: as long as ever."""
    if not delay_ms:
        yield
        return
    message = StrikeNow(number=1, kind="slow", for_s=10 * LIMIT_S, by_s=delay_ms / 1e3)
    with host.inside():
        undone = harm(message, host.address)
    try:
        yield
    finally:
        with host.inside():
            undone.close()


def measured(hosts: Net, ends_ns: Callable[[], list[int]], steps: int, alive: Callable[[], bool]) -> dict[str, float]:
    """The median of the steps after the first ones, and the bytes that the host which sends more sends in one."""
    marks: list[tuple[int, list[int]]] = []
    end_s = time.monotonic() + LIMIT_S
    while (done := len(ends_ns())) <= WARM_UP + steps:
        if time.monotonic() > end_s or not alive():
            raise SystemExit(f"{done} steps in {LIMIT_S:.0f} s, {WARM_UP + steps} were expected")
        if done > WARM_UP and (not marks or marks[-1][0] < done):
            marks.append((done, [sent_bytes(host) for host in hosts.hosts]))
        time.sleep(0.02)
    times = ends_ns()[WARM_UP : WARM_UP + steps + 1]
    (first, before), (last, after) = marks[0], marks[-1]
    most = max(b - a for a, b in zip(before, after, strict=True)) / max(1, last - first)
    return {"step_s": statistics.median((b - a) / 1e9 for a, b in itertools.pairwise(times)), "sent_mb": most / 1e6}


def ours(hosts: Net, folder: Path, model: str, workers: int, steps: int, tls: str) -> dict[str, float]:
    """One job of ours, the head on the first host."""
    run_dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
    head, log, slots = hosts.hosts[0], run_dir.with_suffix(".log"), str(workers // 2)
    setting = environment(EVERSTEP_TOKEN=secrets.token_hex(32))
    settings: dict[str, Any] = {
        "steps": WARM_UP + steps + 3,
        "security.tls.mode": tls,
        "checkpoint.enabled": "false",
    }
    settings["min_workers"] = workers
    task = f"{BENCH / 'models.py'}:{MODELS[model].__name__}"
    command = [*EVERSTEP, "run", task, "--run-dir", str(run_dir), "--workers", str(workers), "--json"]
    command += ["--listen", f"{head.address}:{PORT}", "--slots", slots]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    process = head.start(command, log, setting)
    agent = [*EVERSTEP, "agent", "--join", f"{head.address}:{PORT}", "--slots", slots]
    agent += ["--set", f"security.tls.mode={tls}"]
    hosts.hosts[1].start(agent, log, setting)
    try:
        return measured(
            hosts,
            lambda: [at for _, at in committed(read_events(run_dir))],
            steps,
            lambda: process.poll() in (None, 0),
        )
    except SystemExit as error:
        raise SystemExit(f"{error}\n{log.read_text()[-3000:]}") from None
    finally:
        for host in hosts.hosts:
            host.kill()


def theirs(hosts: Net, folder: Path, model: str, workers: int, steps: int) -> dict[str, float]:
    """One job of DistributedDataParallel."""
    ends = Path(tempfile.mkdtemp(dir=folder)) / "ends"
    log = ends.with_suffix(".log")
    defaults = MODELS[model].defaults
    lanes, batch = defaults["lanes"], defaults["lanes"] * defaults["micro_batch"]
    command = [sys.executable, str(BENCH / "ddp_peer.py"), "--model", model, "--passes", str(lanes // workers)]
    command += ["--global-batch", str(batch), "--ends", str(ends)]
    shared = {"MASTER_ADDR": hosts.hosts[0].address, "MASTER_PORT": str(PORT), "WORLD_SIZE": str(workers)}
    ranks = []
    for rank in range(workers):
        mine = environment(**shared, RANK=str(rank), GLOO_SOCKET_IFNAME="eth0")
        ranks.append(hosts.hosts[2 * rank // workers].start(command, log, mine))
    try:
        return measured(
            hosts,
            lambda: [int(t) for t in ends.read_text().split("\n")[:-1]] if ends.exists() else [],
            steps,
            lambda: all(rank.poll() is None for rank in ranks),
        )
    except SystemExit as error:
        raise SystemExit(f"{error}\n{log.read_text()[-3000:]}") from None
    finally:
        for host in hosts.hosts:
            host.kill()


def against_ddp(folder: Path, model: str, workers: int, mbit: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row: both in turn, over links of that rate."""
    size_mb = 4e-6 * sum(p.numel() for p in MODELS[model]().build_model().parameters())
    rows: list[dict[str, float]] = []
    for number in range(options.rounds):
        found: dict[str, dict[str, float]] = {}
        for name in ("ours", "ddp") if number % 2 == 0 else ("ddp", "ours"):
            net = Net(2, f"{options.name}r{number}")
            try:
                for host in net.hosts:
                    limit(host, mbit)
                if name == "ours":
                    found[name] = ours(net, folder, model, workers, options.steps, options.tls)
                else:
                    found[name] = theirs(net, folder, model, workers, options.steps)
            finally:
                net.close()
        rows.append({f"{who}_{what}": value for who, figures in found.items() for what, value in figures.items()})
        rows[-1]["ratio"] = rows[-1]["ours_step_s"] / rows[-1]["ddp_step_s"]
        print(f"{model}, {workers} workers, {mbit} Mbit/s: {rows[-1]}", file=sys.stderr, flush=True)
    return {
        "model": model,
        "workers_per_host": workers // 2,
        "mbit": mbit,
        "tls": options.tls,
        "ring_mb": round(size_mb * 2 * (workers - 1) / workers, 2),
        **{key: spread([row[key] for row in rows]) for key in rows[0]},
    }


def at_a_distance(folder: Path, model: str, delay_ms: float, options: argparse.Namespace) -> dict[str, Any]:
    """One row: with the delay and without, in turn."""
    more: list[float] = []
    for number in range(options.rounds):
        step_s = {}
        for ms in (0.0, delay_ms) if number % 2 == 0 else (delay_ms, 0.0):
            net = Net(2, f"{options.name}d{number}")
            try:
                with delayed(net.hosts[0], ms), delayed(net.hosts[1], ms):
                    step_s[ms] = ours(net, folder, model, 2, 5 * options.steps, options.tls)["step_s"]
            finally:
                net.close()
        more.append((step_s[delay_ms] - step_s[0.0]) / (2e-3 * delay_ms))
        print(f"{model}, {delay_ms} ms: {step_s}", file=sys.stderr, flush=True)
    return {"model": model, "delay_ms": delay_ms, "tls": options.tls, "longer_by_round_trips": spread(more)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet18,transformer-25m")
    parser.add_argument("--rates", default="1000,100")
    parser.add_argument("--workers", default="1,2", help="per host")
    parser.add_argument("--delays", default="5,25")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tls", default="off", choices=("off", "auto"))
    parser.add_argument("--name", default=f"w{secrets.token_hex(2)}", help="of the namespaces")
    parser.add_argument("--out")
    options = parser.parse_args()
    why = why_not()
    if why:
        print(f"cannot measure hosts: {why}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [
            against_ddp(folder, model, 2 * int(workers), int(mbit), options)
            for model, workers, mbit in itertools.product(
                *(filter(None, words.split(",")) for words in (options.models, options.workers, options.rates))
            )
        ]
        far = [
            at_a_distance(folder, model, float(delay), options)
            for delay in filter(None, options.delays.split(","))
            for model in ("transformer-tiny", "transformer-small")
        ]
    write_report({"bench": "wire", **machine(), "targets": TARGETS, "rows": rows, "delayed": far}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
