"""Copy a quiet run of bench/recovery.py into the package, where `everstep plan` reads it: `make recovery-times`.

    python bench/keep_recovery.py [bench/out/recovery.json]

Figures that the run has replace those of before, under the date of its file and with its machine; the others stay.
A run on a machine that was busy, or with other bits or lost steps, is refused.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent / "out" / "recovery.json"
PACKAGE = Path(__file__).resolve().parents[1] / "src" / "everstep" / "cost" / "recovery_times.json"
GROUP = "bench/recovery.py"
FIGURES = {
    "ours_next_step": ("everstep", "next_step_s"),
    "ours_step": ("everstep", "ordinary_step_s"),
    "ours_with_spare": ("everstep", "replacement_with_spare_s"),
    "ours_restarted": ("everstep", "replacement_without_spare_s"),
    "torchrun_process": ("torchrun", "kill_to_next_step_s"),
    "torchft_next_step": ("torchft_defaults", "kill_to_next_step_s"),
}


def taken_over(report: Mapping[str, Any], kinds: Mapping[str, Any], date: str) -> dict[str, Any]:
    """The package's figures with those of a run. Raises: ValueError if the run is not worth keeping."""
    load, cpus, ours = report["load_average"][0], report["cpus"], report["everstep"]
    if load > cpus / 2:
        raise ValueError(f"expected a quiet machine, got a load of {load:g} on {cpus} cores: run it again")
    if ours["bits"] != "equal" or ours["lost_steps"]:
        raise ValueError(f"expected equal bits and no lost step, got {ours['bits']} and {ours['lost_steps']}")
    found = {name: report.get(who, {}).get(key, {}) for name, (who, key) in FIGURES.items()}
    measured = {name: spread["median"] for name, spread in found.items() if spread.get("n")}
    groups = {kind: {**group, "seconds": dict(group["seconds"])} for kind, group in kinds.items()}
    about = {"machine": f"{cpus} cores, torch {report['torch']}, {report['workers']} workers, {report['model']}"}
    kept: dict[str, Any] = {}
    for group in groups.values():
        for name in measured.keys() & group["seconds"].keys():
            _, what = group["seconds"].pop(name)
            kept[name] = [measured[name], what]
    new = {**about, "date": date, "source": GROUP, "seconds": {name: kept[name] for name in FIGURES if name in kept}}
    return {kind: group for kind, group in groups.items() if kind != GROUP} | {GROUP: new}


def as_text(kinds: Mapping[str, Any]) -> str:
    """JSON with a line for each figure."""
    text = json.dumps(kinds, indent=1, ensure_ascii=False)
    for group in kinds.values():
        for pair in group["seconds"].values():
            text = text.replace(json.dumps(pair, indent=1, ensure_ascii=False).replace("\n", "\n   "), json.dumps(pair))
    return text + "\n"


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    try:
        report, date = json.loads(path.read_text()), time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime))
        text = as_text(taken_over(report, json.loads(PACKAGE.read_text()), date))
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"{path}: {error!r}: expected the JSON of a whole run of bench/recovery.py") from None
    PACKAGE.write_text(text)
    print(
        f"{PACKAGE} holds {path}; docs/planning.md is to hold what make plan-tables and everstep plan usual print now"
    )


if __name__ == "__main__":
    main()
