"""`everstep plan failures` and its neighbours: answers as JSON and as text, refusals."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.base.config import load_config, to_dict
from everstep.cli.config_file import read_config_file
from everstep.cli.main import run_command


def answered(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> dict[str, Any]:
    assert run_command(["plan", *options, "--json"]) == code
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def test_failures_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    said = answered(capsys, "failures", "--nodes", "64", "--hours", "168", "--mtbf", "50000h")
    assert said["expected"] == 64 * 168 / 50_000 and said["lecture"] == said["probability"] * 64
    assert said["mtbf_s"] == 50_000 * 3600 / 64 and "counts every node" in said["lecture_reason"]
    assert [one["nodes"] for one in said["scenarios"]] == [8, 64, 256, 1024] and said["scenarios"][1][
        "expected"
    ] == 0.21504
    assert said["by_cause"]["total"] == 419 and said["by_cause"]["expected_total"] == pytest.approx(
        419 * 512 * 168 / (16384 * 54 * 24)
    )
    assert [one["published_is"] for one in said["mttf_by_size"]] == ["observed", "observed", "projected", "projected"]
    assert said["checkpoint_interval"]["ours_s"] == 3600 and said["checkpoint_interval"]["young_s"] == 7500


def test_failures_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "failures", "--nodes", "8", "--hours", "24", "--per-node", "4"]) == 0
    text = capsys.readouterr().out
    assert "a week        64     168    10.19%        0.108" in text and "is no expected number" in text
    assert "devices per node" not in text and "Llama 3's rates, 32 devices" in text


def test_goodput_by_policy(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["goodput", "--devices", "10000", "--mtbf", "9600h", "--runs", "3"]
    said = answered(capsys, *asked)
    by_name = {one["name"]: one for one in said["policies"]}
    ours = ["ours", "ours-no-etcd", "ours-zero", "ours-stages"]
    assert list(by_name) == [*ours, "restart", "torchft", "gemini", "recycle", "oobleck"]
    assert by_name["restart"]["goodput"] < by_name["gemini"]["goodput"] < by_name["ours"]["goodput"] < 1
    assert all(one["closed_form"] == pytest.approx(one["goodput"], abs=0.002) for one in said["policies"])
    assert by_name["ours-stages"]["goodput"] < by_name["ours"]["goodput"]
    assert said["mtbf_job_s"] == 9600 * 3600 / 1250 and all(one["source"] for one in said["times"])
    other = answered(capsys, *asked, "--seed", "1", "--policy", "ours", "--spares", "40", "--days", "30")["policies"]
    assert [one["name"] for one in other] == ["ours"] and other[0]["lost"]["missing"] < by_name["ours"]["lost"][
        "missing"
    ]
    assert other[0]["goodput_of_paid_devices"] == other[0]["goodput"] * 10000 / 10040


def test_goodput_of_nodes_and_hours(capsys: pytest.CaptureFixture[str]) -> None:
    by_devices = answered(capsys, "goodput", "--devices", "512", "--days", "7", "--runs", "2")
    assert answered(capsys, "goodput", "--nodes", "64", "--hours", "168", "--runs", "2") == by_devices


def test_spares_for_a_wanted_goodput(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("goodput", "--devices", "1000", "--days", "30", "--mtbf", "2000h", "--runs", "4")
    policies = ("--policy", "ours", "--policy", "restart")
    few = answered(capsys, *options, *policies, "--wanted", "99%")["spares_wanted"]
    more = answered(capsys, *options, *policies, "--wanted", "99.9%")["spares_wanted"]
    assert few["ours"] is not None and more["ours"] >= few["ours"] and more["restart"] is None
    spares = ("--spares", str(more["ours"]))
    assert answered(capsys, *options, *policies, *spares)["policies"][0]["goodput"] >= 0.999
    assert answered(capsys, *options, *policies)["spares_wanted"] == {}


def test_backups_for_a_wanted_goodput(capsys: pytest.CaptureFixture[str]) -> None:
    """A stage in which a copy takes long lacks a worker meanwhile; a backup has its state already."""
    options = ("goodput", "--devices", "64", "--days", "30", "--mtbf", "200h", "--runs", "6", "--stages", "4")
    options += ("--state", "400GiB", "--network", "10Gb", "--policy", "ours-stages")
    said = answered(capsys, *options, "--wanted", "99.9%")
    assert said["backups_wanted"] == {"ours-stages": 1} and said["spares_wanted"]["ours-stages"] > 0
    found = ("--backups", "1", "--spares", str(said["spares_wanted"]["ours-stages"]))
    with_them = answered(capsys, *options, *found)["policies"][0]
    assert with_them["goodput"] >= 0.999 > answered(capsys, *options)["policies"][0]["goodput"]
    devices = 64 + 4 + int(found[-1])
    assert with_them["goodput_of_paid_devices"] == pytest.approx(with_them["goodput"] * 64 / devices)


def test_time_lost_beside_llama3(capsys: pytest.CaptureFixture[str]) -> None:
    lost = answered(capsys, "failures", "--nodes", "64", "--hours", "168")["time_lost"]
    assert 0 < lost["restarts"] < lost["published_at_most"] == 0.1


def test_what_is_given_is_not_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("failures", "--nodes", "8", "--hours", "24")
    assert answered(capsys, *few)["assumed"][:2] == ["a failure of each node per 100000h", "8 devices per node"]
    assert len(answered(capsys, *few, "--mtbf", "5000h", "--per-node", "4")["assumed"]) == 1
    many = ("goodput", "--devices", "64", "--runs", "2", "--policy", "ours")
    without, given = (answered(capsys, *many, *more)["assumed"] for more in ((), ("--spares", "1", "--step", "3s")))
    assert "no spares" in without and "a step takes 10 s" in without and len(given) == len(without) - 2


def test_recovery_times_are_the_measured_ones_and_can_be_others(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["goodput", "--devices", "64", "--days", "9", "--mtbf", "8h", "--runs", "9", "--spares", "64"]
    asked += ["--policy", "restart", "--repair", "1h"]
    measured, slower = answered(capsys, *asked), answered(capsys, *asked, "--time", "torchrun_host=10min")
    assert slower["policies"][0]["goodput"] < measured["policies"][0]["goodput"] - 0.05
    by_name = {one["name"]: one for one in measured["times"]}
    assert 0 < by_name["ours_next_step"]["seconds"] < 1 and "cores" in by_name["ours_next_step"]["source"]
    given = {one["name"]: one for one in slower["times"]}["torchrun_host"]
    assert (given["seconds"], given["source"]) == (600, "given")


def test_goodput_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "goodput", "--devices", "1000", "--runs", "2"]) == 0
    text = capsys.readouterr().out
    assert "oobleck" in text and "assumed: a step takes 10 s" in text


def test_time_of_a_step_and_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    said = answered(capsys, "time", "--params", "13B", "--gpus", "32", "--tp", "4", "--pp", "2", "--tokens", "26B")
    assert said["split"]["dp"] == 4 and said["micro_batches"] == 256 and said["dtype"] == "bf16"
    assert said["days"] == pytest.approx(26e9 / said["tokens_per_s"] / 86400)
    assert said["dollars"] == pytest.approx(said["days"] * 24 * 32 * 1.5)
    assert said["bubble"] == said["bubble_played"] == 1 / 257 and "llama2-13b" in said["assumed"][0]
    assert said["device_sources"]["price"] and "rows 1.7B and 1008B" in said["stack"]["calibrated"]
    fast = answered(
        capsys, "time", "--params", "13B", "--gpus", "32", "--gpu", "h100-80", "--batch", "64", "--zero", "3"
    )
    assert fast["stack"]["name"] == "torchtitan-compile" and fast["batch"] == 64 and fast["days"] is None
    assert fast["mfu"] == pytest.approx(fast["tflops"] / 989.5)


def test_a_number_between_the_published_models_has_its_layers_scaled(capsys: pytest.CaptureFixture[str]) -> None:
    said = answered(capsys, "time", "--params", "5B", "--gpus", "8", "--sequence", "1024")
    assert said["shape"]["layers"] == 24 and said["parameters"] == pytest.approx(5e9, rel=0.05)
    assert said["shape"]["sequence"] == 1024
    own = answered(capsys, "time", "--layers", "24", "--hidden", "1024", "--heads", "16", "--gpus", "3", "--batch", "3")
    assert own["shape"]["hidden"] == 1024 and "51200 as --vocab" in own["assumed"]


def test_a_batch_that_is_assumed_is_made_to_fit(capsys: pytest.CaptureFixture[str]) -> None:
    said = answered(capsys, "time", "--model", "gpt3-13b", "--gpus", "24", "--micro-batch", "4", code=1)
    assert said["batch"] == 1056 and said["batch"] % 96 == 0
    assert "the batch rounded to 1056, whole micro-batches of all data parallel devices" in said["assumed"]


CATALOGUE = """
mine-64:
  peak_tflops: {bf16: 100, fp32: 10}
  memory: 64GB
  bandwidth_gb_s: 1000
  link_gb_s: 50
  network: 100Gb
  price: 0.5
  mtbf: 30000h
  source: measured here
"""


def test_users_add_devices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "more.yaml"
    file.write_text(CATALOGUE)
    said = answered(capsys, "time", "--params", "1.3B", "--gpus", "8", "--gpu", "mine", "--catalogue", str(file))
    assert said["device"] == "mine-64" and said["device_sources"]["peak"] == "measured here"
    for line, expected in (
        ("  price: 0.5", "got no price"),
        ("  memory: 64GB", "got no memory"),
        ("  link_gb_s: 50", "got no link_gb_s"),
    ):
        file.write_text(CATALOGUE.replace(line + "\n", ""))
        assert run_command(["plan", "time", "--params", "1B", "--gpus", "8", "--catalogue", str(file)]) == 2
        told = capsys.readouterr().err
        assert expected in told and len(told.splitlines()) == 1
    for old, new, expected in (
        ("price: 0.5", "price: -1", "expected a number above 0, got '-1'"),
        ("64GB", "64", "with its unit"),
        ("bf16: 100, fp32: 10", "int4: 3", "expected some of fp32"),
        ("{bf16: 100, fp32: 10}", "3", "got something else"),
        ("measured here", "", "source: expected words"),
        ("price: 0.5", "price: 0.5\n  prise: 1", "got 'prise'; did you mean price"),
        ("mine-64", "64", "expected keys that are text, got 64: put it in quotes"),
    ):
        file.write_text(CATALOGUE.replace(old, new))
        assert run_command(["plan", "time", "--params", "1B", "--gpus", "8", "--catalogue", str(file)]) == 2
        told = capsys.readouterr().err
        assert expected in told and len(told.splitlines()) == 1


def test_without_a_command_it_recommends(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--params", "13B", "--gpus", "32"]
    assert answered(capsys, *asked) == answered(capsys, "recommend", *asked)


def test_the_front_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked, file = ["plan", "--params", "13B", "--gpus", "32"], tmp_path / "front.png"
    assert run_command([*asked, "--picture", str(file)]) == 0
    text = capsys.readouterr().out
    assert "* cannot be bettered in both" in text and file.read_bytes().startswith(b"\x89PNG")
    for name, said in (("front.png", "exists"), ("front.svg", "ends in .png"), ("no/front.png", "there is no folder")):
        assert run_command([*asked, "--picture", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err


def test_without_a_split_the_fastest_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--params", "13B", "--gpus", "32"]
    said, best = answered(capsys, "time", *asked), answered(capsys, "recommend", *asked)["best"][0]
    assert said["split"] == best["split"] and said["step_s"] == best["step_s"] and said["fits"]
    assert said["assumed"][-1].startswith("the fastest split that fits")
    assert not answered(capsys, "time", *asked, "--tp", "1", code=1)["fits"]
    nowhere = answered(capsys, "time", "--params", "1T", "--gpus", "8", code=1)
    assert nowhere["assumed"][-1].startswith("the split that needs the least memory")


CLUSTERS = [
    ("gpus: x", "gpus: expected a whole number from 1 to 1000000, got 'x'"),
    ("gpus: true", "gpus: expected a whole number"),
    ("gpuss: 3", "got 'gpuss'; did you mean gpus?"),
    ("gpus: 8\nper_node: 0", "per_node: expected a whole number from 1 to 1024, got '0'"),
    ("gpus: 8\nnetwork: 200", "network: expected text such as a100-80 or 200Gb, got '200'"),
    ("gpus: 8\nslowest: fast", "slowest: expected a number from 0.01 to 1"),
    ("per_node: 8", "expected --gpus, or --cluster FILE"),
    ("[1", "is not YAML"),
]


def test_a_cluster_may_be_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("gpus: 32\ngpu: h100-80\nper_node: 4\nnetwork: 400Gb\nslowest: 0.9\n")
    options = ["--gpus", "32", "--gpu", "h100-80", "--per-node", "4", "--network", "400Gb", "--slowest", "0.9"]
    said = answered(capsys, "--params", "13B", "--cluster", str(file))
    assert said == answered(capsys, "--params", "13B", *options)
    assert answered(capsys, "--params", "13B", "--cluster", str(file), "--gpus", "64")["devices"] == 64
    for text, refusal in CLUSTERS:
        file.write_text(text)
        assert run_command(["plan", "--params", "13B", "--cluster", str(file)]) == 2
        told = capsys.readouterr().err
        assert refusal in told and len(told.splitlines()) == 1, text


FUSED = ("--recompute", "full", "--stack", "torchtitan-compile")


def test_experts_and_divided_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["time", "--model", "mixtral-8x7b", "--gpus", "64", "--ep", "8", "--zero", "2", "--recompute", "full"]
    said = answered(capsys, *asked)
    assert said["experts_s"] > 0 == said["context_s"] and said["split"]["ep"] == 8 and said["fits"]
    long = ["time", "--model", "llama3-8b", "--sequence", "131072", "--batch", "8", "--gpus", "64", "--cp", "8"]
    far = answered(capsys, *long, "--per-node", "1", "--network", "1Gb", "--zero", "3", *FUSED)
    assert far["context_s"] > 0 and far["split"] | {"cp": 8, "dp": 8} == far["split"] and far["fits"]
    best = answered(capsys, "--model", "mixtral-8x7b", "--gpus", "64")["best"]
    assert any(one["split"]["ep"] > 1 for one in best) and not any(one["runs"] for one in best)


def test_time_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "time", "--model", "llama3-8b", "--gpus", "8", "--gpu", "h100", "--batch", "16"]) == 0
    text = capsys.readouterr().out
    assert "days and dollars: give --tokens" in text and "matrices" in text and "played through" in text


TIME = ["time", "--params", "13B", "--gpus"]
REFUSED = [
    (["time", "--gpus", "8"], "expected one of --params 13B, --model NAME"),
    ([*TIME, "8", "--model", "gpt3-13b"], "expected one of --params"),
    (["time", "--params", "1M", "--gpus", "8"], "near a published model's, 50M to 5T, got 1M: give --layers"),
    (["recommend", "--params", "10000T", "--gpus", "8"], "near a published model's"),
    ([*TIME, "12"], "--gpus: expected whole nodes of 8 (--per-node), got 12"),
    ([*TIME, "0"], "--gpus"),
    ([*TIME, "8", "--gpu", "a100-8"], "did you mean a100-80"),
    ([*TIME, "8", "--dtype", "fp8"], "--dtype: expected one of fp32, tf32, fp16, bf16 on a100-80, got 'fp8'"),
    ([*TIME, "8", "--stack", "none"], "--stack: expected one of megatron-2021"),
    ([*TIME, "8", "--tp", "3"], "--tp: expected a divisor of the 40 heads, got 3"),
    ([*TIME, "32", "--tp", "8", "--pp", "8"], "expected a multiple of --tp x --pp (64) devices, got 32"),
    (
        [*TIME, "64", "--pp", "64"],
        "--pp: expected at most one part for each of the 40 layers, got 64 stages of 1 chunk",
    ),
    (
        [*TIME, "8", "--batch", "12", "--zero", "1"],
        "--batch: expected a multiple of 8 (data parallel x --micro-batch), got 12",
    ),
    ([*TIME, "8", "--pp", "2", "--chunks", "2"], "chunks: expected 1 with schedule 1f1b"),
    ([*TIME, "8", "--cp", "3"], "expected a multiple of --tp x --pp x --cp (3) devices, got 8"),
    ([*TIME, "3", "--cp", "3"], "--cp: expected a divisor of the sequence's 4096 tokens, got 3"),
    ([*TIME, "8", "--ep", "2"], "--ep: expected 1 for a model without --experts, got 2"),
    ([*TIME, "8", "--experts", "6", "--ep", "4"], "--ep: expected a divisor of the 6 experts, got 4"),
    ([*TIME, "8", "--experts", "3", "--ep", "3"], "--ep: expected a divisor of the 8 data parallel devices, got 3"),
    ([*TIME, "8", "--experts", "-1"], "--experts: expected from 0 to 4096, got -1"),
    ([*TIME, "8", "--experts-per-token", "2"], "--experts-per-token: expected from 1 to 1, got 2"),
    ([*TIME, "8", "--tokens", "26"], "for at least one step (1024 x 4096 tokens)"),
    (["--params", "13B"], "expected --gpus, or --cluster FILE"),
    (["memroy", "--params", "13B"], "No such command 'memroy'"),
    ([*TIME, "8", "--network", "200GB"], "bits per second with their unit, such as 200Gb"),
    ([*TIME, "8", "--tokens", "-1"], "--tokens: expected a number such as 125M"),
    ([*TIME, "8", "--heads", "7"], "--heads: expected a divisor of the hidden size 5120, got 7"),
    ([*TIME, "8", "--layers", "0"], "--layers: expected from 1 to 1e+07, got 0"),
    (["recommend", "--params", "13B", "--gpus", "1024", "--batch", "3"], "some split, such as 1024, got 3"),
    (["recommend", "--params", "13B", "--gpus", "32", "--mtbf", "3"], "--mtbf: expected a time"),
    (["recommend", "--params", "13 billion", "--gpus", "32"], "--params: expected a number such as 125M"),
    (["time", "--model", "lama3-8b", "--gpus", "8"], "did you mean llama3-8b"),
    ([*TIME, "8", "--catalogue", "/no/such"], "cannot read"),
    ([*TIME, "8", "--gpu", ""], "--gpu: expected one of a10-24"),
    ([*TIME, "8", "--dtype", ""], "--dtype: expected one of fp32"),
    ([*TIME, "8", "--stack", ""], "--stack: expected one of megatron-2021"),
    ([*TIME, "8", "--tokens", ""], "--tokens: expected a number"),
    (["goodput", "--devices", "8", "--spares", "1000000000"], "--spares"),
    (["failures", "--hours", "1"], "--nodes"),
    (["failures", "--nodes", "0", "--hours", "1"], "--nodes"),
    (["failures", "--nodes", "8", "--hours", "-1"], "more than 0 and at most 1e+06 hours, got -1"),
    (["failures", "--nodes", "8", "--hours", "nan"], "got nan"),
    (["failures", "--nodes", "8", "--hours", "1", "--mtbf", "100000"], "with its unit"),
    (["failures", "--nodes", "8", "--hours", "1", "--mtbf", "1e20h"], "from 0.001 to 1e+12 seconds"),
    (["goodput", "--devices", "0"], "--devices"),
    (["goodput", "--devices", "8", "--days", "-2"], "got -2"),
    (["goodput", "--devices", "8", "--policy", "oublock"], "expected one of ours, ours-no-etcd"),
    (["goodput", "--devices", "8", "--policy", "recycel"], "did you mean recycle"),
    (["goodput", "--devices", "8", "--time", "ours_next_stp=1s"], "did you mean ours_next_step"),
    (["goodput", "--devices", "8", "--time", "ours_head=1"], "--time ours_head: expected a time"),
    (["goodput", "--devices", "8", "--wanted", "99.9"], "less than 100%, such as 99.9%, got '99.9'"),
    (["goodput", "--devices", "8", "--wanted", "101%"], "got '101%'"),
    (["goodput", "--devices", "8", "--replica", "16"], "at most --devices (8), got 16"),
    (["goodput", "--devices", "100"], "expected whole nodes of 8 (--per-node), got 100"),
    (["goodput", "--devices", "1000000", "--mtbf", "1min"], "expected at most 2,000,000 failures"),
    (["failures", "--nodes", "8", "--hours", "1", "--checkpoint-cost", "-3s"], "--checkpoint-cost: expected a time"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_a_bad_question_is_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", *options]) == 2
    told = capsys.readouterr()
    assert not told.out and said in told.err and len(told.err.splitlines()) == 1


WITHOUT_TORCH = [
    ["recommend", "--params", "13B", "--gpus", "32"],
    ["time", "--params", "13B", "--gpus", "8"],
    ["failures", "--nodes", "8", "--hours", "24"],
    ["goodput", "--devices", "64", "--runs", "2"],
]


def test_torch_is_not_imported() -> None:
    program = (
        "import sys; from everstep.cli.main import run_command; "
        f"codes = [run_command(['plan', *options]) for options in {WITHOUT_TORCH!r}]; "
        "sys.exit(any(codes) or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL).returncode == 0


AT_MOST_S = [
    (["time", "--params", "13B", "--gpus", "32", "--tokens", "26B"], 2),
    (["memory", "--params", "7.5B", "--zero", "2", "--workers", "64"], 2),
    (["recommend", "--params", "175B", "--gpus", "1024"], 10),
    (["goodput", "--devices", "10000", "--days", "90", "--mtbf", "6000h", "--seed", "3"], 30),
    pytest.param(
        ["goodput", "--devices", "10000", "--days", "90", "--mtbf", "1000h", "--wanted", "99.5%", "--runs", "6"],
        30,
        marks=pytest.mark.longer,
    ),
]


@pytest.mark.parametrize(("options", "seconds"), AT_MOST_S, ids=lambda value: value[0] if type(value) is list else None)
def test_it_answers_soon_and_the_same_again(options: list[str], seconds: float) -> None:
    """Processor time, start included: other programs do not count."""
    command, before = [sys.executable, "-P", "-m", "everstep", "plan", *options, "--json"], children_s()
    first = subprocess.run(command, capture_output=True, check=True)
    assert children_s() - before < seconds
    assert subprocess.run(command, capture_output=True, check=True).stdout == first.stdout


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_ten_best_splits_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    said = answered(capsys, "recommend", "--params", "13B", "--gpus", "32", "--gpu", "a100-80", "--tokens", "26B")
    best = said["best"]
    assert said["fits"] and said["needed"] is None and len(best) == 10 and all(one["fits"] for one in best)
    assert [one["step_s"] for one in best] == sorted(one["step_s"] for one in best) and all(one["why"] for one in best)
    first = best[0]
    hours = 26e9 / first["time"]["tokens_per_s"] / 3600 / first["goodput"]
    assert first["days"] == pytest.approx(hours / 24) and first["dollars"] == pytest.approx(hours * 32 * 1.5)
    assert first["failures"] == pytest.approx(32 * hours / said["device_mtbf_h"]) and 0.99 < first["goodput"] < 1
    assert set(said["sources"]) > {"memory", "time", "goodput", "failures", "dollars"}
    assert said["device_mtbf_h"] == 8 * 100_000 and any("3,692 h" in one for one in said["assumed"])
    worse = answered(capsys, "recommend", "--params", "13B", "--gpus", "32", "--mtbf", "100h")
    assert worse["device_mtbf_h"] == 800 and worse["best"][0]["goodput"] < first["goodput"]
    assert worse["sources"]["failures"] == "given" and worse["best"][0]["days"] is None


def test_a_job_that_never_ends_takes_no_number_of_days(capsys: pytest.CaptureFixture[str]) -> None:
    said = answered(capsys, "recommend", "--params", "13B", "--gpus", "32", "--tokens", "1B", "--mtbf", "100ms")
    assert said["best"][0]["goodput"] < 1e-6 and said["best"][0]["days"] is None is said["best"][0]["failures"]


def test_a_model_that_fits_nowhere_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    said = answered(capsys, "recommend", "--params", "175B", "--gpus", "8", code=1)
    assert not said["fits"] and said["needed"]["devices"] == 64 and said["needed"]["least_bytes"] > 80e9
    assert run_command(["plan", "recommend", "--params", "175B", "--gpus", "8"]) == 1
    text = capsys.readouterr().out
    assert "nothing fits: at least 351 GB per device are needed; 64 of these devices would do" in text


def test_the_config_that_is_written_is_one_that_jobs_take(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    asked = ["plan", "recommend", "--params", "1.3B", "--gpus", "8", "--batch", "96", "--write", str(file)]
    assert run_command([*asked, "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["written"]
    config = load_config([(str(file), read_config_file(file) | {"device": "cuda"})])
    assert written["path"] == str(file) and written["config"].pop("device") == "auto"
    assert to_dict(config).items() >= written["config"].items()
    assert config.workers == 8 and config.lanes * config.micro_batch == 96 and config.zero.stage == 0
    assert file.read_text().startswith("# everstep plan recommend: 1.3")
    assert run_command(asked) == 2
    assert "exists: name another file" in capsys.readouterr().err
    file.unlink()
    assert run_command(asked) == 0
    assert f"written: {file}, what jobs can run" in capsys.readouterr().out


def test_what_jobs_cannot_run_is_not_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    assert run_command(["plan", "recommend", "--params", "70B", "--gpus", "64", "--write", str(file)]) == 1
    text = capsys.readouterr().out
    assert "not written: what jobs can run (float32" in text and not file.exists()
