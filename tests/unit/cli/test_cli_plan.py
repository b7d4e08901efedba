"""`everstep plan memory`: both tables, tasks on the meta device, refusals, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.main import run_command


def planned(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> dict[str, Any]:
    assert run_command(["plan", "memory", *options, "--json"]) == code
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def test_of_a_number_of_parameters_the_papers_table_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys, "--params", "7.5B", "--workers", "64", "--zero", "2")
    assert said["per_worker_bytes"]["optimizer"] == 12 * 7_500_000_000 // 64
    assert (said["baseline_memory_gb"], said["zero_memory_gb"]) == (120, 16.640625)
    assert said["fits"] is None and said["max_model_size_with_zero"] is None
    assert sorted(said["stages"]) == ["0", "1", "2", "3"] and said["stages"]["3"]["zero_memory_gb"] == 1.875
    assert said["ours"]["per_worker_bytes"]["parameters"] == 30 * 10**9 and said["ours"]["stages"]["0"]["runs"]
    assert "1910.02054" in said["source"] and said["assumed"][:2] == ["an optimizer like Adam", "64 lanes"]


def test_lanes_that_are_given_are_not_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "memory", "--params", "1B", "--lanes", "64", "--json"]) == 0
    staging = "nothing for checkpoints that wait for the disk, which may take half of what is free (--staging)"
    assert json.loads(capsys.readouterr().out)["assumed"] == ["an optimizer like Adam", staging]
    assert run_command(["plan", "memory", "--params", "1B", "--lanes", "64", "--staging", "1GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["assumed"] == ["an optimizer like Adam"]


def test_a_task_is_counted_and_ours_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys, "mlp-digits", "--workers", "4")
    assert said["parameters"] == 8970 and said["per_worker_bytes"]["parameters"] == 4 * 8970
    assert said["per_worker_bytes"]["activations"] > 0 and said["paper"]["per_worker_bytes"]["gradients"] == 2 * 8970
    assert said["workers"] == 4 and said["zero_memory_gb"] == sum(said["per_worker_bytes"].values()) / 1e9


def test_lanes_and_staging_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """With one lane per worker stage 2 holds no whole sum."""
    one, two = (
        planned(capsys, "mlp-digits", "--workers", "4", "--copies", "1", "--zero", "2", "--lanes", lanes)
        for lanes in ("4", "8")
    )
    assert one["lanes"] == 4 and one["per_worker_bytes"]["lanes"] < two["per_worker_bytes"]["lanes"] == 4 * 8970
    staged = planned(capsys, "mlp-digits", "--workers", "4", "--staging", "10KiB")
    assert staged["per_worker_bytes"]["staging"] == 10 << 10
    apart = planned(capsys, "--params", "1B", "--workers", "4", "--staging", "1GiB", "--gpu", "a100-80")["ours"]
    assert apart["host_bytes"]["staging"] == 1 << 30 and "staging" not in apart["per_worker_bytes"]
    assert run_command(["plan", "memory", "mlp-digits", "--staging", "much"]) == 2
    assert "--staging: expected" in capsys.readouterr().err


def test_processes_of_a_worker_are_counted_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    """What they share is divided among them; what they exchange at once is the smaller the finer `cell.wrap`."""
    task = planned(capsys, "mlp-digits", "--set", "cell.fsdp=4")["cell"]
    assert task["ranks"] == 4 and task["per_rank_bytes"]["parameters"] == round(4 * 8970 / 4)
    units, modules = (
        planned(capsys, "--params", "1B", "--set", "cell.fsdp=4", *more)["cell"]["per_rank_bytes"]
        for more in ((), ("--set", "cell.wrap=1000"))
    )
    assert modules["exchange"] == 12_000 < units["exchange"]
    assert planned(capsys, "mlp-digits")["cell"] is None
    small = planned(capsys, "--params", "1B", "--set", "cell.fsdp=4", "--set", "cell.wrap=1000", "--memory", "9GB")
    assert "cell" in small and sum(small["cell"]["per_rank_bytes"].values()) < 9 * 10**9
    planned(capsys, "--params", "1B", "--set", "cell.fsdp=4", "--memory", "9GB", code=1)
    assert run_command(["plan", "memory", "--params", "1B", "--set", "cell.fsdp=0"]) == 2
    assert "cell.fsdp: expected" in capsys.readouterr().err


def test_processes_of_a_worker_on_several_hosts_have_less_of_the_state_on_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And parameters of the others while a unit computes, or for a step; the sums are on the head's host."""
    four = ("transformer-text", "--set", "cell.fsdp=4", "--set")
    one, two = (planned(capsys, *four, f"cell.hosts={n}")["cell"]["per_rank_bytes"] for n in (1, 2))
    whole = planned(capsys, *four, "cell.hosts=2", "--set", "cell.reshard_after_forward=false")
    assert one["parameters"] == two["parameters"] and one["elsewhere"] == 0 and two["lanes"] == 2 * one["lanes"]
    assert 0 < two["elsewhere"] < whole["cell"]["per_rank_bytes"]["elsewhere"] == one["parameters"]
    assert run_command(["plan", "memory", *four, "cell.hosts=2"]) == 0
    assert "each of the 4 processes of a worker (cell.fsdp=4) on 2 hosts, of those on its head's, in GB" in (
        capsys.readouterr().out
    )


def test_workers_of_several_processes_have_a_part_of_the_optimizers_state(capsys: pytest.CaptureFixture[str]) -> None:
    """Which these divide among them, with the results; with as many copies as workers each has all."""
    cells = ("mlp-digits", "--workers", "4", "--set", "cell.fsdp=2", "--set")
    whole, one, two, all_of_it = (
        planned(capsys, *cells, *more)["cell"]["per_rank_bytes"]
        for more in (
            ("zero.stage=0",),
            ("zero.stage=1", "--copies", "1"),
            ("zero.stage=2", "--copies", "1"),
            ("zero.stage=1", "--copies", "4"),
        )
    )
    assert all_of_it == whole and one["optimizer"] == two["optimizer"]
    assert 0.25 * whole["optimizer"] <= one["optimizer"] < 0.3 * whole["optimizer"], "what is kept once is whole"
    assert one["first"] == whole["first"] == 2 * two["first"]


TRANSFORMER = ("transformer-text", "--set", "cell.shards=4", "--set", "task.layers=1")


def test_processes_that_compute_a_lane_together_keep_their_shards_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Their activations are divided inside the sharded layers; the first lane's gradient is whole at each of them."""
    two, four, seats = (
        planned(capsys, *TRANSFORMER, *more)["cell"]
        for more in (
            ("--set", "cell.tp=2"),
            ("--set", "cell.tp=4"),
            ("--set", "cell.tp=2", "--set", "cell.fsdp=2"),
        )
    )
    assert (two["ranks"], four["ranks"], seats["ranks"]) == (2, 4, 4)
    alone, kept = planned(capsys, *TRANSFORMER), [one["per_rank_bytes"] for one in (two, four, seats)]
    assert kept[1]["activations"] < kept[0]["activations"] == kept[2]["activations"]
    assert kept[0]["first"] == kept[1]["first"] == 4 * alone["parameters"] and kept[0]["shards"] > 0
    assert alone["cell"] is None and alone["per_worker_bytes"]["activations"] > kept[0]["activations"]
    assert not [one for one in alone["assumed"] if "cannot be counted" in one]
    assert run_command(["plan", "memory", *TRANSFORMER, "--set", "cell.tp=2"]) == 0
    assert "each of the 2 processes of a worker (cell.tp=2), in GB" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["disk", "./disk", "/disk/a", "none", "cpu"])
def test_an_offload_is_a_folder_whose_name_may_have_no_slash(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert planned(capsys, "--params", "1M", "--offload", name)["offload"] == name


@pytest.mark.parametrize("name", ["", "GPU", "CPU", "cuda:0", "nvme", "true"])
def test_words_of_others_are_no_folders(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run_command(["plan", "memory", "--params", "1M", "--offload", name]) == 2
    assert "--offload: expected none, cpu or a folder" in capsys.readouterr().err


def test_it_says_whether_the_optimizer_can_be_divided(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert planned(capsys, "mlp-digits")["optimizer"] == {"divides": "elements", "why": ""}
    assert planned(capsys, "--params", "1B")["optimizer"] is None
    task = tmp_path / "factored.py"
    task.write_text(
        "import torch\nfrom everstep.zoo import registry\n"
        "class Factored(registry.load('mlp-digits')):\n"
        "    def build_optimizer(self, params):\n        return torch.optim.Adafactor(params)\n"
    )
    found = planned(capsys, f"{task}:Factored")["optimizer"]
    assert found["divides"] == "matrices" and "cannot be updated alone" in found["why"]
    assert run_command(["plan", "memory", f"{task}:Factored"]) == 0
    said = capsys.readouterr().out
    assert "its optimizer can be divided between parameters, not within one" in said
    assert "jobs run stage 3: no: the optimizer can be divided between parameters, not within one (" in said


def test_a_stage_that_the_optimizer_does_not_allow_does_not_run_and_saves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    task = tmp_path / "others.py"
    task.write_text(
        "import torch\nfrom everstep.zoo import registry\n"
        "class Noise(torch.optim.Adam):\n"
        "    def step(self, closure=None):\n        super().step()\n"
        "        for p in self.param_groups[0]['params']:\n            p.data.add_(torch.randn_like(p))\n"
        "class Noisy(registry.load('mlp-digits')):\n"
        "    def build_optimizer(self, params):\n        return Noise(params)\n"
        "class Narrow(registry.load('mlp-digits')):\n"
        "    def build_optimizer(self, params):\n        return torch.optim.Adam(params)\n"
        "    def build_model(self):\n"
        "        model = super().build_model()\n        model[0].to(torch.bfloat16)\n        return model\n"
        "class Plain(registry.load('mlp-digits')):\n"
        "    def build_optimizer(self, params):\n        return torch.optim.SGD(params, lr=0.1)\n"
    )
    found = planned(capsys, f"{task}:Plain", "--workers", "4", "--copies", "1")
    bytes_of = {k: one["per_worker_bytes"] for k, one in found["stages"].items()}
    assert bytes_of["1"] == bytes_of["2"] == bytes_of["0"] and found["stages"]["2"]["runs"]
    assert "keeps nothing for its parameters" in found["optimizer"]["why"]

    found = planned(capsys, f"{task}:Noisy", "--workers", "4")
    assert found["optimizer"]["divides"] == "nothing"
    bytes_of = {k: one["per_worker_bytes"]["optimizer"] for k, one in found["stages"].items()}
    assert bytes_of["1"] == bytes_of["2"] == bytes_of["0"]
    for stage in ("1", "2", "3"):
        assert found["stages"][stage]["runs"] is False
        assert "the optimizer cannot be divided (" in found["stages"][stage]["runs_not"]
    assert found["stages"]["0"]["runs"] is True

    found = planned(capsys, f"{task}:Narrow", "--workers", "4")
    bytes_of = {k: one["per_worker_bytes"]["optimizer"] for k, one in found["stages"].items()}
    narrow = 2 * 2 * (64 * 64 + 64)
    assert 2 * bytes_of["1"] == pytest.approx(bytes_of["0"] + narrow, rel=0.01) and found["stages"]["1"]["runs"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "[setattr(p, 'grad', None) for p in g['params'] if not p.numel()]",
            "keeps nothing for a parameter of no elements",
        ),
        ("g['lr'] *= 0.9", "updates change its groups"),
    ],
)
def test_stage_3_does_not_run_with_an_optimizer_that_cells_refuse(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, why: str
) -> None:
    task = tmp_path / "odd.py"
    task.write_text(
        "import torch\nfrom everstep.zoo import registry\n"
        "class Odd(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        "        for g in self.param_groups:\n"
        f"            {line}\n"
        "        super().step()\n"
        "class Own(registry.load('mlp-digits')):\n"
        "    def build_optimizer(self, params):\n        return Odd(params, lr=0.1, momentum=0.9)\n"
        "    def build_model(self):\n        return torch.nn.Linear(64, 10, bias=False)\n"
    )
    found = planned(capsys, f"{task}:Own", "--workers", "4")
    assert found["optimizer"] == {"divides": "elements", "why": ""}
    assert found["stages"]["1"]["runs"] and not found["stages"]["3"]["runs"]
    assert why in found["stages"]["3"]["runs_not"]


def test_large_parameters_are_tried_with_fewer_rows_and_what_cannot_be_tried_is_unknown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    task = tmp_path / "large.py"
    task.write_text(
        "import torch\nfrom everstep.zoo import registry\n"
        "class Large(registry.load('mlp-digits')):\n"
        "    def build_model(self):\n        return torch.nn.Linear(3000, 3000, bias=False)\n"
        "class Counts(Large):\n"
        "    def build_optimizer(self, params):\n        assert params[0].is_meta\n"
        "        return torch.optim.SGD(params, lr=0.1)\n"
    )
    assert planned(capsys, f"{task}:Large")["optimizer"] == {"divides": "elements", "why": ""}
    assert planned(capsys, f"{task}:Counts")["optimizer"] is None


def test_what_does_not_fit_is_an_answer_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--params", "7.5B", "--workers", "64", "--gpu", "a100-80"]
    assert planned(capsys, *options, code=1)["fits"] is False
    fitting = planned(capsys, *options, "--zero", "1")
    assert (
        fitting["fits"] is True and fitting["assumed"][0] == "80 GB on each a100-80 (data sheets of the makers, 2025)"
    )
    assert run_command(["plan", "memory", *options]) == 1
    text = capsys.readouterr().out
    assert "largest model" in text and "jobs run stage 2: yes (zero.stage=2) on CPUs" in text
    assert "jobs run stage 3: no: cell.fsdp: " in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "expected a TASK or --params"),
        (["mlp-digits", "--params", "1B"], "and not both"),
        (["--params", "a lot"], "expected a number such as 125M"),
        (["--params", "7B", "--gpu", "h101"], "expected one of a10-24"),
        (["--params", "7B", "--memory", "80"], "with its unit"),
        (["--params", "7B", "--memory", "80GB", "--gpu", "l4"], "got both"),
        (["--params", "7B", "--copies", "3", "--workers", "2"], "at most one per worker (2), got 3"),
        (["--params", "7B", "--hosts", "3", "--workers", "2"], "at most one per worker (2), got 3"),
        (["--params", "7B", "--zero", "4"], "--zero"),
        (
            ["--params", "7B", "--zero", "1", "--set", "zero.stage=2"],
            "--zero: expected 2, as the job's zero.stage, got 1",
        ),
        (["--params", "7B", "--set", "zero.stage=3"], "zero.stage: expected 0, 1 or 2, got 3"),
        (["--params", "7B", "--set", "zero.copies=3"], "--copies: expected at most one per worker (1), got 3"),
        (["--params", "7B", "--workers", "1000000000"], "1<=x<=1000000"),
        (["--params", "7B", "--set", "lanes=10000000000"], "lanes: expected at most 1000000, got 10000000000"),
        (["--params", "7B", "--offload", "gpu"], "expected none, cpu or a folder"),
        (["--params", "13B", "--workers", "8", "--tp", "3"], "--tp: expected a divisor of the 40 heads"),
        (["--params", "13B", "--workers", "8", "--pp", "2", "--chunks", "2"], "chunks: expected 1 with schedule 1f1b"),
        (["--params", "13B", "--workers", "8", "--sp"], "--sp: expected --tp of at least 2"),
        (
            ["--params", "1M", "--workers", "8", "--tp", "2"],
            "near a published model's, 50M to 5T for a split, got 1000000",
        ),
        (["--params", "13B", "--stack", "foo"], "--stack: expected one of megatron-2021"),
        (["mlp-digits", "--stack", "megatron-2021"], "--stack: a task's activations are counted"),
        (["--params", "13B", "--workers", "8", "--tp", "5"], "multiple of --tp x --pp (5) devices, got 8"),
        (["--params", "13B", "--workers", "64", "--pp", "64"], "at most one part for each of the 40 layers"),
        (["no-such-task"], "no-such-task"),
        (["resnet18-folder"], "expected a folder of pictures"),
    ],
)
def test_bad_input_is_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "memory", *options]) == 2
    told = capsys.readouterr()
    assert not told.out and said in told.err and len(told.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (["--zero", "2", "--copies", "1"], ["zero.stage=2", "zero.copies=1"]),
        (["--offload", "/disk", "--offload-params"], ["zero.offload=/disk", "zero.offload_params=true"]),
        (["--staging", "512MiB"], ["checkpoint.staging_mb=512"]),
    ],
)
def test_what_the_job_is_told_counts_as_the_options_do(
    options: list[str], settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--params", "1B", "--workers", "8"]
    told = planned(capsys, *asked, *(text for one in settings for text in ("--set", one)))
    assert told == planned(capsys, *asked, *options) != planned(capsys, *asked)


def test_the_job_that_runs_a_stage_is_named_with_all_that_was_counted(capsys: pytest.CaptureFixture[str]) -> None:
    def runs(*options: str) -> list[dict[str, object] | None]:
        stages = planned(capsys, "--params", "1B", "--workers", "8", *options)["ours"]["stages"].values()
        return [found and {k: v for k, v in found.items() if "zero" in k} for found in (x["runs_with"] for x in stages)]

    assert runs("--copies", "1")[:3] == [{}, *({"zero.stage": stage, "zero.copies": 1} for stage in (1, 2))]
    assert runs()[:3] == runs("--copies", "2")[:3] == [{}, {"zero.stage": 1}, {"zero.stage": 2}]
    files = {"zero.offload": "/disk", "zero.offload_params": True}
    assert runs("--offload", "/disk", "--offload-params") == [files, None, None, None]


TASKS = """
import torch
import everstep

class Frozen(everstep.Task):
    defaults = {"lanes": 2, "micro_batch": 1, "steps": 1}
    def build_model(self):
        return torch.nn.Linear(2, 2).requires_grad_(False)

class Reads(Frozen):
    def build_model(self):
        return torch.nn.Linear(2, 2 + int(torch.ones(1).item()))

class Trained(Frozen):
    def build_model(self):
        return torch.nn.Linear(2, 2)
    def build_dataset(self, split):
        raise OSError("not downloaded")
    def build_optimizer(self, params):
        return torch.optim.LBFGS(params)
"""


def test_what_cannot_be_counted_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, script = tmp_path / "tasks.py", tmp_path / "script.py"
    file.write_text(TASKS)
    script.write_text("")
    for name, why in (
        (f"{file}:Frozen", "has no parameter that is trained"),
        (f"{file}:Reads", "cannot be built on torch's meta device"),
        (str(script), "is a script"),
    ):
        assert run_command(["plan", "memory", name]) == 2
        told = capsys.readouterr().err
        assert why in told and len(told.splitlines()) == 1
    said = planned(capsys, f"{file}:Trained")
    assert said["per_worker_bytes"]["optimizer"] == 8 * 6 and said["per_worker_bytes"]["activations"] == 0
    assert "not downloaded" in said["assumed"][1] and "for the optimizer, which cannot be counted" in said["assumed"][0]


def test_usual_splits_of_a_number_of_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    usual = planned(capsys, "--params", "13B", "--workers", "32", "--zero", "3", "--gpu", "a100-80")["usual"]
    found = usual["splits"]
    assert list(found) == [
        *("ddp", "zero1", "zero2", "zero3", "fsdp+recompute", "ddp+offload", "zero1+offload", "tp8", "tp8+sp"),
        *("pp8", "tp8+sp x pp4+zero1", "cp8+zero1"),
    ]
    assert [name for name, one in found.items() if one["runs"]] == [
        *("ddp", "zero1", "zero2", "zero3", "ddp+offload", "zero1+offload", "tp8", "tp8+sp", "pp8"),
        "tp8+sp x pp4+zero1",
    ]
    assert found["tp8"]["runs_with"]["cell.tp"] == 8 and found["zero3"]["runs_with"]["cell.fsdp"] == 32
    assert "recompute" in found["fsdp+recompute"]["runs_not"]
    assert not found["ddp"]["fits"] and found["zero3"]["fits"] and "llama2-13b" in usual["assumed"][0]
    assert found["ddp"]["host_bytes"] == {"snapshots": 14 * usual["parameters"]}
    assert found["zero1+offload"]["host_bytes"]["optimizer"] == round(12 * usual["parameters"] / 32)
    assert all(
        one["total_bytes"] == pytest.approx(sum(one["per_worker_bytes"].values()), abs=9) for one in found.values()
    )
    assert planned(capsys, "--params", "1M")["usual"] is None
    deep = planned(capsys, "--params", "13B", "--workers", "32", "--tp", "4", "--pp", "4", "--recompute", "full")[
        "usual"
    ]
    assert deep["splits"]["ddp"]["split"]["dp"] == 2 and deep["splits"]["ddp"]["fits"] is None
    assert run_command(["plan", "memory", "--params", "13B", "--workers", "8"]) == 0
    assert "jobs run it" in capsys.readouterr().out


def test_a_split_asked_for_is_the_answer_and_that_of_plan_time(capsys: pytest.CaptureFixture[str]) -> None:
    split = ["--gpu", "a100-80", "--tp", "4", "--pp", "32", "--zero", "1", "--recompute", "selective"]
    said = planned(capsys, "--params", "175B", "--workers", "1024", *split, "--stack", "megatron-2021")
    assert run_command(["plan", "time", "--params", "175B", "--gpus", "1024", *split, "--json"]) == 0
    time = json.loads(capsys.readouterr().out)
    assert said["fits"] and said["total_bytes"] == time["total_bytes"] == sum(said["per_worker_bytes"].values())
    assert said["sources"]["fits"] == said["source"] == said["usual"]["source"]
    assert not said["stages"]["1"]["fits"], "by ZeRO alone"
    large = ["--params", "13B", "--workers", "32", "--gpu", "a100-80", "--zero", "2", "--micro-batch", "16"]
    assert planned(capsys, *large, code=1)["fits"] is False
    assert run_command(["plan", "memory", *large]) == 1
    assert "32 data parallel, ZeRO 2, micro-batch 16): 617.3 GB" in capsys.readouterr().out.splitlines()[0]


def test_torch_is_not_imported_for_a_number_of_parameters() -> None:
    program = (
        "import sys; from everstep.cli.main import run_command; "
        "code = run_command(['plan', 'memory', '--params', '13B', '--workers', '8']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL).returncode == 0
