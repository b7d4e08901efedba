"""The failure suite, each scenario in a small job: what it breaks is broken, and the bits are those of the calm run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.chaos.scenarios import SCENARIOS, TASK, TINY, Scenario
from everstep.cli.chaos import Suite
from job_harness import Jobs
from sampling import mostly_longer

KEPT = ("network_partition",)


@pytest.fixture(scope="module")
def suite(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    def start(argv: list[str], run_dir: Path) -> int:
        return jobs.command(argv, run_dir).end()

    made = Suite(tmp_path_factory.mktemp("suite"), TASK, TINY, start=start)
    made.make_undisturbed()
    yield made


@pytest.mark.parametrize(
    "scenario", mostly_longer(SCENARIOS, lambda scenario: scenario.name in KEPT), ids=lambda scenario: scenario.name
)
def test_scenario(suite: Suite, scenario: Scenario) -> None:
    result = suite.run(scenario)
    assert result.passed, "\n".join([*result.wrong, f"seed {result.seed}: {result.again}"])
    assert result.equal or scenario.fails
