"""What `everstep launch` writes, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from everstep.base.errors import ConfigError
from everstep.cli.engines import launch as launch_rules
from everstep.cli.engines import ssh
from everstep.cli.engines.launch import Launch, LaunchedHost, given_up, host_script, job_code
from everstep.cli.engines.ray_cluster import HostProcess
from everstep.cli.engines.ssh import SshHosts
from everstep.cli.engines.strategic_merge import merge
from everstep.cli.main import run_command
from kubelet import expanded

HERE = Path(__file__).parent
K8S = ["launch", "k8s", "resnet18-digits", "--image", "registry/everstep:1", "--claim", "runs"]


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code = run_command([*argv[:2], "--print", *argv[2:]])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["slurm", "--hosts", "2", "--run-dir", "r"], "expected TASK and the options of 'everstep run', got none"),
        (["slurm", "resnet18-digits", "--hosts", "2"], "--run-dir"),
        (["slurm", "resnet18-digits", "--hosts", "0", "--run-dir", "r"], "--hosts"),
        (["slurm", "resnet18-digits", "--hosts", "2", "--run-dir", "r", "--stepz", "3"], "--stepz"),
        (["slurm", "resnet18-digits", "--hosts", "2", "--run-dir", "r", "--steps", "x"], "--steps"),
        (["slurm", "resnet18-digits", "--hosts", "2", "--run-dir", "r", "--listen", "a:1"], "--listen: expected none"),
        (["slurm", "resnet18-digits", "--hosts", "2", "--run-dir", "r", "--sbatch", "a\nb"], "--sbatch: expected"),
        (["slurm", "resnet18-digits", "--hosts", "2", "--run-dir", "r", "--sbatch", "comment="], "--sbatch: expected"),
        (["slurm", "resnet18-digits", "--hosts", "2", "--run-dir", "r", "--sbatch", "array=0-9"], "launch sets it"),
        (["slurm", "resnet18-digits", "--hosts", "2", "--run-dir", "r", "--workers", "9"], "--workers: expected none"),
        (["slurm", "resnet18-digits", "--hosts", "2", "--run-dir", "a\nreboot"], "--run-dir: expected a path of"),
        (["slurm", "resnet18-digits", "--hosts", "2", "--run-dir", "r", "--set", "lanes"], "expected key=value"),
        (["slurm", "resnet18-digits", "--hosts", "2", "--run-dir", "r", "--set", "lanez=3"], "lanez"),
        (["slurm", "no_such_module:Task", "--hosts", "2", "--run-dir", "r"], "there is no module no_such_module"),
        (["slurm", "no-such-file.py", "--hosts", "2", "--run-dir", "r"], "there is no file no-such-file.py"),
        (["slurm", "no-such-task", "--hosts", "2", "--run-dir", "r"], "no-such-task"),
        (["k8s", "resnet18-digits", "--hosts", "2", "--claim", "c"], "--image"),
        ([*K8S[1:], "--hosts", "2", "--memory", "lots"], "--memory: expected 4, 500m or 16Gi"),
        ([*K8S[1:], "--hosts", "2", "--namespace", "A b"], "--namespace: expected lower-case letters"),
        ([*K8S[1:], "--hosts", "2", "--run-dir", "/etc"], "--run-dir: expected a folder below /runs"),
        ([*K8S[1:], "--hosts", "2", "--run-dir", "/runs/"], "--run-dir: expected a folder below /runs"),
        ([*K8S[1:], "--hosts", "2", "--namespace", "a.b"], "--namespace: expected lower-case letters"),
        ([*K8S[1:], "--hosts", "2", "--claim", "a..b"], "--claim: expected lower-case letters"),
        ([*K8S[1:], "--hosts", "2", "--name", "4a"], "--name: expected lower-case letters"),
        ([*K8S[1:], "--hosts", "2", "--", "--lr", "3"], "only a script takes arguments of its own"),
        (["slurm", "resnet18-digits", "--hosts", "2", "--run-dir", "r", "--fresh"], "--fresh: expected none here"),
        (["slurm", "resnet18-digits", "--hosts", "2", "--run-dir", "r", "--config", "no.yaml"], "no.yaml"),
        (["slurm", "resnet18-digits", "--hosts", "2", "--run-dir", "r", "--chaos", "kill:target=nobody"], "nobody"),
        (["ssh", "resnet18-digits", "--hosts", "localhost,b", "--run-dir", "r"], "127.0.0.1 here, which no other host"),
        (["ssh", "resnet18-digits", "--hosts", "a,-oProxyCommand=x", "--run-dir", "r"], "--hosts: expected different"),
        (["ssh", "resnet18-digits", "--hosts", "a,a", "--run-dir", "r"], "--hosts: expected different names"),
        (["ssh", "resnet18-digits", "--hosts", "no.such.host.invalid", "--run-dir", "r"], "has no IPv4 address"),
        (
            ["ssh", "resnet18-digits", "--hosts", "a", "--address", "x;y", "--run-dir", "r"],
            "--address: expected an IPv4",
        ),
        (["mars", "resnet18-digits"], "mars"),
    ],
)
def test_bad_input(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_command(["launch", *argv, *(["--print"] if argv[0] != "mars" else [])])
    words = capsys.readouterr().err
    assert code == 2 and expected in words and words.count("\n") == 1, words


@pytest.mark.parametrize("engine", ["slurm", "k8s", "ray", "ssh"])
def test_hosts_are_told_what_is_theirs_to_say(
    engine: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the least number of hosts and workers may be said, though launch alone knows how many there are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("hosts: {min: 2, wait_s: 30}\n")
    words = {"k8s": ["--image", "i", "--claim", "c"], "ssh": ["--address", "10.0.0.1"]}.get(engine, [])
    words += ["--hosts", "a,b,c,d" if engine == "ssh" else "4", *([] if engine == "k8s" else ["--run-dir", "r"])]
    words += ["--set", "min_workers=3", "--set", "security.tls.mode=off"]
    words += ["--set", "hosts.wait_s=30", "--set", "hosts.min=2"] if engine == "k8s" else ["--config", "mine.yaml"]
    text = printed(capsys, "launch", engine, "resnet18-digits", *words)
    agents = [line for line in text.splitlines() if " agent --join" in line]
    assert agents
    for line in agents:
        assert "--set hosts.wait_s=30" in line and "--set security.tls.mode=off" in line
        assert "min_workers" not in line and "hosts.min" not in line


def test_the_token_that_is_given_is_the_one_of_all_hosts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\n[ -z "$EVERSTEP_TOKEN" ] && cp "$2" {tmp_path}/told && echo 7\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    (tmp_path / "shared" / "of others").touch()
    for name in ("own", "shared"):
        monkeypatch.setenv("EVERSTEP_TOKEN", sha256(b"ab").hexdigest())
        run_dir = tmp_path / name
        assert run_command(["launch", "slurm", "resnet18-digits", "--hosts", "2", "--run-dir", str(run_dir)]) == 0
        assert (run_dir / "token").read_text() == sha256(b"ab").hexdigest()
        assert (run_dir / "launch").stat().st_mode & 0o077 == 0
    assert (tmp_path / "own").stat().st_mode & 0o077 == 0
    assert (tmp_path / "shared").stat().st_mode & 0o077 == 0o055, "it is not the job's alone"
    monkeypatch.setenv("EVERSTEP_TOKEN", sha256(b"cd").hexdigest())
    capsys.readouterr()
    (tmp_path / "kubectl").write_text(f"#!/bin/sh\ncat > {tmp_path}/applied\n")
    (tmp_path / "kubectl").chmod(0o755)
    assert run_command([*K8S, "--hosts", "2", "--name", "mine"]) == 0
    secret, *_ = yaml.safe_load_all((tmp_path / "applied").read_text())
    assert secret["stringData"]["token"] == sha256(b"cd").hexdigest()
    assert secret["metadata"]["name"] == "mine-token" and secret["immutable"], "the pods that run know this one"


def test_the_token_is_never_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by --print, nor with what kubectl says of what it refuses."""
    token = sha256(b"cd").hexdigest()
    monkeypatch.setenv("EVERSTEP_TOKEN", token)
    text = printed(capsys, *K8S, "--hosts", "2")
    assert token not in text and "kind: Secret" not in text
    assert "kubectl create secret generic everstep-resnet18-digits-token --from-file=token=/dev/stdin" in text
    (tmp_path / "kubectl").write_text("#!/bin/sh\ngrep token: >&2; exit 1\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("EVERSTEP_TOKEN", token)
    assert run_command([*K8S, "--hosts", "2"]) == 2
    words = capsys.readouterr().err
    assert "kubectl refused it: token: (the token)" in words and token not in words


def test_a_script_for_sbatch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [
        "--hosts",
        "3",
        "--slots",
        "2",
        "--run-dir",
        "a b",
        "--sbatch",
        "partition=gpu",
        "--set",
        "seed=1",
        "--steps=5",
    ]
    (tmp_path / "t.py").touch()
    text = printed(capsys, "launch", "slurm", f"{tmp_path}/t.py", *words, "--", "--lr", "it's")
    assert "#SBATCH --array=0-2\n" in text and "#SBATCH --partition=gpu\n" in text
    assert "#SBATCH --signal=B:USR1@60\n" in text
    assert 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"\n' in text
    job = next(line for line in text.splitlines() if " run " in line)
    assert "--workers 6 --slots 2" in job and job.endswith("""--set seed=1 --steps=5 -- --lr 'it'"'"'s' &""")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


ODD = 'it\'s $$5 $(HOME) $(touch pwned) `id` "q" 50%a #x, y; {z} *\\'


@pytest.mark.parametrize("engine", ["slurm", "ssh", "ray", "k8s"])
def test_odd_names_are_only_names(engine: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What a shell makes of what is printed is what was said."""
    folder = tmp_path / ODD
    folder.mkdir()
    (folder / "t.py").touch()
    arguments = ["--name=a b", ODD, ""]
    words = {"slurm": ["--hosts", "2"], "ssh": ["--hosts", "a,b", "--address", "10.0.0.1"], "ray": ["--hosts", "2"]}
    words["k8s"] = ["--hosts", "2", "--image", "i", "--claim", "c"]
    task, run_dir = (f"/{ODD}/t.py", f"/runs/{ODD}") if engine == "k8s" else (str(folder / "t.py"), str(folder / "run"))
    if engine == "k8s":
        words["k8s"], task = [*words["k8s"], "--set", f"task.text={ODD}"], "resnet18-digits:/data"
        arguments = []
    python = tmp_path / "print arguments"
    python.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > '{tmp_path}/told'\n")
    python.chmod(0o755)
    own = ["--run-dir", run_dir, "--python", str(python), *(["--", *arguments] if arguments else [])]
    text = printed(capsys, "launch", engine, task, *words[engine], *own)
    if engine == "k8s":
        job = next(found for found in yaml.safe_load_all(text) if found["kind"] == "Job")
        _, _, text = expanded(job["spec"]["template"]["spec"]["containers"][0]["command"], os.environ)
    elif engine == "ssh":
        text = text.split("\n# b ")[0]
    elif engine == "ray":
        text = text.splitlines()[0]
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "0", "JOB_COMPLETION_INDEX": "0"}
    environment |= {"POD_IP": "fd00::7", "EVERSTEP_ADDRESS": "fd00::7"}
    command = ["bash", "-c", text]
    with subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, env=environment, cwd=tmp_path) as shell:
        assert shell.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # only that of ssh waits for it
            shell.stdin.write(b"ab\n")
        shell.wait(60)
    told = (tmp_path / "told").read_text().split("\0")[:-1]
    assert told[:5] == ["-P", "-m", "everstep", "run", task]
    assert told[told.index("--run-dir") + 1] == run_dir
    if engine in ("k8s", "slurm"):
        assert told[told.index("--listen") + 1] == {"k8s": "[fd00::7]:29400", "slurm": "[fd00::7]:0"}[engine]
    if engine == "k8s":
        assert f"task.text={ODD}" in told
    else:
        assert told[told.index("--") + 1 :] == arguments
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(
    ("command", "ends"),
    [
        ("exit 0", (0, False)),
        ("exit 1", (1, False)),
        ("exit 3", (3, False)),
        ("exit 4", (4, False)),
        ("exit 5", (5, True)),
        ("exit 127", (127, False)),
        ("exit 138", (0, False)),  # a standby host that has left in order
        ("kill -9 $$", (137, True)),
        ("trap 'exit 0' USR1; while :; do kill -USR1 $PPID; sleep 0.1; done", (0, True)),
        ("trap 'exit 138' USR1; while :; do kill -USR1 $PPID; sleep 0.1; done", (0, True)),
        ("trap 'exit 1' USR1; while :; do kill -USR1 $PPID; sleep 0.1; done", (1, False)),
        ("trap 'exit 143' TERM; while :; do kill -TERM $PPID; sleep 0.1; done", (143, False)),
    ],
)
def test_when_a_host_is_to_come_again(tmp_path: Path, command: str, ends: tuple[int, bool]) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\n{command}\n")
    (tmp_path / "python").chmod(0o755)
    launch = Launch("n", "t", (), (), 2, 1, str(tmp_path), str(tmp_path / "python"))
    text = host_script(launch, "1", "run", "agent", "echo again", alone=True)
    ended = subprocess.run(["sh", "-c", text], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout == "again\n") == ends, ended.stderr
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "digest.json").touch()
    ended = subprocess.run(["sh", "-c", text], capture_output=True, text=True, timeout=60)
    assert not ended.stdout, "the job is over"
    assert ended.returncode == (0 if ends[0] == 4 else ends[0]), "it waited for a job that is complete"


@pytest.mark.parametrize(
    ("element", "code", "host_0", "again"),
    [("1", 4, "pending", True), ("1", 4, "", False), ("0", 3, "running", False)],
)
def test_an_agent_that_waited_in_vain_comes_again_while_host_0_is_still_to_come(
    tmp_path: Path, element: str, code: int, host_0: str, again: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """But host 0 does not, if too few workers came: the others have left with the job's end."""
    for name, does in (
        ("python", f"exit {code}"),
        ("squeue", f"echo {host_0}"),
        ("scontrol", f'echo "$*" > {tmp_path}/told'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    own = ["--run-dir", str(tmp_path / "r"), "--python", str(tmp_path / "python")]
    text = printed(capsys, "launch", "slurm", "resnet18-digits", "--hosts", "2", *own)
    environment = {
        "SLURM_ARRAY_TASK_ID": element,
        "SLURM_ARRAY_JOB_ID": "42",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    ended = subprocess.run(["bash"], input=text, text=True, env={**os.environ, **environment}, timeout=60)
    assert ended.returncode == code
    assert (tmp_path / "told").exists() == again


@pytest.mark.parametrize(
    ("restarts", "before", "lived_s", "age_h", "again"),
    [
        ("", 0, 0, 0, True),
        ("18", 18, 0, 0, True),
        ("19", 19, 0, 0, False),
        ("40", 3, 0, 0, True),  # most of them by preemption
        ("19", 19, 700, 0, True),  # it has run for long
        ("40", 19, 0, 30, True),  # long ago
        ("", 19, 0, 0, True),  # of a launch before
        ("30", 0, 0, None, True),  # nothing can be written
    ],
)
def test_an_element_that_dies_at_once_each_time_is_not_requeued_for_ever(
    tmp_path: Path,
    restarts: str,
    before: int,
    lived_s: int,
    age_h: float | None,
    again: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, does in (("python", "kill -9 $$"), ("scontrol", f'echo "$*" > {tmp_path}/told')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    killed = tmp_path / "r" / "launch" / "killed-1"
    if age_h is not None:
        killed.parent.mkdir(parents=True)
        killed.write_text("137\n" * before)
        os.utime(killed, (time.time() - age_h * 3600,) * 2)
    own = ["--run-dir", str(tmp_path / "r"), "--python", str(tmp_path / "python")]
    text = printed(capsys, "launch", "slurm", "resnet18-digits", "--hosts", "2", *own)
    environment = {
        "SLURM_ARRAY_TASK_ID": "1",
        "SLURM_ARRAY_JOB_ID": "42",
        "SLURM_RESTART_COUNT": restarts,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    command = ["bash", "-c", f"SECONDS={lived_s}\n{text}"]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60)
    assert ended.returncode == 137
    assert (tmp_path / "told").exists() == again
    assert ("it is not requeued" in ended.stderr) != again


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_objects_of_kubernetes_are_as_its_schemas_say(capsys: pytest.CaptureFixture[str], version: str) -> None:
    more = ["--cpus", "8", "--memory", "16Gi", "--gpus", "2", "--namespace", "ml", "--queue", "q", "--steps", "9"]
    objects = list(yaml.safe_load_all(printed(capsys, *K8S, "--hosts", "3", "--slots", "2", *more)))
    assert [found["kind"] for found in objects] == ["Service", "Job", "PodDisruptionBudget", "NetworkPolicy"]
    assert objects[2]["spec"]["minAvailable"] == 2 and "maxUnavailable" not in objects[2]["spec"]
    sets = list(yaml.safe_load_all(printed(capsys, *K8S, "--hosts", "3", "--jobset", *more)))
    objects += sets[1:]
    for replicated in sets[0]["spec"]["replicatedJobs"]:
        objects.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **replicated["template"]})
    broken = json.loads(json.dumps(objects[1]))
    broken["spec"]["completions_mode"] = "Indexed"
    for one in objects:
        kubernetes_validate.validate(one, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)


@pytest.mark.parametrize(
    ("ends", "reading"),
    [
        ("exit 0", "done"),  # over, or drained for good
        ("exit 1", "counted"),
        ("exit 2", "FailIndex"),  # refused: the others go on
        ("exit 127", "FailIndex"),  # there is no such interpreter
        ("exit 4", "counted"),  # waited in vain
        (': > "$EVERSTEP_HEAD_MARK"; exit 1', "FailJob"),  # it had taken over, and the job failed
        ("exit 143", "counted"),  # told to stop
        ("kill -9 $$", "counted"),  # for memory, say: not without end
        ("trap 'exit 0' USR1; while :; do kill -USR1 $PPID; sleep 0.1; done", "Ignore"),  # handed over
    ],
)
@pytest.mark.parametrize("kind", ["", "--jobset"])
def test_which_ends_of_a_pod_count(
    ends: str, reading: str, kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The shell of the container, and the rules that its exit code meets."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{ends}\n")
    python.chmod(0o755)
    made = list(
        yaml.safe_load_all(printed(capsys, *K8S, "--hosts", "2", "--python", str(python), *filter(None, [kind])))
    )
    spec = made[0]["spec"]["replicatedJobs"][1]["template"]["spec"] if kind else made[1]["spec"]
    command = spec["template"]["spec"]["containers"][0]["command"]
    environment = {**os.environ, "JOB_COMPLETION_INDEX": "1", "POD_IP": "127.0.0.1"}
    code = subprocess.run(expanded(command, environment), env=environment, timeout=60).returncode
    if kind and reading == "FailIndex":
        assert code == 0, "a JobSet fails with any of its Jobs"
        return
    met = [
        rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        if code in rule.get("onExitCodes", {}).get("values", ())
    ]
    assert [*met, "counted" if code else "done"][0] == reading, code


@pytest.mark.parametrize("code", [1, 2, 126, 127])
def test_the_end_of_the_job_s_own_pod_ends_all(code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexit {code}\n")
    python.chmod(0o755)
    _, job, *_ = yaml.safe_load_all(printed(capsys, *K8S, "--hosts", "2", "--python", str(python)))
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    environment = {**os.environ, "JOB_COMPLETION_INDEX": "0", "POD_IP": "127.0.0.1", "TMPDIR": str(tmp_path)}
    assert subprocess.run(expanded(command, environment), env=environment, timeout=60).returncode == 64
    rules = {
        rule["action"]: rule.get("onExitCodes", {}).get("values") for rule in job["spec"]["podFailurePolicy"]["rules"]
    }
    assert (
        rules["FailJob"] == [64] and "maxFailedIndexes" not in job["spec"] and job["spec"]["backoffLimitPerIndex"] == 20
    ), "a number would have to be patched with that of the hosts"


@pytest.mark.parametrize(("etcd", "known", "code"), [("", True, 64), ("e", False, 64), ("e", True, 2)])
def test_a_pod_0_that_comes_back_leads_only_if_it_says_so(tmp_path: Path, etcd: str, known: bool, code: int) -> None:
    """With etcd another pod may lead by then."""
    (tmp_path / "python").write_text("#!/bin/sh\nexit 2\n")
    (tmp_path / "python").chmod(0o755)
    if known:
        (tmp_path / "job.json").touch()
    launch = Launch("n", "t", (), (), 2, 1, str(tmp_path), str(tmp_path / "python"), etcd=etcd)
    text = host_script(launch, "0", "run", "agent", ":", alone=True, final="code=64")
    assert subprocess.run(["sh", "-c", text], timeout=60).returncode == code


@pytest.mark.parametrize(
    ("failures", "ignored", "code"), [("0", "", 64), ("", "", 64), ("1", "", 2), ("0", "1", 2), ("2", "1", 2)]
)
def test_a_pod_0_with_a_new_disk_leads_only_if_it_is_the_first(
    failures: str, ignored: str, code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On its disk is no trace of the job that another pod leads by then."""
    (tmp_path / "python").write_text("#!/bin/sh\nexit 2\n")
    (tmp_path / "python").chmod(0o755)
    words = ["--image", "i", "--hosts", "2", "--disk", "5Gi", "--python", str(tmp_path / "python")]
    words += ["--set", "control.etcd=etcd://e/jobs/a", "--set", "checkpoint.object.url=s3://b/p"]
    _, job, *_ = yaml.safe_load_all(printed(capsys, "launch", "k8s", "resnet18-digits", *words))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    told = {
        "metadata.annotations['batch.kubernetes.io/job-index-failure-count']": failures,
        "metadata.annotations['batch.kubernetes.io/job-index-ignored-failure-count']": ignored,
        "status.podIP": "127.0.0.1",
    }
    fields = [(one["name"], one["valueFrom"].get("fieldRef")) for one in container["env"]]
    environment = {**os.environ, **{name: told[field["fieldPath"]] for name, field in fields if field}}
    environment |= {"JOB_COMPLETION_INDEX": "0", "TMPDIR": str(tmp_path)}
    command = expanded(container["command"], environment)
    assert subprocess.run(command, env=environment, timeout=60).returncode == code


PATCH = """
kind: Pod
spec:
  priorityClassName: high
  serviceAccountName: trainer
  imagePullSecrets: [{name: registry}]
  tolerations: [{key: gpu, operator: Exists, effect: NoSchedule}]
  containers:
  - name: everstep-resnet18-digits
    env: [{name: NCCL_IB_HCA, value: mlx5}]
    resources: {limits: {rdma/hca: "1"}}
    volumeMounts: [{name: data, mountPath: /data, readOnly: true}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
---
kind: NetworkPolicy
metadata: {annotations: {owner: me}}
---
kind: Job
metadata: {name: everstep-resnet18-digits}
spec: {ttlSecondsAfterFinished: null}
"""


def test_objects_are_changed_by_a_patch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(PATCH)
    made = list(yaml.safe_load_all(printed(capsys, *K8S, "--hosts", "2", "--patch", str(tmp_path / "p.yaml"))))
    for one in made:
        kubernetes_validate.validate(one, "1.37", strict=True)
    assert made[3]["metadata"]["annotations"] == {"owner": "me"} and "ttlSecondsAfterFinished" not in made[1]["spec"]
    pod = made[1]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert [one["name"] for one in container["env"]] == ["POD_IP", "EVERSTEP_TOKEN", "NCCL_IB_HCA"]
    assert container["image"] == "registry/everstep:1" and container["resources"]["limits"]["rdma/hca"] == "1"
    assert [one["name"] for one in pod["volumes"]] == ["runs", "shm", "data"]
    assert [one["key"] for one in pod["tolerations"]] == ["gpu"] and pod["priorityClassName"] == "high"
    for text, expected in (
        ("kind: Deployment", "--patch: there is no Deployment to change: the kinds are Job, NetworkPolicy, Pod"),
        ("kind: Job\nmetadata: {name: b}", "there is no Job with the name b"),
        ("- 1", "--patch: expected objects with a kind"),
        ("kind: Pod\nspec: {volumes: [{a: 1}]}", "expected a field 'name' in each element"),
        ("a: [", "--patch: expected YAML in"),
    ):
        (tmp_path / "p.yaml").write_text(text)
        assert run_command([*K8S, "--print", "--hosts", "2", "--patch", str(tmp_path / "p.yaml")]) == 2
        words = capsys.readouterr().err
        assert expected in words and words.count("\n") == 1, words


def test_merged_as_kubectl_would() -> None:
    old = {"a": 1, "volumes": [{"name": "x", "emptyDir": {}}, {"name": "y"}], "args": ["1", "2"]}
    assert merge(old, {"a": None, "args": ["3"]}) == {"volumes": old["volumes"], "args": ["3"]}
    deleted = {"volumes": [{"name": "x", "$patch": "delete"}, {"name": "z"}]}
    assert merge(old, deleted)["volumes"] == [{"name": "y"}, {"name": "z"}]
    assert merge(old, {"volumes": [{"$patch": "replace"}, {"name": "q"}]})["volumes"] == [{"name": "q"}]
    assert merge(old, {"$patch": "replace", "b": 2}) == {"b": 2}
    assert merge({"a": {"b": 1}, "c": 2}, {"a": {"$patch": "delete"}}) == {"a": {}, "c": 2}
    service = {"ports": [{"name": "job", "port": 29400}]}
    assert merge(service, {"ports": [{"port": 29400, "appProtocol": "x"}, {"port": 1}]}) == {
        "ports": [{"name": "job", "port": 29400, "appProtocol": "x"}, {"port": 1}]
    }
    for change in ({"$retainKeys": ["name"]}, {"new": {"$patch": "drop"}}):
        with pytest.raises(
            ConfigError, match=r"--patch: expected no directive but \$patch: replace, delete or merge, got"
        ):
            merge(old, change)


def test_hosts_of_kubernetes_with_etcd_can_all_take_over(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--set", "control.etcd=etcd://10.0.0.1/jobs/a"]
    words = ["launch", "k8s", "resnet18-digits", "--image", "i", "--disk", "10Gi", "--hosts", "2", *more]
    text = printed(capsys, *words)
    assert "--or-standby" in text and "ephemeral" in text
    agent = next(line for line in text.splitlines() if " agent --join" in line)
    assert "agent --join etcd://10.0.0.1/jobs/a --standby --stay --refill 2" in agent and "--run-dir" in agent
    assert run_command([*words, "--print"]) == 0
    assert "--disk: checkpoints and weights go with the pods" in capsys.readouterr().err
    assert run_command([*words, "--print", "--set", "checkpoint.object.url=s3://a/b"]) == 0
    assert not capsys.readouterr().err
    once = ["launch", "k8s", "resnet18-digits", "--image", "i", "--claim", "c", "--once", "--jobset", "--hosts", "2"]
    assert run_command([*once, "--set", "control.etcd=etcd://10.0.0.1/jobs/a", "--print"]) == 2
    assert "--jobset: expected no control.etcd with it" in capsys.readouterr().err
    assert run_command([*words[:-2], "--print"]) == 2
    assert "--disk: expected --set control.etcd=... with it" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["slurm", "ssh", "ray"])
def test_hosts_of_other_engines_with_etcd_can_all_take_over(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hosts", "a,b", "--address", "10.0.0.1"] if engine == "ssh" else ["--hosts", "2"]
    words += ["--run-dir", "r", "--set", "control.etcd=etcds://10.0.0.1/jobs/a", "--set", "control.etcd_ca=ca.pem"]
    words[2:2] = ["--set", "hosts.wait_s=1800", "--set", "security.tls.mode=off"]
    text = printed(capsys, "launch", engine, "resnet18-digits", *words)
    assert "--or-standby" in text and "agent --join etcds://10.0.0.1/jobs/a --standby --stay --refill 2" in text
    (agent,) = (line for line in text.splitlines() if " agent --join" in line)
    assert "--set hosts.wait_s=1800" in agent and agent.count("--set") == 1
    assert engine == "ray" or f"EVERSTEP_ETCD_CA={os.getcwd()}/ca.pem" in text
    bad = ["launch", engine, "resnet18-digits", *words[:-4], "--set", "control.etcd=10.0.0.1", "--print"]
    assert run_command(bad) == 2
    assert "control.etcd" in capsys.readouterr().err


def test_a_job_set_is_as_its_schema_says(capsys: pytest.CaptureFixture[str]) -> None:
    made, *_ = yaml.safe_load_all(printed(capsys, *K8S, "--hosts", "3", "--jobset"))
    schema = json.loads((HERE / "jobset_schema.json").read_text())
    bad: list[Any] = [made | {"spec": made["spec"] | {"successPolicy": {"operator": "Some"}}}]
    bad.append(made | {"spec": made["spec"] | {"replicas": 1}})
    validator = jsonschema.Draft202012Validator(schema)
    assert [not list(validator.iter_errors(one)) for one in (made, *bad)] == [True, False, False]
    assert [one["name"] for one in made["spec"]["replicatedJobs"]] == ["job", "agents"]
    agents = made["spec"]["replicatedJobs"][1]["template"]["spec"]
    command = expanded(agents["template"]["spec"]["containers"][0]["command"], {})
    assert agents["completions"] == 2 and "$((JOB_COMPLETION_INDEX + 1))" in command[2]


def test_hosts_are_tried_again_later_and_later() -> None:
    host = LaunchedHost("b")
    now_s = 0.0
    for delay_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        host.begun(now_s)
        assert host.ended(255, now_s) == f"b cannot be reached: again in {delay_s:g} s"
        assert host.due_s == now_s + delay_s
        now_s += delay_s
    host.begun(now_s)
    assert host.ended(137, now_s + 60.0) == "b ended with 137: again in 1 s"
    agent = LaunchedHost("d")
    assert agent.ended(1, 0.0) == "" and agent.due_s == 10.0, "if its job failed, the job's own host is about to end"
    assert agent.ended(1, 0.0) == "d ended with 1: again in 20 s"


def test_which_hosts_are_left_out() -> None:
    """Those that have left in order, or say that the job is complete; of a 0 nothing is said."""
    for alike, code, words in ((True, 138, "b has left in order: it is left out"), (False, 0, ""), (True, 0, "")):
        host = LaunchedHost("b", alike)
        host.begun(0.0)
        assert (host.ended(code, 1.0), host.left, host.due_s) == (words, code, inf)
    for code in (1, 2, 3, 4, 5, 126, 127, 130, 137, 143):
        for alike in (True, False):
            host = LaunchedHost("b", alike)
            host.ended(code, 1.0)
            assert host.left is None and host.due_s < inf, "nobody here has told it to end"
    host = LaunchedHost("b", True)
    assert host.ended(2, 0.0) == "", "its job may have ended so"
    assert host.ended(2, 0.0) == "b ended with 2: again in 20 s", "the one that has its name may be about to leave"


def lived(name: str, *lives: tuple[float, float, int], runs: bool = False) -> LaunchedHost:
    """A host with these lives: begin, end and exit code of each."""
    host = LaunchedHost(name, True)
    for begun_s, ended_s, code in lives:
        host.begun(begun_s)
        host.ended(code, ended_s)
    if runs:
        host.begun(lives[-1][1] + 1.0)
    return host


REFUSED = ((0.0, 1.0, 137), (2.0, 3.0, 2), (700.0, 701.0, 2))
WAITED = (0.0, 601.0, 4)
LONG_AGO = ((0.0, 1.0, 255), (700.0, 90_000.0, 255), (90_001.0, 90_002.0, 2), (90_700.0, 90_701.0, 2))


@pytest.mark.parametrize(
    ("hosts", "now_s", "code"),
    [
        ([lived("a", *REFUSED), lived("b", WAITED, runs=True), lived("c", WAITED)], 703.0, 2),
        ([lived("a", (2.0, 3.0, 127), (700.0, 701.0, 127)), lived("b", WAITED, runs=True)], 703.0, 4),
        ([lived("a", *REFUSED)], 703.0, 2),
        ([lived("a", (0.0, 1.0, 4), (700.0, 701.0, 4)), lived("b", (700.0, 701.0, 4))], 703.0, 4),  # no etcd
        ([lived("a", (0.0, 1.0, 138)), lived("b", WAITED, runs=True)], 703.0, 4),
        ([lived("a", *REFUSED), lived("b", WAITED), LaunchedHost("c", True)], 703.0, 2),  # c has no place to begin
        ([lived("a", *REFUSED), lived("b", WAITED), lived("c", (0.0, 1.0, 255))], 703.0, 2),
        ([lived("a", *REFUSED, (720.0, 725.0, 137)), lived("b", WAITED, runs=True)], 730.0, None),
        ([lived("a", *REFUSED, runs=True), lived("b", WAITED, runs=True)], 703.0, None),  # it may be about to begin
        ([lived("a", *REFUSED, (720.0, 725.0, 255)), lived("b", WAITED, runs=True)], 730.0, None),  # it may lead
        ([lived("a", *REFUSED[:2]), lived("b", (0.0, 301.0, 4), runs=True)], 400.0, None),  # another try may help
        ([lived("a", *REFUSED), lived("b", (0.0, 2.0, 137), runs=True)], 703.0, None),  # it leads, or is a member
        ([lived("a", *REFUSED), lived("b", (0.0, 2.0, 2), runs=True)], 703.0, None),  # by the one that leads
        ([lived("a", *REFUSED), lived("b", (-700.0, -1.0, 4), runs=True)], 703.0, None),  # before the first one led
        ([lived("a", *REFUSED), lived("b", WAITED, runs=True)], 1300.0, None),  # else it had ended once more
        ([lived("a", *REFUSED), lived("b", WAITED), lived("c", (0.0, 2.0, 137), runs=True)], 703.0, None),
        ([lived("a", *LONG_AGO), lived("b", WAITED, runs=True)], 90_703.0, None),  # b leads since the first was lost
        ([lived("a", *LONG_AGO[:3]), lived("b", WAITED)], 90_003.0, None),
        ([lived("a", *REFUSED), lived("b", (0.0, 702.0, 255))], 703.0, None),  # it has led, and may lead again
        ([lived("a", *REFUSED), lived("b", (0.0, 102.0, 255))], 703.0, 2),
        ([LaunchedHost("a", True), LaunchedHost("b", True)], 703.0, None),
    ],
)
def test_a_job_that_nobody_begins_or_leads_is_given_up(
    hosts: list[LaunchedHost], now_s: float, code: int | None
) -> None:
    """Once the first host, which alone can begin it, has been refused for so long, and all others have waited since."""
    assert given_up(hosts, 600.0, now_s) == code


def test_whose_end_is_that_of_the_job() -> None:
    for code in (0, 1, 2, 143, 255):
        assert job_code(0, code, alike=False) == code and job_code(1, code, alike=False) is None
    for number in (0, 1):
        for code in (0, 1, 2, 3, 126, 127):
            assert job_code(number, 64 + code, alike=True) == code, "this one has led it"
        for code in (0, 1, 2, 3, 4, 5, 127, 130, 137, 138, 143, 255, -9):
            assert job_code(number, code, alike=True) is None


def test_a_host_that_hears_nothing_any_more_ends_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be written is not written when its pipe is closed."""
    monkeypatch.setattr(ssh, "_ALONE_S", 0.0)
    monkeypatch.setattr(ssh, "_LAST_WAIT_S", 0.0)
    (tmp_path / "ssh").write_text('#!/bin/sh\nshift 7\nexec sh -c "exec $*"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    start = ssh.ssh([])

    def deaf(host: str, script: str) -> subprocess.Popen[bytes]:
        process = start(host, script)
        while host == "deaf" and not (tmp_path / "deaf").exists():
            assert process.poll() is None
        return process

    scripts = [
        f"until [ -e {tmp_path}/deaf ]; do sleep 0.01; done",
        f"exec 0<&-; touch {tmp_path}/deaf; exec sleep 1000",
    ]
    assert SshHosts(["first", "deaf"], scripts, b"t" * 16, deaf).run() == 0


class Lives:
    """Hosts whose lives are these commands, the last again and again; with `waits` it runs until it is told to end."""

    def __init__(self, **lives: list[str]) -> None:
        self.begun: list[str] = []
        self._lives = lives

    def start(self, host: str, script: str) -> subprocess.Popen[bytes]:
        self.begun.append(host)
        lives = self._lives[host]
        words = lives.pop(0) if len(lives) > 1 else lives[0]
        words = f"read -r token leads; {words.replace('waits', 'read -r number; exit $((128 + ${number:-15}))')}"
        return subprocess.Popen(["sh", "-c", words], bufsize=0, stdin=subprocess.PIPE, start_new_session=True)

    def hosts(self, kind: type[SshHosts] = SshHosts, *, alike: bool = True) -> SshHosts:
        return kind(list(self._lives), [""] * len(self._lives), b"t" * 16, self.start, alike=alike, patience_s=0.0)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_AGAIN_S", "_JOB_ENDS_S"):
        monkeypatch.setattr(launch_rules, name, 0.0)
    monkeypatch.setattr(ssh, "_ALONE_S", 0.0)


@pytest.mark.parametrize(
    ("lives", "code"),
    [
        ({"a": ["exit 64"], "b": ["waits"]}, 0),  # b was between two lives, and waits for the next job
        ({"a": ["exit 137", "waits"], "b": ["exit 64"], "c": ["exit 255"]}, 0),
        ({"a": ["exit 65"], "b": ["waits"]}, 1),
        ({"a": ["waits"], "b": ["exit 67"]}, 3),
        ({"a": ["exit 137", "exit 66"], "b": ["exit 138"]}, 2),  # what has left in order has not completed it
        ({"a": ["exit 137", "exit 2"], "b": ["exit 2"]}, 2),
        ({"a": ["exit 137", "exit 2"], "b": ["exit 4"]}, 2),  # b waits for a job that nobody begins
        ({"a": ["exit 137", "exit 127"], "b": ["exit 4"]}, 4),
        ({"a": ["exit 4"], "b": ["exit 4"]}, 4),  # etcd is not there
        ({"a": ["exit 137", "exit 2", "exit 64"], "b": ["waits"]}, 0),  # the one that had its name has left
        ({"a": ["exit 255", "exit 2", "exit 64"], "b": ["waits"]}, 0),
        ({"a": ["exit 138"], "b": ["exit 138"]}, 138),
    ],
)
@pytest.mark.usefixtures("at_once")
def test_a_job_of_which_any_host_may_lead_is_over_when_one_says_so(lives: dict[str, list[str]], code: int) -> None:
    """The one that has led; the others are ended."""
    assert Lives(**lives).hosts().run() == code


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.usefixtures("at_once")
def test_a_refused_host_comes_back(alike: bool, tmp_path: Path) -> None:
    """What had its name has left, say, or its user has mended it."""
    ends = f"until [ -e {tmp_path}/back ]; do sleep 0.01; done; exit {64 * alike}"
    lives = Lives(a=[ends], b=["exit 2", "exit 2", f"touch {tmp_path}/back; waits"])
    assert lives.hosts(alike=alike).run() == 0 and lives.begun == ["a", "b", "b", "b"]


@pytest.mark.parametrize("first", ["exit 143", "exit 130", "exit 1", "exit 4", "exit 137", "kill -9 $$"])
@pytest.mark.usefixtures("at_once")
def test_a_host_that_nobody_here_has_told_to_end_begins_again(first: str) -> None:
    """The first one, too; the others wait for it, or lead meanwhile."""
    for names in (("a", "b"), ("b", "a")):
        lives = Lives(**dict(sorted({names[0]: [first, "exit 64"], names[1]: ["waits"]}.items())))
        assert lives.hosts().run() == 0
        assert lives.begun.count(names[0]) == 2


@pytest.mark.parametrize(("last", "code"), [("exit 64", 0), ("exit 65", 1), ("exit 137", 0), ("exit 255", 0)])
@pytest.mark.usefixtures("at_once")
def test_the_host_that_leads_is_waited_for_when_another_one_says_that_the_job_is_complete(
    last: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """It runs its script's end, and looks at the ledger after that. Nothing begins again."""

    class Told(SshHosts):
        def _end(self, number: int) -> int:
            found = super()._end(number)
            self._write(0, "go\n")
            return found

    lives = Lives(a=[f"read -r go; {last}"], b=["exit 0"])
    assert lives.hosts(Told).run() == code
    assert lives.begun == ["a", "b"] and not capfd.readouterr().err


@pytest.mark.usefixtures("at_once")
def test_the_first_host_leads_before_it_says_so_in_its_first_life_alone() -> None:
    """By what it says later; then another host may lead."""
    lives = Lives(a=['[ "$leads" = leads ] && exit 137; exit 66', '[ -z "$leads" ] && exit 64; exit 67'], b=["waits"])
    assert lives.hosts().run() == 0
    assert lives.begun == ["a", "b", "a"]
    assert Lives(a=["waits"], b=['[ -z "$leads" ] && exit 64; exit 66']).hosts().run() == 0


@pytest.mark.parametrize("first", ["exit 137", "waits"])
@pytest.mark.usefixtures("at_once")
def test_a_signal_ends_the_first_host_and_then_the_others(first: str) -> None:
    """Nothing begins again. Nobody here knows which of them leads."""

    class Told(SshHosts):
        def _begin(self, number: int, *, leads: bool) -> None:
            super()._begin(number, leads=leads)
            if number == 2:
                self._inbox.put(signal.SIGINT)

    lives = Lives(a=[first], b=["waits"], c=["waits"])
    assert lives.hosts(Told).run() == 130
    assert lives.begun == ["a", "b", "c"]


@pytest.mark.usefixtures("at_once")
def test_a_second_signal_ends_all_though_the_first_host_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "_LAST_WAIT_S", 0.0)

    class Told(SshHosts):
        def _begin(self, number: int, *, leads: bool) -> None:
            super()._begin(number, leads=leads)
            for signalled in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
                self._inbox.put(signalled)

    assert Lives(a=["exec sleep 1000"]).hosts(Told, alike=False).run() == 143


@pytest.mark.parametrize(
    ("leads", "does", "code"),
    [
        (True, "exit 2", 66),  # refused, and no other one leads
        (True, 'rm -f "$EVERSTEP_HEAD_MARK"; exit 2', 2),  # it stood by
        (True, "exit 0", 64),
        (True, "exit 143", 143),
        (False, "exit 1", 1),
        (False, "exit 127", 127),
        (False, 'touch "$EVERSTEP_HEAD_MARK"; exit 1', 65),  # it had taken over
    ],
)
@pytest.mark.parametrize("engine", ["ssh", "ray"])
def test_a_host_says_whether_it_led(engine: str, leads: bool, does: str, code: int, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{does}\n")
    python.chmod(0o755)
    for etcd in ("etcd://127.0.0.1/j", ""):
        launch = Launch("n", "t", (), (), 2, 1, str(tmp_path / "r"), str(python), folder=str(tmp_path), etcd=etcd)
        if engine == "ray":
            found = HostProcess(0).run(tuple(launch), "127.0.0.1:1", "127.0.0.1", "ab", leads)
        else:
            script = ssh.remote_words(launch, 0, "127.0.0.1", 1)
            with subprocess.Popen(["sh", "-c", script], bufsize=0, stdin=subprocess.PIPE) as shell:
                assert shell.stdin is not None
                shell.stdin.write(
                    b"ab leads\n" if leads else b"ab\n"
                )  # and it stays open, as by its end the host is told to end
                found = shell.wait(60)
        assert found == (code if etcd or code not in (64, 65, 66) else code - 64)


@pytest.mark.parametrize(("there", "code"), [(False, 127), (True, 126)])
@pytest.mark.parametrize("leads", [True, False])
def test_an_interpreter_that_is_not_there_is_the_end_of_its_host_alone(
    there: bool, code: int, leads: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of an actor, too: it says so as a shell does, and its driver goes on."""
    if there:
        (tmp_path / "python").touch()
    launch = Launch("n", "t", (), (), 2, 1, "/r", str(tmp_path / "python"), etcd="etcd://h/j")
    assert HostProcess(0).run(tuple(launch), "127.0.0.1:1", "127.0.0.1", "ab", leads) == code + 64 * leads
    assert f"{tmp_path}/python: " in capfd.readouterr().err


@pytest.mark.parametrize(("etcd", "leads", "code"), [("etcd://h/j", True, 66), ("etcd://h/j", False, 2), ("", True, 2)])
def test_a_first_host_without_the_folder_ends_the_launch(etcd: str, leads: bool, code: int, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone" / "r")
    script = ssh.remote_words(Launch("n", "t", (), (), 2, 1, gone, "python", folder=gone, etcd=etcd), 0, "h", 1)
    word = "ab leads\n" if leads else "ab\n"
    assert subprocess.run(["sh", "-c", script], input=word, text=True, capture_output=True).returncode == code


def test_what_ssh_and_ray_would_start(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--slots", "2", "--run-dir", "/runs/a", "--steps", "3"]
    text = printed(capsys, "launch", "ssh", "resnet18-digits", "--hosts", "me@a,b", "--address", "10.0.0.1", *common)
    assert "run resnet18-digits --listen 10.0.0.1:29400" in text and "agent --join 10.0.0.1:29400" in text
    assert "# b (its first line" in text
    text = printed(capsys, "launch", "ray", "resnet18-digits", "--hosts", "2", *common)
    job, agent = text.splitlines()
    assert "run resnet18-digits --listen ADDRESS:PORT" in job and agent.endswith("--address ADDRESS")


def test_the_interface_that_the_config_names_is_that_of_slurm_s_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "slurm", "resnet18-digits", "--hosts", "2", "--run-dir", "r", "--set", "network.interface=ib0"]
    text = printed(capsys, *words)
    assert '--listen "${address:-ib0}:0"' in text and '${address:+--address "$address"}' in text
    assert "hostname -I" not in text and "--set network.interface=ib0" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert run_command([*words[:-1], "network.interface=ib0$(id)", "--print"]) == 2
    assert "network.interface: expected the name of an interface" in capsys.readouterr().err
