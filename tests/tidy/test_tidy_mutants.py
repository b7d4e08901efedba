"""Every bug of mutants.json can be planted in the source as it is: its place is there, once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mutants import ROOT, Mutant, catalogue, ladder, main, misplaced


def test_every_bug_has_its_place_in_the_source() -> None:
    problems = list(misplaced(catalogue()))
    assert not problems, "\n" + "\n".join(problems)


def test_bugs_are_told_apart_and_say_what_they_break() -> None:
    mutants = catalogue()
    assert len({mutant.id for mutant in mutants}) == len(mutants) >= 132
    assert all(mutant.breaks.endswith(".") for mutant in mutants)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"old": "c = 2\n"}, "found it 0 times"),
        ({"old": "a = 1"}, "found it 2 times"),
        ({"new": "b = (\n"}, "no Python"),
        ({"new": "b = 2\n"}, "to differ"),
        ({}, None),
    ],
)
def test_a_bug_that_cannot_be_planted_is_named_with_what_to_do(change, said, tmp_path: Path) -> None:
    planted = Mutant("X1", "base/x.py", "b = 2\n", "b = 3\n", "Nothing.")
    path = tmp_path / planted.path
    path.parent.mkdir(parents=True)
    path.write_text("a = 1\na = 1\nb = 2\n")
    found = list(misplaced([replace(planted, **change)], tmp_path))
    assert [said in problem for problem in found] == [True] * bool(said)


def test_likely_tests_come_first_and_those_of_the_protocol_end_with_the_simulator() -> None:
    rungs = list(ladder(Mutant("X1", "protocol/settling.py", "a", "b", ""), ROOT))
    assert "tests/unit/protocol/test_protocol_settling.py" in rungs[0]
    assert "tests/sim/test_sim_seeds.py" in rungs[-1]
    everything = [name for rung in rungs for name in rung]
    assert len(set(everything)) == len(everything)
    assert not any(
        "tests/sim" in name for rung in ladder(Mutant("X1", "exact/x.py", "", "", ""), ROOT) for name in rung
    )


def test_an_id_that_is_not_known_is_one_line(capsys) -> None:
    assert main(["S2,nothing"]) == 2
    assert capsys.readouterr().err == "expected ids of mutants.json, got nothing\n"
