"""`everstep demo`: the whole promise in a minute. Kill workers, the leader and the coordinator; compare the bits."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import click

from everstep.base.below import ANEW, open_below
from everstep.base.errors import ConfigError, JobFailed
from everstep.base.leaving import before_leaving
from everstep.cli.display import duration, sentence
from everstep.cli.run_dir import in_runs, read_digest
from everstep.cli.verify import compare
from everstep.observe.events import read_events
from everstep.report.facts import facts_of
from everstep.runtime.link.address import EVENTS_FILE
from everstep.runtime.process import own_command

TASK = "resnet18-digits"
_TOLD = ("fault_injected", "recovery_completed", "leader_changed", "coordinator_restarted", "worker_healed")


@click.command()
@click.option("--steps", type=click.IntRange(min=12), default=36, show_default=True, help="Steps of both runs.")
@click.option(
    "--workers", type=click.IntRange(min=3), default=4, show_default=True, help="Workers of the run with faults."
)
@click.option("--run-dir", type=click.Path(path_type=Path), help="Directory for both runs (runs/demo-<time>).")
def command(steps: int, workers: int, run_dir: Path | None) -> int:
    """Train on real data with several workers, kill some with SIGKILL, and compare the weights with an undisturbed
    run."""
    base = run_dir or in_runs("demo")
    undisturbed, disturbed = base / "one-worker-undisturbed", base / f"{workers}-workers-with-faults"
    chaos = faults(steps)
    print(f"1. {TASK}, {steps} steps, one worker, undisturbed: {undisturbed}", flush=True)
    print(f"2. the same with {workers} workers, and with these faults: {disturbed}")
    for fault in chaos.split("; "):
        print(f"     {fault}")
    print("Both run now; the lines below are of the second.\n", flush=True)
    began = time.monotonic()
    base.mkdir(parents=True, exist_ok=True)
    with _beside(_run(undisturbed, steps, 1, ""), base / "one-worker.log") as reference:
        job = subprocess.Popen(_run(disturbed, steps, workers, chaos))
        with before_leaving(job.terminate):
            code = job.wait()
        if code:
            return code
        print("\nwaiting for the undisturbed run ...", flush=True)
        if reference.wait():
            raise JobFailed(f"the undisturbed run failed: see {base / 'one-worker.log'}")
    return _verdict(undisturbed, disturbed, time.monotonic() - began)


def faults(steps: int) -> str:
    """Faults of the demo: a worker, the leader, the coordinator, and a worker again, spread over the run."""
    return (
        f"kill:target=worker:2,at={steps // 5},phase=backward; kill:target=leader:0,at={2 * steps // 5},phase=agree; "
        f"kill:target=coordinator,at={3 * steps // 5}; kill:target=worker:1,at={4 * steps // 5},phase=reduce"
    )


def _run(run_dir: Path, steps: int, workers: int, chaos: str) -> list[str]:
    command = own_command("everstep", "run", TASK, "--steps", str(steps), "--workers", str(workers))
    command += ["--run-dir", str(run_dir), "--set", "log_every=4", "--fresh"]
    return [*command, "--chaos", chaos] if chaos else command


@contextlib.contextmanager
def _beside(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in the background; it is ended with the block, also after an exception."""
    with os.fdopen(open_below(log, ANEW), "wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    try:
        with before_leaving(process.terminate):
            yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


def _verdict(undisturbed: Path, disturbed: Path, wall_s: float) -> int:
    events = read_events(disturbed / EVENTS_FILE)
    facts = facts_of(events)
    print("\nWhat happened:")
    for event in events:
        if event["kind"] in _TOLD:
            print(f"  {(int(event['time_unix_ns']) - int(events[0]['time_unix_ns'])) / 1e9:6.2f} s  {sentence(event)}")
    different = compare(undisturbed, disturbed)
    digest = read_digest(disturbed)
    if digest is None:
        raise ConfigError(f"{disturbed} has no final/digest.json")
    print(f"\nundisturbed  {(read_digest(undisturbed) or {}).get('state')}")
    print(f"with faults  {digest.get('state')}")
    print(f"{facts.faults} faults survived, {facts.course.steps_lost} steps lost, {duration(wall_s)} in all")
    for line in different:
        print(line)
    print("NOT bitwise equal" if different else "bitwise equal")
    return int(bool(different))
