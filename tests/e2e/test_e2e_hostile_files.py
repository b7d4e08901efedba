"""Run directories and files that others prepared, by every command that reads them: one line, exit code 2 or 1, soon,
and within little memory."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.base import below
from everstep.cli.main import run_command

MARGIN_BYTES = 1 << 30
READERS = {
    "job.json": ("status", "ledger", "top --once", "report", "checkpoints ls", "metrics --once", "scale"),
    "dataset.json": ("status", "ledger", "top --once", "report", "metrics --once"),
    "events.jsonl": ("status", "ledger", "logs", "top --once", "report", "metrics --once", "chaos report"),
    "coordinator.json": ("status", "top --once", "scale"),
    "token": ("status", "scale"),
    "lock": ("status", "scale"),
    "final/digest.json": ("status", "ledger", "verify", "report"),
    "final/model.safetensors": ("verify",),
    "ledger/worker-0.jsonl": ("ledger", "report"),
    "logs/worker-0.jsonl": ("logs", "report"),
    "metrics/host.jsonl": ("top --once", "report", "metrics --once"),
}
DEEP = "[" * 200_000 + "]" * 200_000
LARGE = "9" * 5000


def good_run(folder: Path) -> Path:
    for name in READERS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints").mkdir()
    job = {"task": "t", "argv": [], "config": {"steps": 2}, "dataset_size": 128, "created_unix_ns": 1}
    (folder / "job.json").write_text(json.dumps(job))
    event = {"time_unix_ns": 1, "kind": "step_committed", "step": 1, "loss": 0.5}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    (folder / "ledger" / "worker-0.jsonl").write_text('{"step":1,"generation":1,"lanes":[]}\n')
    (folder / "final" / "digest.json").write_text(json.dumps({"version": 1, "step": 2, "model": "a", "state": "b"}))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (folder / "final" / "model.safetensors").write_bytes(data)
    return folder


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def folder(path: Path) -> None:
    path.mkdir()


def nested(path: Path) -> None:
    path.write_text(f'{{"kind":{DEEP}}}\n')


def large_numbers(path: Path) -> None:
    names = ("step", "time_unix_ns", "dataset_size", "begins_after", "created_unix_ns", "generation", "worker_id")
    said = ",".join(f'"{name}":{number}' for name, number in zip(names, [10**18] * len(names), strict=True))
    path.write_text(f'{{"kind":"step_committed","task":"t","argv":[],"config":{{}},"model":"m","lanes":[],{said}}}\n')


def endless_number(path: Path) -> None:
    path.write_text(f'{{"kind":"step_committed","task":"t","argv":[],"config":{{"steps":{LARGE}}},"step":{LARGE}}}\n')


def other_types(path: Path) -> None:
    path.write_text('{"kind":["a"],"task":{},"argv":3,"config":[],"step":"a","model":[],"lanes":"x","pid":"x"}\n')


def no_text(path: Path) -> None:
    path.write_bytes(b'{"kind":"\xff\xfe\\ud800","task":"\xff"}\n' * 3)


def list_of_lists(path: Path) -> None:
    path.write_text("[[], null, NaN, 1e999]\n")


def header_of_everything(path: Path) -> None:
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


WAYS: list[Callable[[Path], None]] = [
    *(fifo, endless, sparse, folder, nested, large_numbers, endless_number),
    *(other_types, no_text, list_of_lists, header_of_everything),
]


def used_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@pytest.fixture
def little_memory() -> object:
    """What is asked for beyond it is refused, so that nothing takes the machine's."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes() + MARGIN_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def ask(words: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    name, *options = words.split()
    more = {"verify": [str(run_dir)], "scale": ["--workers", "2"]}.get(name, [])
    begun_s = time.process_time()
    argv = (
        [name, *options, str(run_dir), *more]
        if name in ("checkpoints", "chaos")
        else [name, str(run_dir), *more, *options]
    )
    code = run_command(argv)
    assert time.process_time() - begun_s < 20
    return code, capsys.readouterr().err


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_command_takes_every_file_for_what_it_is(
    tmp_path: Path, way: Callable[[Path], None], little_memory: object, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, commands in READERS.items():
        run_dir = good_run(tmp_path / name.replace("/", "-"))
        (run_dir / name).unlink(missing_ok=True)
        way(run_dir / name)
        for words in commands:
            code, told = ask(words, run_dir, capsys)
            assert code in (0, 1, 2), (name, words)
            assert "Traceback" not in told and told.count("\n") <= 1, (name, words, told)
            assert told.startswith("error: ") if code == 2 else True, (name, words, told)
            assert len(told) < 2000, (name, words, told[:300])


HUGE = 10**15
CLAIMS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "steps": ({"config": {"steps": HUGE}}, {"step": 10**9}),
    "an earlier job's steps": ({"config": {"steps": HUGE}, "begins_after": 10**9}, {"step": 10**9 + 1}),
    "samples": ({"config": {"steps": 2}, "dataset_size": HUGE}, {"step": 2}),
    "lanes": ({"config": {"steps": 9, "lanes": 10**12, "micro_batch": 1}, "dataset_size": HUGE}, {"step": 2}),
    "a batch": ({"config": {"steps": 9, "lanes": 1, "micro_batch": HUGE}, "dataset_size": HUGE}, {"step": 2}),
    "epochs": ({"config": {"epochs": HUGE}, "dataset_size": 64}, {"step": 10**12}),
    "workers": ({"config": {"steps": 2}}, {"kind": "generation_started", "workers": [10**9], "lanes": {"0": [HUGE]}}),
    "times": ({"config": {"steps": 2}}, {"time_unix_ns": 1 << 62, "duration_s": 1e300, "loss": 1e308}),
    "generations": (
        {"config": {"steps": 2}},
        {"generation": HUGE, "worker_id": HUGE, "incarnation": HUGE, "pid": HUGE},
    ),
}


@pytest.mark.parametrize("name", CLAIMS)
@pytest.mark.parametrize("whole", [True, False])
def test_what_a_job_says_of_its_size_costs_nothing(
    tmp_path: Path,
    name: str,
    whole: bool,
    little_memory: object,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files of the right form, with numbers that nobody has counted up to."""
    monkeypatch.chdir(tmp_path)
    job, event = CLAIMS[name]
    run_dir = good_run(tmp_path / "run")
    (run_dir / "job.json").write_text(json.dumps({**json.loads((run_dir / "job.json").read_text()), **job}))
    said = {"time_unix_ns": 2, "kind": "step_committed", "step": 1, "loss": 0.5, **event}
    with (run_dir / "events.jsonl").open("a") as file:
        file.write(json.dumps(said) + "\n")
    uses = [[lane, 0, 8, "0123456789abcdef"] for lane in range(4)]
    row = {"step": min(10**12, int(str(event.get("step", 1)))), "generation": 1, "lanes": uses}
    (run_dir / "ledger" / "worker-0.jsonl").write_text(json.dumps(row, separators=(",", ":")) + "\n")
    if not whole:
        (run_dir / "final" / "digest.json").unlink()
    for words in ("status", "ledger", "report", "top --once", "metrics --once"):
        code, told = ask(words, run_dir, capsys)
        assert code in (0, 1, 2) and "Traceback" not in told and told.count("\n") <= 1, (words, told)
    begun_s = time.process_time()
    assert run_command(["compare", str(run_dir), str(run_dir)]) in (0, 1, 2)
    assert time.process_time() - begun_s < 20


YAMLS = {
    "nested": "[" * 100_000,
    "aliases": "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)),
    "merges": "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 60)),
    "cycle": "task: &a [*a]\n",
    "large": f"lanes: {LARGE}\n",
    "hexadecimal": f"lanes: 0x{LARGE}\n",
    "long": "# " + "x" * (1 << 20),
    "tag": "lanes: !!python/object/apply:os.system [id]\n",
    "map": "!!map [a]\n",
    "date": "lanes: 2001-99-99\n",
    "bytes": "\udcff\udcfe",
}


@pytest.mark.parametrize("name", YAMLS)
def test_a_config_file_is_refused_in_one_line(
    tmp_path: Path, name: str, little_memory: object, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(YAMLS[name].encode(errors="surrogateescape"))
    assert run_command(["run", "mlp-digits", "--config", str(path), "--run-dir", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and len(told) < 1000, told
    assert not (tmp_path / "run").exists()


def test_a_config_file_may_be_a_pipe_that_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    os.write(write, b"lanes: none\n")
    os.close(write)
    assert run_command(["run", "mlp-digits", "--config", f"/dev/fd/{read}", "--run-dir", str(tmp_path / "run")]) == 2
    assert "lanes: expected whole number" in capsys.readouterr().err
    os.close(read)


@pytest.mark.parametrize("text", ["a=[" + "[" * 100_000, f"lanes={LARGE}", f"task.x=0x{LARGE}", "lanes=\udcff"])
def test_settings_are_taken_or_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "no-such-task", "--set", text, "--run-dir", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and len(told) < 1000, told[:300]


def test_what_no_command_foresaw_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from everstep.cli import status

    for error in (OSError(5, "Input/output error", "/x/\x1b"), MemoryError(), RecursionError()):

        def fail(*args: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(status, "read_status", fail)
        assert run_command(["status", "x"]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and told.count("\n") == 1 and "\x1b" not in told


@pytest.mark.parametrize("command", ["report", "publish --to tensorboard", "logs"])
@pytest.mark.parametrize("name", ["report.html", "tensorboard", "report-figures"])
def test_no_command_writes_through_a_link(tmp_path: Path, command: str, name: str) -> None:
    """What a link in a prepared directory leads to stays as it is, whether the command succeeds or not."""
    run_dir, victim = good_run(tmp_path / "run"), tmp_path / "authorized_keys"
    victim.write_text("mine")
    (tmp_path / "empty").mkdir()
    (run_dir / name).symlink_to(victim if "." in name else tmp_path / "empty")
    verb, *options = command.split()
    assert run_command([verb, str(run_dir), *options]) in (0, 1, 2)
    assert victim.read_text() == "mine" and not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("name", ["lock", "events.jsonl", "logs", "metrics", "ledger", "final", "token", "checkpoints"])
def test_a_job_begins_in_no_directory_with_a_link_below(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run_dir.mkdir()
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine")
    (run_dir / name).symlink_to(elsewhere / "file" if name in ("lock", "events.jsonl", "token") else elsewhere)
    assert run_command(["run", "mlp-digits", "--run-dir", str(run_dir), "--steps", "1"]) == 2
    said = capsys.readouterr().err
    assert "symbolic link" in said and said.count("\n") == 1, said
    assert name != "checkpoints" or f"checkpoint.disk.path={elsewhere}" in said
    assert [(path.name, path.read_text()) for path in elsewhere.iterdir()] == [("file", "mine")]


def test_no_command_is_taken_from_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, told = good_run(tmp_path / "run"), tmp_path / "told"
    now_ns = time.time_ns()
    event = {"time_unix_ns": now_ns, "kind": "job_failed", "step": 1, "cause": "killed", "reason": "x"}
    (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    job = json.loads((run_dir / "job.json").read_text())
    job["config"]["notify"] = {"events": ["job_failed"], "command": f"touch {tmp_path / 'theirs'}"}
    (run_dir / "job.json").write_text(json.dumps(job))
    assert run_command(["publish", str(run_dir), "--to", "notify"]) == 2
    assert "those in DIR/job.json are not used" in capsys.readouterr().err
    given = ["--set", f"notify.command=touch {told}"]
    assert run_command(["publish", str(run_dir), "--to", "notify", *given]) == 0
    assert told.exists() and not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    "command",
    [
        "checkpoints prune {}",
        "checkpoints pin {} mine",
        "checkpoints copy {} {}",
        "checkpoints import x --task t --to {}",
    ],
)
def test_no_folder_to_write_to_is_taken_from_a_directory(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a prepared directory could have somebody's own checkpoints deleted, which lie elsewhere."""
    run_dir, theirs = good_run(tmp_path / "run"), tmp_path / "theirs"
    theirs.mkdir()
    job = json.loads((run_dir / "job.json").read_text())
    job["config"]["checkpoint"] = {"disk": {"path": str(theirs)}}
    (run_dir / "job.json").write_text(json.dumps(job))
    assert run_command(command.format(run_dir, run_dir).split()) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"checkpoints at {str(theirs)!r}" in said and "give it here" in said, said
    assert not list(theirs.iterdir())
    assert run_command(["checkpoints", "prune", str(theirs)]) == 0


@pytest.mark.parametrize("job", [True, False])
def test_checkpoints_of_another_users_run_are_read_and_not_written(
    tmp_path: Path, job: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = good_run(tmp_path / "run")
    if not job:
        (run_dir / "job.json").unlink()
    me = os.geteuid()
    if me == 0:
        os.chown(run_dir, 4321, -1)
        os.chown(run_dir / "checkpoints", 4321, -1)
    monkeypatch.setattr(below, "_makers", {run_dir.stat().st_dev: 1234})
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    for command in (["prune", str(run_dir)], ["pin", str(run_dir), "mine"], ["copy", str(run_dir), str(run_dir)]):
        assert run_command(["checkpoints", *command]) == 2
        assert "it belongs to another user" in capsys.readouterr().err
    assert run_command(["checkpoints", "ls", str(run_dir)]) == 0
    assert not list((run_dir / "checkpoints").iterdir())


def test_no_address_is_taken_from_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = good_run(tmp_path / "run")
    job = json.loads((run_dir / "job.json").read_text())
    job["config"]["checkpoint"] = {"disk": {"path": "s3://theirs/x"}}
    (run_dir / "job.json").write_text(json.dumps(job))
    assert run_command(["checkpoints", "ls", str(run_dir)]) == 2
    assert "no address is taken from a directory" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["time_unix_ns", "step", "generation", "worker_id"])
@pytest.mark.parametrize("number", [LARGE, "9" * 400, "1e308", "-1e308", "1e999", "NaN", "-" + "9" * 30])
def test_absurd_numbers_in_events_are_said_and_cost_nothing(
    tmp_path: Path, name: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`logs` and `report` show all other events, name the first such line, its field and its value, and exit with 2."""
    run_dir = good_run(tmp_path)
    kinds = ("generation_started", "step_committed", "worker_evicted", "fault_injected", "job_completed")
    lines = ""
    for kind in kinds:
        said = json.dumps({"time_unix_ns": 1, "kind": kind, "step": 1, "worker_id": 0, "generation": 1})
        lines += f"{said}\n{said[:-1]}, {json.dumps(name)}: {number}}}\n"
    (run_dir / "events.jsonl").write_text(lines)
    assert run_command(["status", str(run_dir)]) == 0
    for command in ("logs", "report", "logs --follow", "logs --lines 0"):
        capsys.readouterr()
        assert run_command([*command.split(), str(run_dir)]) == 2
        told = capsys.readouterr()
        assert told.err.startswith(f"error: {run_dir / 'events.jsonl'}, line 2: expected {name} from -1 to ")
        assert told.err.count("\n") == 1 and len(told.err) < 400, told.err
        shown = sum(" event " in line for line in told.out.splitlines())  # the page is there, or the good lines
        assert Path(told.out.split()[0]).is_file() if command == "report" else shown == (0 if "0" in command else 4)


def test_the_line_of_an_absurd_number_counts_all_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are empty, torn or longer than a line may be, too."""
    run_dir = good_run(tmp_path)
    lines = ["", '{"time_unix', "x" * (20 << 20), '{"time_unix_ns":1,"kind":"warning","step":1e99}']
    (run_dir / "events.jsonl").write_text("\n".join(lines) + "\n")
    for command in ("logs", "report"):
        assert run_command([command, str(run_dir)]) == 2
        assert f"events.jsonl, line {len(lines)}: expected step" in capsys.readouterr().err
