"""The effective config, what is refused before the start, and when two jobs are the same."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everstep.base.errors import ConfigError
from everstep.chaos.spec import parse
from everstep.cli.config_file import read_config_file
from everstep.cli.job import (
    JobFile,
    Request,
    check_dataset,
    check_hosts,
    differences,
    effective_config,
    going_on,
    make_job,
    read_job,
    refuse_hosts_of_cells,
    total_steps,
    with_chaos,
    with_cut,
    write_job,
)
from everstep.cli.run import _check_copies, _opening
from everstep.cli.run_dir import StartPoint, inspect, read_digest, set_aside
from everstep.observe.events import EventLog


def request(batch_size: int | None = None, simulate: bool = False, **layers: dict[str, Any]) -> Request:
    return Request(tuple(layers.items()), batch_size, simulate)


def test_later_layers_win() -> None:
    defaults = {"lanes": 4, "micro_batch": 2, "steps": 5, "seed": 1}
    asked = request(file={"micro_batch": 3, "seed": 2}, sets={"seed": "3"}, options={"workers": 2})
    config = effective_config(defaults, asked)
    assert (config.lanes, config.micro_batch, config.steps, config.seed, config.workers) == (4, 3, 5, 3, 2)
    assert asked.explicit == ("micro_batch", "seed", "workers")


def test_batch_size_is_the_global_batch() -> None:
    config = effective_config({"lanes": 4, "steps": 1}, request(batch_size=24))
    assert config.micro_batch == 6
    assert "micro_batch" in request(batch_size=24).explicit


def test_a_script_says_its_lanes_unless_the_user_has() -> None:
    """What depends on them is looked at when it joins."""
    more = effective_config({}, request(options={"workers": 12}, batch_size=36), script=True)
    assert more.lanes >= more.workers == 12
    odd = request(batch_size=20)
    assert make_job("train.py", (), effective_config({}, odd, script=True), None, odd).batch_size == 20
    with pytest.raises(ConfigError, match="at most 4 for 4 lanes"):
        effective_config({}, request(options={"workers": 12, "lanes": 4}), script=True)
    one, many = (
        make_job("train.py", (), effective_config({}, asked, script=True), None, asked)
        for asked in (request(options={"workers": 2}), request(options={"workers": 16}))
    )
    assert differences(one, many) == [], "resumed with more workers"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (request(batch_size=30), ["8 lanes", "30"]),
        (request(options={"workers": 0}), ["workers", "at least 1", "0"]),
        (request(options={"workers": 9}), ["workers", "8", "9"]),
        (request(options={"workers": 2, "min_workers": 3}), ["min_workers", "3"]),
        (request(options={"spares": -1}), ["spares", "-1"]),
        (request(sets={"micro_batc": "3"}), ["micro_batc", "micro_batch", "sets"]),
    ],
)
def test_what_cannot_be_started(asked: Request, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        effective_config({"steps": 3}, asked)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_job_needs_an_end_unless_a_script_says_it() -> None:
    with pytest.raises(ConfigError, match="--steps or --epochs"):
        effective_config({}, request())
    assert effective_config({}, request(), script=True).steps is None


def test_dataset_and_length() -> None:
    config = effective_config({"epochs": 2}, request())
    with pytest.raises(ConfigError, match="63 samples, fewer than one global batch of 64"):
        check_dataset(config, 63)
    check_dataset(config, 64)
    assert total_steps(config, 100) == 4
    assert total_steps(config, None) is None
    assert total_steps(effective_config({"steps": 9}, request()), None) == 9


def test_simulate_failure_becomes_a_fault_of_the_config() -> None:
    asked = request(simulate=True, options={"chaos": "stop:target=worker:1,at=2,for=1"})
    config = with_chaos(effective_config({"steps": 90}, asked), asked, 1000)
    faults = parse(config.chaos)
    assert [fault.kind for fault in faults] == ["stop", "kill"]
    assert 30 < faults[1].at <= 60  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="unknown kind 'kil'"):
        bad = request(options={"chaos": "kil:at=1"})
        with_chaos(effective_config({"steps": 90}, bad), bad, None)


def test_job_file_there_and_back(tmp_path: Path) -> None:
    asked = request(options={"workers": 2})
    job = make_job("resnet18-digits", [], effective_config({"steps": 3}, asked), 100, asked)
    write_job(tmp_path, job)
    assert read_job(tmp_path) == job
    data = json.loads((tmp_path / "job.json").read_text())
    assert (data["task"], data["seed"], data["dataset_size"]) == ("resnet18-digits", 0, 100)
    assert data["versions"]["torch"].startswith("2.")


def test_dataset_size_of_a_script_comes_from_its_leader(tmp_path: Path) -> None:
    write_job(tmp_path, make_job("/x/train.py", [], effective_config({"steps": 3}, request()), None, request()))
    assert read_job(tmp_path).dataset_size is None
    (tmp_path / "dataset.json").write_text('{"size": 77}')
    assert read_job(tmp_path).dataset_size == 77


def test_a_job_file_of_another_version_is_read_and_what_is_unknown_is_told(tmp_path: Path) -> None:
    job = make_job("a", [], effective_config({"steps": 3}, request()), 100, request())
    data = job.to_dict()
    gone = {"nonsense": {"deep": 1}, "schedule": "zigzag", "transport": "mpi"}
    data["config"] = {**data["config"], **gone, "loader": {"workers": 1, "magic": True}, "logs": 5}
    del data["config"]["meta_init"]
    (tmp_path / "job.json").write_text(json.dumps(data))
    before = read_job(tmp_path)
    assert dict(before.unknown) == {**gone, "loader.magic": True, "logs": 5}
    assert (before.config.steps, before.config.loader.workers) == (3, 1)
    assert (before.config.schedule, before.config.transport) == ("1f1b", "auto")
    found = inspect(tmp_path, job)
    assert found.job is not None
    said = [line for line in _opening(tmp_path, found, StartPoint(), None, False, None) if "does not know" in line]
    assert len(said) == 1 and "\n" not in said[0] and "loader.magic=True" in said[0]
    data["config"]["lanes"] = 4
    (tmp_path / "job.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="lanes is 4 there, 8 here"):
        inspect(tmp_path, job)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"task": "x", "argv": [], "config": []}'])
def test_a_job_file_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(ConfigError):
        read_job(tmp_path)


def test_what_makes_two_jobs_different() -> None:
    config = effective_config({"steps": 3}, request())
    job = make_job("a", [], config, 100, request())
    assert differences(job, make_job("a", [], config, None, request())) == []
    assert (
        differences(job, make_job("a", [], effective_config({"steps": 9, "workers": 4}, request()), 100, request()))
        == []
    )
    other = effective_config({"steps": 3, "seed": 5, "lanes": 16}, request())
    found = differences(job, make_job("b", ["--x"], other, 99, request()))
    assert len(found) == 5
    assert all(any(word in line for line in found) for word in ("task", "arguments", "99", "seed", "lanes"))


def test_directory_states(tmp_path: Path) -> None:
    job = make_job("a", [], effective_config({"steps": 3}, request()), 100, request())
    assert inspect(tmp_path, job).state == "new"
    write_job(tmp_path, job)
    events = EventLog(tmp_path / "events.jsonl")
    events.write("step_committed", step=2)
    found = inspect(tmp_path, job)
    assert (found.state, found.step) == ("stopped", 2)
    with pytest.raises(ConfigError, match="another job: task is 'a' there, 'b' here"):
        inspect(tmp_path, make_job("b", [], job.config, 100, request()))
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "digest.json").write_text('{"step": 3, "model": "ab", "state": "cd"}')
    found = inspect(tmp_path, job)
    assert (found.state, found.step) == ("finished", 3)


def test_fresh_sets_aside_without_deleting(tmp_path: Path) -> None:
    assert set_aside(tmp_path) is None
    for round_number in (1, 2):
        (tmp_path / "events.jsonl").write_text(f"{round_number}")
        (tmp_path / "lock").write_text("")
        assert set_aside(tmp_path) == tmp_path / f"previous-{round_number}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lock", "previous-1", "previous-2"]
    assert (tmp_path / "previous-2" / "events.jsonl").read_text() == "2"


def test_a_digest_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    assert read_digest(tmp_path) is None
    (tmp_path / "final" / "digest.json").write_text("{")
    with pytest.raises(ConfigError, match=r"digest\.json"):
        read_digest(tmp_path)


def test_config_files(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    with pytest.raises(ConfigError, match="No such file"):
        read_config_file(path)
    path.write_text("lanes: 4\nloader:\n  workers: 1\n")
    assert read_config_file(path) == {"lanes": 4, "loader": {"workers": 1}}
    path.write_text("")
    assert read_config_file(path) == {}
    for bad in ("- 1\n- 2\n", "a: [1,\n"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="config file") as caught:
            read_config_file(path)
        assert "\n" not in str(caught.value)


def test_a_measured_cut_is_kept_by_every_later_run() -> None:
    config = effective_config({"steps": 1}, request(options={"stages": 2, "cut": "measured"}))
    job = make_job("t", [], config, 100, request())
    first = with_cut(job, [[0, 1], [1, 4]], [9.0, 1.0, 1.0, 1.0], None)
    assert first.config.cut == [1, 3] and first.unit_ms == (9.0, 1.0, 1.0, 1.0)
    again = with_cut(job, [[0, 2], [2, 4]], [2.0, 2.0, 2.0, 2.0], first)
    assert (again.config.cut, again.unit_ms) == (first.config.cut, first.unit_ms)
    assert with_cut(job, [[0, 2], [2, 4]], [], first) is job, "nothing was to be measured"


def test_what_an_optimizer_divides_is_kept_by_stage_where_a_stage_has_the_units_that_it_had() -> None:
    def job(**options: Any) -> JobFile:
        return make_job("t", [], effective_config({"steps": 1}, request(options=options)), 100, request())

    before = replace(job(stages=2, workers=2), divides={0: "nothing", 1: "elements"})
    assert going_on(job(stages=2, workers=4), before).divides == before.divides
    for other in (
        job(),
        job(stages=2, workers=2, cut=[1, 3]),
        job(stages=2, workers=2, schedule="interleaved", chunks=2),
    ):
        assert going_on(other, before).divides == {}


@pytest.mark.parametrize(("hosts", "copies", "refused"), [(2, 3, True), (3, 3, False), (1, 3, False), (2, 2, False)])
def test_more_copies_than_the_hosts_that_are_asked_for(hosts: int, copies: int, refused: bool) -> None:
    given = {"steps": 1, "workers": 4, "zero.stage": 1, "zero.copies": copies, "hosts.min": hosts}
    config = effective_config(given, request(options={"network.address": "10.0.0.1"}))
    with (
        pytest.raises(ConfigError, match=r"expected at most 2, .*\(hosts\.min\), got 3: set zero\.copies=2, or")
        if (refused)
        else nullcontext()
    ):
        _check_copies(config, given)
    _check_copies(config, {"hosts.min": hosts})  # the default takes what there is


def test_a_path_of_checkpoints_is_the_same_for_whoever_looks_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given, path in (("ck", str(tmp_path / "ck")), ("../b", str(tmp_path.parent / "b")), ("/a/b", "/a/b")):
        for one in (request(options={"checkpoint.disk.path": given}), request(file={"checkpoint.disk.path": given})):
            assert effective_config({"steps": 1}, one).checkpoint.disk.path == path
    assert effective_config({"steps": 1}, request()).checkpoint.disk.path is None


def test_a_host_that_this_launcher_does_not_run_on() -> None:
    here = effective_config({"steps": 1}, request(file={"map": [{"hosts": ["localhost", "127.0.0.1"]}]}))
    assert here.workers == 2
    check_hosts(here)
    there = effective_config({"steps": 1}, request(file={"map": [{"workers": [0], "host": "far-away"}]}))
    with pytest.raises(ConfigError, match="worker 0 is to run on host 'far-away', but this job"):
        check_hosts(there)
    refuse_hosts_of_cells(here)
    with pytest.raises(ConfigError, match=r"cell.hosts: expected 1 for a job on this host alone, got 2: .* --listen"):
        refuse_hosts_of_cells(effective_config({"steps": 1}, request(file={"cell": {"fsdp": 2, "hosts": 2}})))
