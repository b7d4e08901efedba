"""The command line of a multi-stage ResNet with backups, carried out by `everstep run` and `everstep eval`.

python main.py --mode train --num-nodes 2 --devices-per-node 2 --epochs 3 --checkpoint-dir runs/journal
python main.py --mode train --rank 1 --world-size 2 --master-addr 10.0.0.1 --master-port 29500 ...   # on each host
python main.py --mode eval --checkpoint-dir runs/journal

This file only translates: what an option means for Everstep stands beside it.
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

TASK, LANES = "resnet18-digits", 8


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, without the list of all options."""

    def error(self, message):
        self.exit(2, f"error: {message}: main.py --help lists the options\n")


def parser():
    """The options, with what each becomes."""
    found = Parser(description=__doc__.splitlines()[0])
    add = found.add_argument
    add("--mode", choices=("train", "eval"), required=True, help="everstep run, or everstep eval")
    add("--rank", type=int, default=0, help="number of this host: --rank")
    add("--world-size", type=int, default=1, help="number of hosts: --world-size")
    add("--master-addr", default="127.0.0.1", help="--master-addr")
    add("--master-port", type=int, default=29500, help="--master-port")
    add("--num-nodes", type=int, help="hosts, by default --world-size; without that, all are on this host")
    add("--devices-per-node", type=int, default=1, help="workers of a host: --slots")
    add("--redundancy-factor", type=int, default=0, help="workers that hold each stage; 0: all, so there is one stage")
    add("--batch-size", type=int, default=256, help="samples of a batch: --batch-size")
    add("--accumulation-steps", type=int, default=1, help="batches of an update: --batch-size and lanes grow")
    add("--epochs", type=int, default=3, help="--epochs")
    add("--start-epoch", type=int, default=0, help="0; a later one needs a checkpoint, from which a job goes on anyway")
    add("--num-classes", type=int, default=10, help="task.num_classes")
    add("--lr", type=float, default=0.05, help="task.lr")
    add("--momentum", type=float, default=0.9, help="task.momentum")
    add("--weight-decay", type=float, default=5e-4, help="task.weight_decay")
    add("--eval-freq", type=int, default=1, help="eval_every_epochs")
    add("--checkpoint-freq", type=int, default=1, help="checkpoint.disk.every_epochs")
    add("--checkpoint-dir", default="runs/journal", help="--run-dir")
    add("--log-interval", type=int, default=1, help="steps between lines: log_every; 0: none")
    add("--log-dir", default="", help="folder for a copy of events.jsonl when the job is done")
    add("--simulate-failure", action="store_true", help="--simulate-failure")
    return found


def command(given):
    """Arguments of `everstep`. Raises: ValueError, in one line, for options that do not fit together."""
    if given.mode == "eval":
        return ["eval", TASK, "--from", given.checkpoint_dir]
    least = dict.fromkeys(("redundancy_factor", "start_epoch", "log_interval"), 0)
    ones = ("world_size", "num_nodes", "devices_per_node", "batch_size", "accumulation_steps", "epochs")
    for name, low in {**dict.fromkeys((*ones, "eval_freq", "checkpoint_freq"), 1), **least}.items():
        if (got := getattr(given, name)) is not None and got < low:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least {low}, got {got}")
    hosts = given.num_nodes or given.world_size
    if given.world_size > 1 and hosts != given.world_size:
        raise ValueError(f"--num-nodes: expected {given.world_size}, as --world-size says, got {hosts}")
    if given.world_size == 1 and given.rank:
        raise ValueError(
            f"--rank: expected 0 with a --world-size of 1, got {given.rank}: give the number of hosts as --world-size; "
            "--num-nodes alone starts the workers of that many hosts on this one"
        )
    workers = hosts * given.devices_per_node
    copies = given.redundancy_factor or workers
    if workers % copies:
        raise ValueError(f"--redundancy-factor: expected a divisor of {workers} workers, got {copies}")
    lanes = LANES * given.accumulation_steps
    if copies > lanes:
        raise ValueError(
            f"--redundancy-factor: expected at most {lanes} workers that hold a stage, as {lanes} parts of a batch are "
            f"added up, got {copies}: give a --redundancy-factor of at most {lanes}, or more --accumulation-steps"
        )
    if given.batch_size % LANES:
        raise ValueError(f"--batch-size: expected a multiple of {LANES}, got {given.batch_size}")
    if given.start_epoch and not given.rank and not (Path(given.checkpoint_dir) / "checkpoints").is_dir():
        raise ValueError(f"--start-epoch {given.start_epoch}: there is no checkpoint in {given.checkpoint_dir}")
    if given.log_dir and (not_written := unwritable(given.log_dir)):
        raise ValueError(f"--log-dir {given.log_dir}: {not_written}")
    batch = given.batch_size * given.accumulation_steps
    settings = {
        "lanes": lanes,
        "eval_every_epochs": given.eval_freq,
        "checkpoint.disk.every_epochs": given.checkpoint_freq,
        "log_every": given.log_interval,
        "task.num_classes": given.num_classes,
        "task.lr": given.lr,
        "task.momentum": given.momentum,
        "task.weight_decay": given.weight_decay,
    }
    found = ["run", TASK, "--workers", str(workers), "--epochs", str(given.epochs), "--batch-size", str(batch)]
    found += ["--run-dir", given.checkpoint_dir, *(["--simulate-failure"] if given.simulate_failure else [])]
    if copies < workers:
        found += ["--stages", str(workers // copies), "--pool", str(copies)]
    if given.world_size > 1:
        found += ["--rank", str(given.rank), "--world-size", str(given.world_size)]
        found += ["--master-addr", given.master_addr, "--master-port", str(given.master_port)]
        found += ["--slots", str(given.devices_per_node)]
    return found + [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def unwritable(folder):
    """Why nothing can be written to a folder, which is made if it is not there; "" if it can be."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror
    return "" if os.access(folder, os.W_OK) else "it cannot be written to"


def main():
    """Translate, and become `everstep`."""
    given = parser().parse_args()
    try:
        words = [sys.executable, "-m", "everstep", *command(given)]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print("+ everstep", *words[3:], file=sys.stderr, flush=True)
    if not given.log_dir or given.mode == "eval":
        os.execv(words[0], words)
    job = subprocess.Popen(words, start_new_session=True)  # gets each signal once, from here
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, _: job.send_signal(number))
    code = job.wait()
    events = Path(given.checkpoint_dir) / "events.jsonl"
    try:
        if events.is_file():
            (Path(given.log_dir) / "events.jsonl").write_bytes(events.read_bytes())
    except OSError as error:
        print(f"warning: the events stay in {events}: {given.log_dir}: {error.strerror}", file=sys.stderr)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
