"""What torment draws is the seed's alone and can be run; what it makes of an end is what users are promised."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

import pytest

import torment
from everstep.base.config import load_config
from everstep.base.config_keys import Config
from torment_plan import (
    CELLS,
    ENDING,
    KINDS,
    LOST_AFTER,
    PLACED,
    Harm,
    Life,
    Plan,
    Sent,
    before_us,
    draw,
    from_json,
    leftovers,
    lost_without_need,
    may_fail,
    sets,
    wrong_code,
    wrong_output,
)

SEEDS = range(400)


def test_a_seed_is_one_plan_that_can_be_printed_and_read() -> None:
    for seed in SEEDS:
        plan = draw(seed)
        assert plan == draw(seed)
        assert from_json(json.loads(json.dumps({**asdict(plan), "done": []}))) == plan


def test_each_life_but_the_last_is_ended_from_outside() -> None:
    for seed in SEEDS:
        lives = draw(seed).lives
        ended = [any(harm.ends for harm in life.harms) for life in lives]
        early = [any(harm.do == "SIGUSR1" and harm.when == "begin" for harm in life.harms) for life in lives]
        assert all(e or u for e, u in zip(ended[:-1], early[:-1], strict=True)) and not ended[-1], (seed, lives)


def test_all_kinds_of_harm_and_of_jobs_are_drawn() -> None:
    plans = [draw(seed) for seed in SEEDS]
    harms = [harm for plan in plans for life in plan.lives for harm in life.harms]
    several = Counter("kill several" for harm in harms if harm.do == "kill" and len(harm.whom) > 1)
    seen = several | Counter(f"{h.do} {h.whom[0].partition(':')[0] if h.whom else ''}".strip() for h in harms)
    assert not set(KINDS) - set(seen), set(KINDS) - set(seen)
    assert {life.workers for plan in plans for life in plan.lives} == {1, 2, 3, 4, 5}
    assert {life.stages for plan in plans for life in plan.lives} == {1, 2, 3}
    assert {(life.stages, life.workers) for plan in plans if "zero.stage" in plan.settings for life in plan.lives} >= {
        (stages, workers) for stages in (1, 2) for workers in (1, 2, 3, 4, 5)
    }
    assert all(any(plan.settings.items() >= placed.items() for plan in plans) for placed in PLACED)
    assert {plan.task for plan in plans if any(life.fsdp * life.tp > 1 for life in plan.lives)} == set(CELLS)
    cells = {(life.fsdp, life.tp, life.workers > 1) for plan in plans for life in plan.lives}
    assert cells >= {(fsdp, tp, many) for fsdp, tp in ((1, 2), (2, 1), (2, 2), (3, 1)) for many in (False, True)}
    assert {(life.fsdp, life.tp) for plan in plans for life in plan.lives if life.stages == 2} >= {
        (2, 1),
        (1, 2),
        (2, 2),
    }
    assert (3, 2, False) in cells and {plan.numerics.get("cell.shards") for plan in plans} == {None, 2, 4}
    assert {harm.when for harm in harms} >= {"begin", "steps", "last_step", "job_completed", "worker_evicted"}


def test_every_setting_is_one_that_the_config_knows() -> None:
    for seed in SEEDS:
        plan = draw(seed)
        for life in plan.lives:
            values = {**plan.numerics, **plan.settings}
            values |= {"workers": life.workers, "stages": life.stages, "spares": life.spares}
            values |= {"cell.fsdp": life.fsdp, "cell.tp": life.tp}
            assert isinstance(load_config([("drawn", values)]), Config)


def test_plans_are_chosen_by_what_they_set() -> None:
    plan = Plan("Text", {"precision": "fp32"}, {"zero.stage": 1, "checkpoint.enabled": False})
    assert all(sets(plan, words) for words in ("zero.stage", "zero.stage=1", "precision", "checkpoint.enabled=false"))
    assert not any(sets(plan, words) for words in ("zero.stage=2", "zero.copies", "zero.copies=1", "zero", ""))


@pytest.mark.parametrize("words", ["zero.stge", "zero.stage=7"])
def test_a_choice_that_leaves_nothing_is_an_error(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert torment.main(["0:20", "--with", words]) == 2
    said = capsys.readouterr()
    assert f"no plan of 0:20 sets {words}; they set" in said.err and " zero.stage\n" in said.err and not said.out


@pytest.mark.parametrize(
    ("code", "sent", "steps", "wrong"),
    [
        (0, [], 40, ""),
        (1, [], 40, "exit code 1, expected 0"),
        (3, [], 40, "exit code 3, expected 0"),
        (None, [Sent("SIGKILL", 5)], 40, ""),
        (143, [Sent("SIGTERM", 5)], 6, ""),
        (-15, [Sent("SIGTERM", 0)], 0, ""),
        (130, [Sent("SIGTERM", 5)], 6, "exit code 130, expected [143]"),
        (130, [Sent("SIGTERM", 5), Sent("SIGINT", 5)], 6, ""),
        (138, [Sent("SIGUSR1", 5)], 6, "exit code 138, expected 0"),
        (-10, [Sent("SIGUSR1", 5)], 6, "the command was ended by a signal (-10), it had got SIGUSR1"),
        (None, [], 6, "the command was ended by a signal (None), it had got none"),
        (0, [Sent("SIGTERM", 40 - LOST_AFTER)], 40, ""),
        (0, [Sent("SIGTERM", 5)], 40, "SIGTERM was lost: 35 steps were committed after it"),
    ],
)
def test_exit_codes(code: int | None, sent: list[Sent], steps: int, wrong: str) -> None:
    assert wrong_code(code, sent, steps) == wrong


def test_a_job_that_may_not_start_workers_again_may_run_out_of_them() -> None:
    plan, done = Plan("Text", settings={"on_failure": "shrink"}), ["life 0, step 3: kill agent"]
    assert may_fail(plan, done) and not may_fail(plan, ["life 0, step 3: kill coordinator"])
    assert not may_fail(Plan("Text"), done)
    assert not wrong_code(1, [], 5, may_fail=True) and wrong_code(3, [], 5, may_fail=True)


def test_what_is_printed() -> None:
    assert not wrong_output("run directory x\nerror: interrupted\n", ENDING["SIGINT"])
    assert not wrong_output("run directory x\nstopped after step 3: x\nto go on: y\n", ENDING["SIGTERM"])
    assert "got 0" in wrong_output("stopped after step 3: x\n", 1)
    assert "got 2" in wrong_output("stopped after step 3: x\nerror: x\n", ENDING["SIGTERM"])
    assert not wrong_output("run directory x\n", 0)
    assert "traceback" in wrong_output("Traceback (most recent call last):\n  x\nKeyError: 'y'\n", 0)
    assert "one line" in wrong_output("", 1) and "got 2" in wrong_output("error: a\nerror: b\n", 1)


def test_an_interpreter_that_is_interrupted_at_its_own_start_is_not_ours() -> None:
    python = 'Traceback (most recent call last):\n  File "<frozen runpy>", line 15, in <module>\nKeyboardInterrupt\n'
    assert before_us(python, "/here/everstep") and not before_us("error: interrupted\n", "/here/everstep")
    ours = python.replace("<frozen runpy>", "/here/everstep/cli/main.py")
    assert not before_us(ours, "/here/everstep")


def test_steps_that_are_lost_and_files_that_are_left() -> None:
    plan = Plan("Text", lives=(Life(2, harms=(Harm("steps", "kill", ("fork_server",)),)),))
    assert lost_without_need(plan, ["life 0, step 3: kill fork_server"], 3)
    assert not lost_without_need(plan, ["life 0, step 3: kill fork_server"], 0)
    assert not lost_without_need(plan, ["life 0, step 3: kill worker 1 (pid 9)"], 3)
    assert leftovers(["final/digest.json", "checkpoints/s/.tmp-part", ".job.json.77"]) == [
        ".job.json.77",
        "checkpoints/s/.tmp-part",
    ]
