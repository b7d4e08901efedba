"""Which words are near enough to be guessed."""

from __future__ import annotations

import pytest

from everstep.base.errors import did_you_mean, nearest

COMMANDS = ("run", "config", "status", "top", "drain", "report", "scale", "check", "checkpoints", "verify", "ports")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("rum", "run"),  # another letter
        ("rn", "run"),  # one too few
        ("runn", "run"),  # one too many
        ("chekc", "check"),  # two swapped
        ("verfiy", "verify"),
        ("checkponits", "checkpoints"),
        ("chekponits", "checkpoints"),  # two slips in a long word
        ("RUN", "run"),
        ("stat", "status"),  # its beginning
        ("configure", "config"),  # and more
    ],
)
def test_a_slip_is_guessed(word: str, meant: str) -> None:
    assert nearest(word, COMMANDS) == meant
    assert did_you_mean(word, COMMANDS) == f"; did you mean {meant!r}?"


@pytest.mark.parametrize(
    "word", ["", "r", "train", "stop", "start", "export", "import", "save", "prune", "shceck", "vrefyi", "run" * 50_000]
)
def test_another_word_is_not(word: str) -> None:
    assert nearest(word, COMMANDS) is None
    assert did_you_mean(word, COMMANDS) == ""


def test_the_nearest_one_is_taken() -> None:
    assert nearest("checkpoint", ["checkpoints", "check", "checkpoint_s"]) == "checkpoints"
    assert nearest("word", []) is None
    assert did_you_mean("lanse", ["lanes"], "'task.{}'") == "; did you mean 'task.lanes'?"
