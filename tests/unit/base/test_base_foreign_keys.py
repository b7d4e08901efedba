"""Keys of other tools: each is answered with what is true here, and none is taken for a key."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from everstep.base.config import describe, instead_of, load_config
from everstep.base.errors import ConfigError
from everstep.base.foreign_keys import FOREIGN_KEYS, ForeignKey, elsewhere_with, known_elsewhere
from everstep.cli.agent import command as agent
from everstep.cli.main import COMMANDS, cli, run_command
from everstep.cli.run import command as run
from everstep.train.join import join
from everstep.train.run import Run, Step
from everstep.train.task import Task
from everstep.zoo.registry import load, names

KEYS = {row[0] for row in describe()}
NAMES = [name for foreign in FOREIGN_KEYS for name in foreign.names.split()]
OWNERS = {"Task": Task, "run": Run, "step": Step}
"""What stands before the dot of an attribute that an answer names."""
CLIP, LOADER, LANES = "here it is clip_norm", "here it is loader.workers", "here it is accumulate: "
BATCH, OPTIMIZER, PRECISION = (
    "the global batch is lanes x micro_batch",
    "give it to your optimizer",
    "here it is precision",
)


_OF_TORCH = ("torch.utils.data.Subset", "torch.set_float32_matmul_precision")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("max_grad_norm", CLIP),
        ("gradient_clip_val", CLIP),
        ("gradient_clipping", CLIP),
        ("collate_fn", "write Task.collate, or give join(collate=...)"),
        ("num_workers", LOADER),
        ("dataloader_num_workers", LOADER),
        ("batchsize", BATCH),
        ("schedulers", "give it to your scheduler"),
        ("optimizers", OPTIMIZER),
        ("train_loader", "give it to join as its third argument"),
        ("val_dataloader", "give it to run.evaluate"),
        ("eval_iters", "an evaluation goes through its whole dataset"),
        ("allow_tf32", "call torch.set_float32_matmul_precision"),
        ("pin_memory", "here it is loader.pin_memory"),
        ("sampler", "samples come in an order that follows from seed"),
        ("drop_last", "no sample is dropped"),
        ("batch_size", BATCH),
        ("per_device_train_batch_size", BATCH),
        ("train_micro_batch_size_per_gpu", BATCH),
        ("per_device_eval_batch_size", "it belongs to the evaluation"),
        ("gradient_accumulation_steps", LANES),
        ("accumulate_grad_batches", LANES),
        ("learning_rate", OPTIMIZER),
        ("lr", OPTIMIZER),
        ("lr_scheduler_type", "give it to your scheduler"),
        ("max_steps", "here it is steps"),
        ("num_train_epochs", "here it is epochs"),
        ("max_epochs", "here it is epochs"),
        ("eval_steps", "here it is eval_every"),
        ("logging_steps", "here it is log_every"),
        ("save_steps", "here it is checkpoint.disk.every_steps"),
        ("save_strategy", "here it is checkpoint.disk.every_epochs"),
        ("eval_strategy", "here it is eval_every in steps, or eval_every_epochs"),
        ("save_total_limit", "here it is checkpoint.disk.keep_last"),
        ("save_top_k", "here it is checkpoint.disk.keep_best"),
        ("resume_from_checkpoint", "a stopped job goes on when it is run again in its run directory"),
        ("output_dir", "give --run-dir to everstep run"),
        ("fp16", "here it is precision=fp16"),
        ("bf16", "here it is precision=bf16"),
        ("amp", PRECISION),
        ("mixed_precision", PRECISION),
        ("device_ids", "here it is device, or a device for each worker in map"),
        ("nproc_per_node", "here it is workers"),
        ("world_size", "here it is workers"),
        ("nnodes", "here it is hosts.min"),
        ("find_unused_parameters", "parameters without a gradient need no setting"),
        ("bucket_cap_mb", "there is no DistributedDataParallel"),
        ("gradient_checkpointing", "here it is recompute"),
        ("zero_stage", "zero.stage=1 divides"),
        ("tensor_parallel_degree", "here it is cell.tp"),
        ("--num-workers", LOADER),
        ("Learning_Rate", OPTIMIZER),
        ("optimizer.params.lr", OPTIMIZER),
        ("trainer.max_epochs", "here it is epochs"),
        ("fp16.enabled", "here it is precision=fp16"),
        ("loader.num_workers", LOADER),
        ("use_distributed_optimizer", "zero.stage=1 divides"),
        ("opt_level", PRECISION),
        ("ema_decay", "call it in the loop after the batches"),
        ("strategy", "leave it out: each worker trains with the whole model"),
        ("run_name", "give --run-dir to everstep run"),
        ("fast_dev_run", "here it is steps"),
        ("heartbeat.timeout", "a worker that dies is noticed at once"),
    ],
)
def test_a_name_of_another_tool_is_answered(name: str, answer: str) -> None:
    assert instead_of(name).startswith(answer)


def test_none_is_a_key_here_and_none_has_two_answers() -> None:
    assert not KEYS & set(NAMES)
    assert [name for name, times in Counter(NAMES).items() if times > 1] == []
    for name in NAMES:
        assert known_elsewhere(name), f"{name} is not written as it is looked up"
        with pytest.raises(ConfigError, match="unknown key"):
            load_config([("run.yaml", {name: 1})])


def words_of(answer: str) -> set[str]:
    """Words of an answer that have a dot or an underscore, or stand before a value: keys, or attributes of ours."""
    return set(re.findall(r"[A-Za-z]+(?:[._][A-Za-z0-9_]+)+|[a-z]+(?==)", answer))


@pytest.mark.parametrize("foreign", FOREIGN_KEYS, ids=lambda foreign: foreign.names.split()[0])
def test_what_an_answer_names_exists(foreign: ForeignKey) -> None:
    assert set(foreign.keys) <= KEYS and all(
        re.search(rf"\b{re.escape(key)}\b", foreign.answer) for key in foreign.keys
    )
    said = re.sub(r"join\((\w+)=\.\.\.\)", "", foreign.answer).replace("run.evaluate(batch_size=...)", "run.evaluate")
    for word in words_of(said) - set(foreign.keys) - {"task.lr", "cudnn.benchmark", *_OF_TORCH}:
        owner, _, attribute = word.partition(".")
        assert hasattr(OWNERS[owner], attribute), f"{word} is neither a key that the row lists nor an attribute of ours"
    for argument in re.findall(r"join\((\w+)=", foreign.answer):
        assert argument in join.__annotations__
    options = {option for command in (run, agent) for parameter in command.params for option in parameter.opts}
    assert set(re.findall(r"--[a-z-]+", foreign.answer)) <= options | {"--hosts"}
    assert set(re.findall(r"everstep ([a-z]+)", foreign.answer)) <= set(COMMANDS)
    assert "\n" not in foreign.answer and len(foreign.answer) < 140


def test_options_that_answers_name_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["launch", "ssh", "--help"]) == 0
    assert "--hosts" in capsys.readouterr().out
    assert cli.get_command(None, "profile") is not None  # type: ignore[arg-type]
    assert all("lr" in load(name).option_defaults for name in names())  # type: ignore[attr-defined]


def test_rows_are_found_by_a_part_of_a_name() -> None:
    assert [row.keys for row in elsewhere_with("Grad-Norm")] == [("clip_norm",)]
    assert elsewhere_with("qqq") == []


def test_a_file_and_set_are_answered_with_exit_code_2(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    config = tmp_path / "run.yaml"
    config.write_text("steps: 2\nmax_grad_norm: 1.0\n")
    common = ["run", "mlp-digits", "--dry-run", "--run-dir", str(tmp_path / "run")]
    for arguments, said in (
        (["--config", str(config)], f"unknown key 'max_grad_norm' (from {config}): here it is clip_norm"),
        (["--set", "lr=0.1"], f"unknown key 'lr' (from --set lr=0.1): {OPTIMIZER}"),
        (
            ["--set", "loader.num_workers=2"],
            f"unknown key 'loader.num_workers' (from --set loader.num_workers=2): {LOADER}",
        ),
    ):
        assert run_command([*common, *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and said in error
