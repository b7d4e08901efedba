"""`make matrix`: reference jobs with each torch and Python that can be had; digests stay those of before, per version.

    python tests/matrix.py [--torch 2.13.0,2.14.1] [--python python3.11,python3.12] [--rewrite]

Each pair has an environment of its own in build/matrix. A job runs with one worker, and with three of which one is
killed; both must end with the digests of tests/matrix-digests.json for this kind of machine and torch. A pair without
digests there is told as new: `--rewrite` writes them. Exit code 1 if a job fails, digests differ, or nothing could run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIGESTS = Path(__file__).with_name("matrix-digests.json")
FOLDER = ROOT / "build" / "matrix"
TORCH = "2.13.0,2.14.1,2.15.0"
PYTHON = "python3.11,python3.12,python3.13,python3.14"
JOBS = {
    "mlp-digits": ("mlp-digits", "--steps", "30"),
    "transformer-text": ("transformer-text", "--steps", "6"),
    "plain loop": (str(ROOT / "examples" / "plain_loop.py"),),
}
PATIENCE_S = 1200
CHAOS = "kill:target=worker:1,at=3"
MACHINE = """
import platform, torch
with open("/proc/cpuinfo") as file:
    told = dict(line.split(":", 1) for line in file.read().partition("\\n\\n")[0].splitlines())
fields = {key.strip(): value.strip() for key, value in told.items()}
parts = [platform.machine(), *(fields.get(key, "?") for key in ("vendor_id", "cpu family", "model"))]
print(*parts, torch.backends.cpu.get_cpu_capability(), "torch", torch.__version__.partition("+")[0])
"""
"""Prints what the bits of a processor's results depend on."""


def environment(python: str, torch: str) -> str | None:
    """The interpreter of the pair's environment; None, with the reason told, if it cannot be had."""
    if shutil.which(python) is None:
        print(f"{python}, torch {torch}: skipped, there is no {python}")
        return None
    folder = FOLDER / f"{python}-torch{torch}"
    inside = str(folder / "bin" / "python")
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        steps = (
            [python, "-m", "venv", str(folder)],
            [inside, "-m", "pip", "install", "-q", f"torch=={torch}"],
            [inside, "-m", "pip", "install", "-q", "--no-deps", "-e", str(ROOT)],
            [inside, "-m", "pip", "install", "-q", *needed()],
        )
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["it failed"]
                print(f"{python}, torch {torch}: skipped, {said[0][:160]}")
                return None
        (folder / "ready").touch()
    return inside


def needed() -> list[str]:
    """What the package depends on, torch aside."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [one for one in project["dependencies"] if not one.startswith("torch")]


def digest(python: str, job: str, workers: int, run_dir: Path) -> str:
    """The digest of a job's final state. Raises: SystemExit if it failed, or does not end."""
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [
        python,
        "-P",
        "-m",
        "everstep",
        "run",
        *JOBS[job][:1],
        "--workers",
        str(workers),
        "--run-dir",
        str(run_dir),
    ]
    command += [*JOBS[job][1:], *(["--chaos", CHAOS] if workers > 1 else [])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{job} with {workers} workers runs after {PATIENCE_S} s: see {run_dir}") from None
    if done.returncode:
        raise SystemExit(
            f"{job} with {workers} workers ended with {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
        )
    return str(json.loads((run_dir / "final" / "digest.json").read_text())["state"])


def of_pair(python: str) -> tuple[str, dict[str, str], list[str]]:
    """Kind of machine with the version of torch, digests by job, and jobs whose digests differ by number of workers."""
    said = subprocess.run([python, "-c", MACHINE], capture_output=True, text=True, check=True).stdout.strip()
    found, differing = {}, []
    for job in JOBS:
        one, three = (digest(python, job, workers, FOLDER / f"run-{workers}") for workers in (1, 3))
        found[job] = one
        differing += [job] * (one != three)
    return said, found, differing


def main() -> int:
    parser = argparse.ArgumentParser(description="Reference jobs with other versions.")
    parser.add_argument("--torch", default=TORCH)
    parser.add_argument("--python", default=PYTHON)
    parser.add_argument("--rewrite", action="store_true", help="write the digests that were found")
    options = parser.parse_args()
    known: dict[str, dict[str, str]] = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    FOLDER.mkdir(parents=True, exist_ok=True)
    wrong, done = 0, 0
    for torch in options.torch.split(","):
        for python in options.python.split(","):
            inside = environment(python, torch)
            if inside is None:
                continue
            kind, found, differing = of_pair(inside)
            done += 1
            before = known.get(kind)
            changed = [job for job in found if before is not None and before.get(job) != found[job]]
            wrong += bool(differing or changed)
            told = "new" if before is None else "as before" if not changed else f"changed: {', '.join(changed)}"
            told += f"; differ with three workers: {', '.join(differing)}" if differing else ""
            print(f"{python}, {kind}: {told}", flush=True)
            known[kind] = found
    if options.rewrite:
        DIGESTS.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    return 1 if wrong or not done else 0


if __name__ == "__main__":
    sys.exit(main())
