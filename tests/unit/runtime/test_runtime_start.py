"""What is known before anything starts, and what of it reaches the processes of a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from everstep.base.config import load_config
from everstep.base.errors import InvariantViolation
from everstep.runtime.lead.succession import Succession
from everstep.runtime.start import Start
from everstep.runtime.supervisor import CoordinatorProcess

CONFIG = load_config([("test", {"network.address": "10.0.0.1"})])


def test_a_host_is_called_as_it_says_or_by_the_jobs_address() -> None:
    begun = Start(CONFIG, "m:f", ("torch",), "c:Files", room=None, domains={"rack": "r1"})
    told = begun.joining("/run/coordinator.json", task="t")
    assert (told.host, told.own, told.room, told.domains) == ("10.0.0.1", "10.0.0.1", 0, {"rack": "r1"})
    assert (told.address, told.task) == ("/run/coordinator.json", "t")
    assert (told.entry, told.preload, told.files) == ("m:f", ["torch"], "c:Files")
    told = Start(CONFIG, host="b", own="10.0.0.2", room=3).joining("10.0.0.1:5")
    assert (told.host, told.own, told.room) == ("b", "10.0.0.2", 3)


def test_an_agent_that_has_heard_of_no_job_has_no_directory_of_one() -> None:
    with pytest.raises(InvariantViolation):
        _ = Start(CONFIG, where="10.0.0.1:5").folder


@pytest.mark.parametrize(("owner", "given"), [("", None), ("me", {"EVERSTEP_ETCD_USER": "u"})])
def test_secrets_for_etcd_reach_a_coordinator_that_stands_by_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str, given: dict[str, str] | None
) -> None:
    seen: list[tuple[Sequence[str], object]] = []

    def spawn(
        self: CoordinatorProcess, command: Sequence[str], descriptors: object = (), secrets: object = None
    ) -> None:
        seen.append((command, secrets))

    monkeypatch.setattr(CoordinatorProcess, "spawn", spawn)
    succession, secrets = Succession(owner=owner), {"EVERSTEP_ETCD_USER": "u"}
    CoordinatorProcess(Start(CONFIG, run_dir=tmp_path, secrets=secrets, succession=succession)).start()
    (command, told) = seen[0]
    assert told == given and ("--host" in command) == bool(owner) and "u" not in command
