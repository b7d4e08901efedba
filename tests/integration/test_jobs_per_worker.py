"""`batch: per_worker`: the global batch follows the number of workers, and the learning rate follows the rule."""

from __future__ import annotations

import itertools

import pytest

from everstep.runtime.commands import ask
from job_harness import Event, Jobs

WARMUP = 4
LR, LANES, MICRO_BATCH, FIRST = 0.05, 8, 4, 4  # of the task `Pictures`, started with 4 workers


def expected_rates(workers: list[int]) -> list[float]:
    """The rule by hand: in proportion to the workers, reached in equal parts over WARMUP updates after each change."""
    rates, now, target, part = [], 1.0, 1.0, 0.0
    for before, number in itertools.pairwise([FIRST, *workers]):
        if number != before:
            target = number / FIRST
            part = (target - now) / WARMUP
        now = target if abs(target - now) <= abs(part) * 1.001 else now + part
        rates.append(now * LR)
    return rates


@pytest.mark.longer
def test_the_rate_follows_four_three_six_workers(jobs: Jobs) -> None:
    settings = {"batch": "per_worker", "lr_rule": "linear", "lr_warmup_steps": WARMUP, "steps": 90}
    six = [{"kind": "generation_started", "workers": [0, 1, 2, 3, 4, 5]}]
    job = jobs.start("Pictures", workers=FIRST, settings=settings, pace=six)

    def enough(wanted: int) -> Event:
        """Three steps after the warm-up of a batch of this many workers."""
        job.wait_for("step_committed", samples=wanted * LANES)
        seen = [e["step"] for e in job.of_kind("step_committed") if e["samples"] == wanted * LANES]
        return job.wait_for("step_committed", step=min(seen) + WARMUP + 3)

    enough(4)
    ask(job.run_dir, "scale", {"workers": 3})
    enough(3)
    ask(job.run_dir, "scale", {"workers": 6})
    assert job.end() == 0, job.account()
    steps = job.of_kind("step_committed")
    assert [e["step"] for e in steps] == list(range(1, 91))
    workers = [e["samples"] // (LANES * MICRO_BATCH // FIRST) for e in steps]
    first, second, *more = (n for n, _ in itertools.groupby(workers))
    assert [first, second] == [4, 3] and more == sorted(more) and more[-1] == 6, workers  # one by one, or at once
    assert [rate for e in steps for rate in e["lr"]] == pytest.approx(expected_rates(workers))
    assert steps[-1]["lr"] == pytest.approx([1.5 * LR]) and 3 * LR / 4 in [e["lr"][0] for e in steps]
    warnings = [e["reason"] for e in job.of_kind("warning")]
    assert any("not bitwise" in reason for reason in warnings), warnings
