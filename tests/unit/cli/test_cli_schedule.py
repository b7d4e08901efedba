"""`everstep schedule`: the table, its totals, wrapping, colours, JSON and refusals."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from everstep.cli.main import run_command
from everstep.cli.schedule import label
from everstep.placement.schedules import Op

CLASSIC = """\
time    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20 21
stage 0 F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 F6 B3 F7 B4 .  B5 .  B6 .  B7
stage 1 .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .  B6 .  B7 .
stage 2 .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 .  B7 .  .
stage 3 .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 .  .  .

F3: forward pass of micro-batch 3, B3: backward, .: idle
22 time steps, bubble 27.3%; (K-1)/(M+K-1) = 27.3%
stage  idle  peak in flight  peak activations
0      6     4               4
1      6     3               3
2      6     2               2
3      6     1               1
"""


@pytest.fixture(autouse=True)
def _no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)


def shown(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert run_command(["schedule", *options]) == 0
    return capsys.readouterr().out


def test_the_classic_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "--kind", "1f1b", "--stages", "4", "--micro-batches", "8") == CLASSIC


def test_chunks_have_letters(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(
        capsys, "--kind", "interleaved", "--stages", "2", "--micro-batches", "2", "--chunks", "2"
    ).splitlines()
    assert lines[2] == "stage 1 .   F0a F1a F0b B0b F1b B1b B0a B1a ."
    assert "10 time steps, bubble 20.0%; (K-1)/(C*M+K-1) = 20.0%" in lines
    assert lines[-1] == "in flight and activations count chunks: 1/2 of a stage each"
    assert [label(Op("forward", 0, chunk, 7), 99) for chunk in (0, 25, 26, 52)] == ["F7a", "F7z", "F7aa", "F7ba"]


def test_recomputation_and_long_passes(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--kind", "gpipe", "--stages", "2", "--micro-batches", "2", "--recompute", "--backward", "2")
    lines = shown(capsys, *options).splitlines()
    assert lines[1] == "stage 0 F0 F1 R0 .  .  .  B0 -  R1 B1 -"
    assert lines[2] == "stage 1 .  F0 F1 R0 B0 -  R1 B1 -  .  ."
    assert "R3: its activations computed again, -: goes on, .: idle" in lines[4]
    assert lines[5] == "11 time steps, bubble 27.3%"
    assert lines[7:] == ["0      3     2               1", "1      3     2               1"]


def test_wide_tables_wrap_at_the_terminal_and_stay_whole_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = shown(capsys, "--micro-batches", "64").splitlines()
    monkeypatch.setenv("COLUMNS", "60")
    wrapped = shown(capsys, "--micro-batches", "64").splitlines()
    assert max(map(len, wrapped)) <= 60
    assert len(whole[1]) > 60
    rejoined = " ".join(line.removeprefix("stage 3") for line in wrapped if line.startswith("stage 3"))
    assert rejoined.split() == whole[4].removeprefix("stage 3").split()


def test_colours_on_a_terminal_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in shown(capsys)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    assert "\x1b[34mF0" in shown(capsys)
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(capsys) == CLASSIC


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(capsys, "--stages", "2", "--micro-batches", "3", "--json"))
    assert (found["kind"], found["schedule"], found["time_steps"]) == ("schedule", "1f1b", 8)
    assert found["bubble_fraction"] == found["expected_bubble_fraction"] == 0.25
    assert (found["peak_in_flight"], found["peak_activations"], found["idle"]) == ([2, 1], [2, 1], [2, 2])
    assert found["workers"][1][1] == {
        "kind": "backward",
        "stage": 1,
        "chunk": 0,
        "micro_batch": 0,
        "start": 2,
        "end": 3,
    }
    assert json.loads(shown(capsys, "--recompute", "--json"))["expected_bubble_fraction"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kind", "zigzag"], "'gpipe', '1f1b', 'interleaved', 'looped_bfs'"),
        (["--kind", "interleaved"], "set chunks=2"),
        (["--kind", "interleaved", "--chunks", "2", "--micro-batches", "6"], "use 4 or 8"),
        (["--chunks", "2"], "set schedule=interleaved"),
        (["--stages", "0"], "got 0"),
        (["--stages", "1000000000"], "a table of at most 200,000 cells"),
        (["--micro-batches", "1000000"], "lower them"),
        (["--micro-batches", "many"], "many"),
        (["--backward", "0"], "at least 1 time step"),
    ],
)
def test_refusals_are_one_line(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["schedule", *options]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert words in message


def test_it_does_not_import_torch() -> None:
    code = (
        "import sys; from everstep.cli.main import run_command as run; run(['schedule']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False"
