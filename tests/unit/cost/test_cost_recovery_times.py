"""`make recovery-times`: a quiet run of the bench replaces the package's figures, and no other run does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "bench"))

from keep_recovery import GROUP, PACKAGE, as_text, taken_over

KINDS = json.loads(PACKAGE.read_text())


def a_run(**changed: Any) -> dict[str, Any]:
    spread = {"n": 20, "median": 0.07}
    names = ("next_step_s", "ordinary_step_s", "replacement_with_spare_s", "replacement_without_spare_s")
    ours = {**dict.fromkeys(names, spread), "bits": "equal", "lost_steps": 0}
    machine = {"torch": "2.13.0", "cpus": 2, "load_average": [0.2, 0.1, 0.1], "workers": 4, "model": "small"}
    return {"bench": "recovery", **machine, "everstep": {**ours, **changed.pop("everstep", {})}, **changed}


def names_of(kinds: dict[str, Any]) -> list[str]:
    return sorted(name for group in kinds.values() for name in group["seconds"])


def test_a_quiet_run_is_kept_with_its_date_and_machine() -> None:
    found = taken_over(a_run(torchft_defaults={"not measured": "absent"}), KINDS, "2026-12-01")
    assert names_of(found) == names_of(KINDS)
    kept = found[GROUP]
    assert (
        kept["seconds"]["ours_next_step"][0] == 0.07 and kept["date"] == "2026-12-01" and "2 cores" in kept["machine"]
    )
    assert "torchft_next_step" in found["measured"]["seconds"], "what the run lacks stays"
    assert json.loads(PACKAGE.read_text()) == KINDS, "nothing was changed in place"
    again = taken_over(a_run(everstep={"next_step_s": {"n": 20, "median": 0.08}}), found, "2026-12-02")
    assert again[GROUP]["seconds"]["ours_next_step"][0] == 0.08 and names_of(again) == names_of(KINDS)
    assert json.loads(as_text(again)) == again and "[0.08, " in as_text(again)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"load_average": [3.0, 1.0, 1.0]}, "a quiet machine, got a load of 3 on 2"),
        ({"everstep": {"bits": "DIFFERENT"}}, "equal bits"),
        ({"everstep": {"lost_steps": 1}}, "no lost step"),
    ],
)
def test_a_run_that_is_not_worth_keeping(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        taken_over(a_run(**changed), KINDS, "2026-12-01")
