"""Workers of several processes (cells): their bits, what a failure of one process costs, and their pace.

    python bench/cells.py [--rows gradients,kill,stop,cut,hop,fsdp,tp,shards,three,memory,hub] [--out FILE]
                          [--rounds 5] [--seconds 2] [--jobs 5] [--model transformer-small] [--wide transformer-25m]

- gradients: the state after `--steps` steps of a job with cells of 2 and 4 processes, and of one process (`cell.fsdp`);
  the same of `cell.shards=4` on 1, 2 and 4 processes; and the gradients of one lane by 2 and by 4 shards against the
  unsharded model's, in this process: norm of the difference to the norm, of all of them together; beside it how far the
  unsharded model's own are from those in float64.
- kill: SIGKILL of a limb, to the next committed step, with a spare cell; beside it the same of plain workers. `stop`:
  the same with SIGSTOP, `hang_limit_s=2`.
- cut: the whole of another cell is killed while limbs compute and reduce: from the coordinator's plan until no limb of
  the surviving cell is in a pass any more, beside a pass of the same job (its median). hop: the same of a job of 2
  stages x 2 x cells of 2, whose surviving cells wait for what the dead one would have sent.
- fsdp: step of a cell of two against FSDP2 that reduces each micro-batch. tp: of two processes with two shards against
  torch's tensor parallelism. shards: of one process with four shards against one that is not cut, which has all
  gradients, and weights that are not cut along rows, copied once per lane: samples of few tokens (`--micro-batch`)
  show that most.
- three: 2 stages x 2 lanes at a time x 2 shards, blocks that wait, against torch's pipelining, FSDP2 and TP together.
- memory: `memory.py`'s: a cell of four processes against what `plan memory` says, and against DDP with four.
- hub: from the command line to the first step of a GPT-2 with fresh weights, beside transformers' Trainer.

Jobs that are compared in pace take turns on the machine (`turns.py`). Everything is a row by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers

from everstep.base.config import load_config
from everstep.cli.task_loading import load_task
from everstep.exact.seeding import build_seed, seed_all
from everstep.runtime.host.board import Board, Pulse
from everstep.train.stage import build_model, cut_into_shards
from measure import (
    BENCH,
    Event,
    EverstepJob,
    committed,
    descendants,
    environment,
    free_port,
    machine,
    spread,
    write_report,
)
from memory import measure_ddp, measure_ours, plan
from models import MODELS, WaitingTransformer
from turns import Job, columns, everstep_job, ranks_job, take_turns

WARM_UP = 3
CELL_WRAP = "200000"
HANG_LIMIT_S = 2.0
FIRST_FAULT, EVERY = 8, 12
PHASES = ("forward", "backward", "reduce", "update")
LOOK_S = 0.0005
_IDLE = ("idle", "starting", "stall", "settle", "heal", "finish")
"""Phases in which a process computes nothing."""


def task_of(model: str) -> str:
    """A model of `models.py`, as a command has it."""
    return f"{BENCH / 'models.py'}:{MODELS[model].__name__}"


def verdict(target: Any, measured: float, *, met: bool, **more: Any) -> dict[str, Any]:
    """A row: what was to be reached, what was measured, and the raw figures."""
    return {"target": target, "measured": round(measured, 4), "met": met, **more}


# ---- bits


def hub_task(folder: Path, kind: str, width: int, layers: int) -> tuple[str, dict[str, Any]]:
    """A fresh Llama or GPT-2 on made-up text: the task, and its settings."""
    common = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=4, n_positions=64, **common)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    else:
        sizes = {"intermediate_size": 2 * width, "num_attention_heads": 4, "num_key_value_heads": 4}
        config = transformers.LlamaConfig(
            hidden_size=width, num_hidden_layers=layers, max_position_embeddings=64, **sizes, **common
        )
    (folder / kind).mkdir(exist_ok=True)
    config.save_pretrained(folder / kind)
    text = folder / "text"
    text.write_bytes(bytes(32 + (k * k // 7) % 90 for k in range(200_000)))
    return f"hf:{folder / kind / 'config.json'}", {"task.data": str(text)}


def digest(folder: Path, name: str, task: str, settings: dict[str, Any], steps: int) -> str:
    """Of the state that a job ends with."""
    job = EverstepJob(task, folder / name, "--workers", "1", "--steps", str(steps), settings=settings)
    job.wait()
    return str(json.loads((job.run_dir / "final" / "digest.json").read_text())["state"])


def lane_gradients(name: str, settings: dict[str, Any], shards: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Of one lane of a fresh model, by parameter, in this process."""
    task = load_task(name, load_config([("bench", {**settings, "cell.shards": shards})]))
    seed_all(build_seed(0))
    model = build_model(task, task.config, torch.device("cpu"))[0].to(dtype)
    cut_into_shards(task, model, task.config)
    data: Any = task.build_dataset("train")
    loss = task.loss(model, task.collate([data[k] for k in range(4)]))
    (loss[0] / loss[1] if isinstance(loss, tuple) else loss).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Norm of the difference to the norm: of all gradients together, and of the worst parameter."""
    squares = {key: ((found[key] - one).square().sum(), one.square().sum()) for key, one in wanted.items()}
    above, below = (sum(float(pair[k]) for pair in squares.values()) for k in (0, 1))
    worst = max(float(a / b) for a, b in squares.values() if b > 0)
    return {"all": (above / below) ** 0.5, "worst": worst**0.5}


def shard_errors(name: str, settings: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By shards against whole; and, beside them, how far the whole itself is from float64."""
    whole = lane_gradients(name, settings, 1, torch.float32)
    found = {f"{n} shards": apart(lane_gradients(name, settings, n, torch.float32), whole) for n in (2, 4)}
    return {**found, "whole, to float64": apart(whole, lane_gradients(name, settings, 1, torch.float64))}


def gradients(options: argparse.Namespace) -> dict[str, Any]:
    """Equal bits in every shape."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        for kind in options.kinds.split(","):
            task, more = hub_task(folder, kind, 64, 2) if kind not in MODELS else (task_of(kind), {})
            job = {"lanes": 8, "micro_batch": 2, "meta_init": False, **more}
            states = {
                f"fsdp {ranks}": digest(folder, f"{kind}-{ranks}", task, {**job, "cell.fsdp": ranks}, options.steps)
                for ranks in (1, 2, 4)
            }
            row: dict[str, Any] = {"fsdp": "bitwise" if len(set(states.values())) == 1 else states}
            if kind != "resnet18":
                cut = {
                    f"tp {ranks}": digest(
                        *(folder, f"{kind}-tp-{ranks}", task, {**job, "cell.shards": 4, "cell.tp": ranks}),
                        options.steps,
                    )
                    for ranks in (1, 2, 4)
                }
                row["between_degrees"] = "bitwise" if len(set(cut.values())) == 1 else cut
                row["errors"] = shard_errors(task, job)
            found[kind] = row
            print(kind, row, file=sys.stderr, flush=True)
    worst = max(
        (row["errors"][f"{n} shards"]["all"] for row in found.values() if "errors" in row for n in (2, 4)), default=0.0
    )
    equal = all(row["fsdp"] == row.get("between_degrees", "bitwise") == "bitwise" for row in found.values())
    return {"target": "bitwise; 1e-6", "measured": worst, "met": equal and worst <= 1e-6, "models": found}


# ---- faults


def faults(options: argparse.Namespace, kind: str, *, cells: bool) -> tuple[list[float], list[float], set[str]]:
    """Seconds from each fault to the next step, ordinary steps, and the final digests."""
    ranks, after, ordinary, digests = 2 if cells else 1, list[float](), list[float](), set[str]()
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        for number in range(options.jobs):
            place = "/1" if cells else ""
            scripted = [
                f"{kind}:target=worker:{k}{place},at={FIRST_FAULT + EVERY * k}"
                + (f",phase={PHASES[(k + number) % len(PHASES)]}" if kind == "kill" else "")
                for k in range(2)
            ]
            settings = {"cell.fsdp": ranks, "lanes": 8, "micro_batch": 1, "max_restarts": 1000}
            settings["hang_limit_s"] = HANG_LIMIT_S if kind == "stop" else 60
            more = ("--workers", "2", "--spares", "1", "--chaos", "; ".join(scripted))
            job = EverstepJob(
                task_of(options.model), Path(name) / f"{number}", "--steps", "40", *more, settings=settings
            )
            job.wait()
            events = job.events()
            struck = [e for e in events if e["kind"] == "fault_injected"]
            after += [next_step_s(events, fault) for fault in struck]
            times = [(b - a) / 1e9 for (_, a), (_, b) in pairwise(committed(events)[2 : FIRST_FAULT - 1])]
            ordinary.append(statistics.median(times))
            digests.add(json.loads((job.run_dir / "final" / "digest.json").read_text())["state"])
            print(f"{kind}, cells {cells}: {after[-len(struck) :]}", file=sys.stderr, flush=True)
    return after, ordinary, digests


def next_step_s(events: list[Event], fault: Event) -> float:
    """To the first step that could not be decided without the survivors' recovery."""
    first = fault["step"] + (fault["phase"] == "update")
    return (
        float(
            min(t for step, t in committed(events) if step >= first and t > fault["time_unix_ns"])
            - fault["time_unix_ns"]
        )
        / 1e9
    )


def fault_row(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Cells beside plain workers, in turn."""
    cells, step, ends = faults(options, kind, cells=True)
    plain, plain_step, plain_ends = faults(options, kind, cells=False)
    most = 1.5 * statistics.median(plain) + 1.0 if kind == "kill" else statistics.median(plain) + 1.0
    raw = {"cells_s": cells, "plain_s": plain, "step_s": step, "plain_step_s": plain_step}
    bits = "equal" if len(ends | plain_ends) == 1 else "DIFFERENT"
    measured = statistics.median(cells)
    return verdict(f"<= {most:.3f} s", measured, met=measured <= most and bits == "equal", bits=bits, **raw)


class Eyes:
    """Looks at the phases of all processes of a job's workers, in a thread, until it is closed. seen: (unix ns, worker,
    rank, phase) whenever one has changed."""

    def __init__(self, job: EverstepJob, workers: int, ranks: int) -> None:
        self.seen: list[tuple[int, int, int, Pulse]] = []
        self._job, self._places = job, [(w, r) for w in range(workers) for r in range(ranks)]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _board(self) -> Board | None:
        for pid in descendants(self._job.process.pid):
            with contextlib.suppress(OSError):
                for fd in Path(f"/proc/{pid}/fd").iterdir():
                    if "everstep-board" in str(fd.readlink()):
                        return Board.attach(os.open(fd, os.O_RDWR | os.O_CLOEXEC))
        return None

    def _run(self) -> None:
        board = None
        while board is None and not self._end.wait(0.02):
            board = self._board()
        last: dict[tuple[int, int], tuple[str, int]] = {}
        while board is not None and not self._end.wait(LOOK_S):
            for place in self._places:
                pulse = board.row(*place).read()
                key = pulse.phase, pulse.lanes
                if last.get(place) != key:
                    last[place] = key
                    self.seen.append((time.time_ns(), *place, pulse))

    def close(self) -> None:
        """No more looks."""
        self._end.set()
        self._thread.join()

    def freed_s(self, worker: int, rank: int, after_ns: int) -> float:
        """From then until this process is in no pass."""
        of = [(at, pulse.phase) for at, w, r, pulse in self.seen if (w, r) == (worker, rank)]
        before = [phase for at, phase in of if at <= after_ns]
        if before and before[-1] in _IDLE:
            return 0.0
        return next(at - after_ns for at, phase in of if at > after_ns and phase in _IDLE) / 1e9

    def pass_s(self, worker: int, rank: int) -> float:
        """The median pass, forward or backward, of a process."""
        of = [(at, pulse.phase) for at, w, r, pulse in self.seen if (w, r) == (worker, rank)]
        return statistics.median((b - a) / 1e9 for (a, phase), (b, _) in pairwise(of) if phase in PHASES[:2])


def cut_row(options: argparse.Namespace, stages: int) -> dict[str, Any]:
    """One cell dies while others compute, or wait for it."""
    freed: list[float] = []
    passes: list[float] = []
    model = "transformer-waiting" if stages > 1 else options.model
    workers = 2 * stages
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        for number in range(options.jobs):
            settings = {"cell.fsdp": 2, "stages": stages, "lanes": 8, "micro_batch": 1, "max_restarts": 100}
            more = ("--workers", str(workers), "--steps", "9")
            more += ("--chaos", f"kill:target=worker:0/1,at=5,phase={('forward', 'backward')[number % 2]}")
            job = EverstepJob(task_of(model), Path(name) / f"{number}", *more, settings=settings)
            eyes = Eyes(job, workers, 2)
            job.wait()
            eyes.close()
            (fault,) = [e for e in job.events() if e["kind"] == "fault_injected"]
            plans = [e for e in job.events() if e["kind"] == "generation_started"]
            (cut_ns, *_) = [e["time_unix_ns"] for e in plans if e["time_unix_ns"] > fault["time_unix_ns"]]
            freed += [eyes.freed_s(worker, 1, cut_ns) for worker in range(1, workers)]
            passes.append(max(eyes.pass_s(worker, 1) for worker in range(1, workers)))
            print(f"{stages} stages: freed after {freed[1 - workers :]} s", file=sys.stderr, flush=True)
    one = 4 * WaitingTransformer.wait_s if stages > 1 else statistics.median(passes)  # backward, of two blocks
    most, limit = max(freed), one + (0.050 if stages > 1 else 0.005)
    told = f"a pass ({one:.4f} s) + {50 if stages > 1 else 5} ms"
    return verdict(told, most, met=most <= limit, freed_s=freed, pass_s=passes, median_s=statistics.median(freed))


# ---- pace


def paced(ours: Job, theirs: Job, limit: float, options: argparse.Namespace) -> dict[str, Any]:
    """Two jobs take turns."""
    rounds = take_turns(ours, theirs, warm_up=WARM_UP, rounds=options.rounds, turn_s=options.seconds)
    ratio = statistics.median(one["ratio"] for one in rounds)
    return verdict(limit, ratio, met=ratio <= limit, rounds=rounds, **columns(rounds))


@contextlib.contextmanager
def against(kind: str, model: str, ranks: int, micro_batch: int, **settings: Any) -> Iterator[tuple[Job, Job]]:
    """A job of ours, and torch's of this kind."""
    lanes = MODELS[model].defaults["lanes"]
    peer = [str(BENCH / "cells_peer.py"), "--kind", kind, "--model", model]
    peer += ["--lanes", str(lanes), "--micro-batch", str(micro_batch)]
    settings |= {"micro_batch": micro_batch}
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        ours = everstep_job("ours", task_of(model), folder / "run", settings={"workers": 1, **settings})
        yield ours, ranks_job("torch", peer, ranks, free_port(), folder / "ends")


def fsdp_row(options: argparse.Namespace) -> dict[str, Any]:
    """A cell of two against FSDP2."""
    with against("fsdp", options.model, 2, options.micro_batch, **{"cell.fsdp": 2}) as jobs:
        return paced(*jobs, 1.10, options)


def tp_row(options: argparse.Namespace) -> dict[str, Any]:
    """Two shards on two processes against torch's."""
    with against("tp", options.model, 2, options.micro_batch, **{"cell.tp": 2}) as jobs:
        return paced(*jobs, 1.05, options)


def shards_row(options: argparse.Namespace) -> dict[str, Any]:
    """Four shards on one process against a model that is not cut."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        task, folder = task_of(options.model), Path(name)
        common = {"workers": 1, "micro_batch": options.micro_batch}
        ours = everstep_job("ours", task, folder / "cut", settings={**common, "cell.shards": 4})
        whole = everstep_job("whole", task, folder / "whole", settings=common)
        return paced(ours, whole, 1.5, options)


def three_row(options: argparse.Namespace) -> dict[str, Any]:
    """Eight processes each."""
    split = {"stages": 2, "workers": 2, "cell.fsdp": 2, "cell.tp": 2}
    with against("3d", "transformer-waiting", 8, 1, **split) as jobs:
        return {**paced(*jobs, 1.05, options), "wait_s": WaitingTransformer.wait_s}


# ---- memory and start


def memory_row(options: argparse.Namespace) -> dict[str, Any]:
    """Four processes."""
    ours, ddp = list[float](), list[float]()
    for _ in range(options.rounds):
        ours.append(measure_ours(options.wide, 1, 8, {"cell.fsdp": "4", "cell.wrap": CELL_WRAP})["peak_mb"])
        ddp.append(measure_ddp(options.wide, 4, 8)["peak_mb"])
        print(f"memory: {ours[-1]:.0f} MiB, DDP {ddp[-1]:.0f} MiB", file=sys.stderr, flush=True)
    planned = plan(options.wide, 1, "--set", "cell.fsdp=4", "--set", f"cell.wrap={CELL_WRAP}")
    to_plan, to_ddp = statistics.median(ours) / planned, statistics.median(ours) / statistics.median(ddp)
    met = abs(to_plan - 1) <= 0.1 and to_ddp <= 0.45
    raw = {"cell_mb": ours, "ddp_mb": ddp, "planned_mb": planned, "to_plan": to_plan}
    return verdict("10 % of the formula; 0.45 of DDP", to_ddp, met=met, **raw)


def hub_row(options: argparse.Namespace) -> dict[str, Any]:
    """From the command to the first step, in turn; the first round reads from the disk and does not count."""
    found: dict[str, list[float]] = {"ours": [], "trainer": []}
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        task, more = hub_task(folder, "gpt2", options.hub_width, options.hub_layers)
        for number in range(options.rounds + 1):
            began_ns = time.time_ns()
            job = EverstepJob(task, folder / f"{number}", "--workers", "1", "--steps", "2", settings=more)
            job.wait()
            ours = (committed(job.events())[0][1] - began_ns) / 1e9
            first, began_ns = folder / "first", time.time_ns()
            peer = [sys.executable, str(BENCH / "trainer_peer.py"), str(folder / "gpt2"), more["task.data"], str(first)]
            subprocess.run(peer, check=True, capture_output=True, env=environment())
            theirs = (int(first.read_text()) - began_ns) / 1e9
            print(f"hub: {ours:.2f} s, Trainer {theirs:.2f} s", file=sys.stderr, flush=True)
            if number:
                found["ours"].append(ours)
                found["trainer"].append(theirs)
    ratio = statistics.median(a / b for a, b in zip(found["ours"], found["trainer"], strict=True))
    return verdict(1.0, ratio, met=ratio <= 1.0, **{name: spread(times) for name, times in found.items()})


ROWS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "gradients": gradients,
    "kill": lambda options: fault_row(options, "kill"),
    "stop": lambda options: fault_row(options, "stop"),
    "cut": lambda options: cut_row(options, 1),
    "hop": lambda options: cut_row(options, 2),
    "fsdp": fsdp_row,
    "tp": tp_row,
    "shards": shards_row,
    "three": three_row,
    "memory": memory_row,
    "hub": hub_row,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn, at least")
    parser.add_argument("--jobs", type=int, default=5, help="with two faults each (cut, hop: one)")
    parser.add_argument("--steps", type=int, default=4, help="of the jobs whose bits are compared")
    parser.add_argument("--kinds", default="transformer-small,llama,gpt2,resnet18", help="models of `gradients`")
    parser.add_argument("--model", default="transformer-small", choices=MODELS, help="of the other rows")
    parser.add_argument("--micro-batch", type=int, default=8, help="of `fsdp`, `tp` and `shards`")
    parser.add_argument("--wide", default="transformer-25m", choices=MODELS, help="of `memory`")
    parser.add_argument("--hub-width", type=int, default=768)
    parser.add_argument("--hub-layers", type=int, default=12)
    parser.add_argument("--out", help="also write the JSON here")
    options = parser.parse_args()
    report: dict[str, Any] = {"bench": "cells", **machine()}
    for name in options.rows.split(","):
        began_s = time.monotonic()
        row = report[name] = ROWS[name](options)
        row["took_s"] = round(time.monotonic() - began_s)
        print(
            f"{name}: measured {row['measured']}, target {row['target']}, met {row['met']}", file=sys.stderr, flush=True
        )
    write_report(report, options.out)


if __name__ == "__main__":
    main()
