"""Steps to which no life has come are found from the conditions in the code."""

from __future__ import annotations

from pathlib import Path

from everstep.script.stretches import unrun

_CODE = """
for step in run:
    for x, y in step:
        pass
    if step.number % EVERY == 0:
        evaluate()
    if run.is_main and step.number > args.warm_up:
        save()
    if step.number == run.total_steps:
        finish()
    else:
        go_on()
    if step.loss < 0.1:
        cheer()
    if step.number ** 2 > 9:
        square()
    if step.number > 10**9:
        never()
"""


def test_the_first_step_of_each_branch_that_was_not_run(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_CODE)
    ran = [k for k, line in enumerate(_CODE.splitlines(), 1) if line and not line.endswith("()")] + [12]
    found = {code.text: (code.line, code.at) for code in unrun({str(path): ran}, {"EVERY": 7, "args.warm_up": 4}, 60)}
    assert found == {
        "if step.number % EVERY == 0": (6, 7),
        "if run.is_main and step.number > args.warm_up": (8, 5),
        "if step.number == run.total_steps": (10, 60),
        "if step.loss < 0.1": (14, 0),
        "if step.number ** 2 > 9": (16, 0),
        "if step.number > 10 ** 9": (18, 0),
    }
    assert unrun({str(tmp_path / "nothing.py"): [1]}, {}, 60) == []
