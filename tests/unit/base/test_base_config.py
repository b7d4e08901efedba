from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from everstep.base.cell_keys import cell_notes
from everstep.base.config import (
    FREE,
    Config,
    describe,
    load_config,
    numerics,
    parse_set,
    to_dict,
    with_batch_size,
    zero_notes,
)
from everstep.base.errors import ConfigError


def refused(values, source="run.yaml"):
    with pytest.raises(ConfigError) as caught:
        load_config([(source, values)])
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults():
    config = load_config([])
    assert config == Config()
    assert (config.lanes, config.micro_batch, config.steps, config.epochs, config.seed) == (8, 8, None, None, 0)
    assert (config.threads, config.device, config.precision, config.clip_norm) == (1, "cpu", "fp32", None)
    assert (config.verify_every, config.hang_limit_s, config.on_failure) == (100, "auto", "replace")
    assert (config.max_restarts, config.quorum_wait_s, config.eval_every, config.log_every) == (20, 600.0, 0, 1)
    assert (config.workers, config.spares, config.min_workers, config.transport) == (1, 0, 1, "auto")
    assert (config.chaos, config.emulate_compute_ms, config.heartbeat.interval_s) == ("", 0.0, "auto")
    assert (config.loader.workers, config.loader.prefetch, config.loader.pin_memory) == (0, 2, False)
    assert (config.backoff.initial_s, config.backoff.max_s) == (0.5, 30.0)
    stop = config.early_stop
    assert (stop.metric, stop.mode, stop.patience, stop.min_delta, stop.target) == (None, "max", 3, 0.0, None)


def test_later_layers_win_dotted_or_nested():
    config = load_config(
        [
            ("task", {"loader": {"workers": 1, "prefetch": 4}, "steps": 10}),
            ("file", {"loader.workers": 2, "checkpoint": {"disk": {"path": "a"}, "memory.keep_last": 5}}),
            ("--set", {"steps": "20", "checkpoint.disk.path": "b"}),
        ]
    )
    assert (config.loader.workers, config.loader.prefetch, config.steps) == (2, 4, 20)
    assert (config.checkpoint.disk.path, config.checkpoint.memory.keep_last) == ("b", 5)


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().lanes = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("clip_norm", "1e-4", 1e-4),
        ("clip_norm", 2, 2.0),
        ("clip_norm", "none", None),
        ("clip_norm", None, None),
        ("steps", "1e3", 1000),
        ("steps", 8.0, 8),
        ("steps", "null", None),
        ("seed", str(2**63 - 1), 2**63 - 1),
        ("recompute", "yes", True),
        ("recompute", "0", False),
        ("recompute", True, True),
        ("hang_limit_s", "Auto", "auto"),
        ("hang_limit_s", "7", 7.0),
        ("quorum_wait_s", 0, 0.0),
        ("device", "cuda:1", "cuda:1"),
        ("lr_rule", "none", "none"),
        ("map", [{"units": [0, 1]}], [{"units": [0, 1]}]),
        ("map", '[{"leader": 0}]', [{"leader": 0}]),
        ("chaos", "kill:target=worker:2,at=30", "kill:target=worker:2,at=30"),
    ],
)
def test_accepted(key, value, expected):
    got = getattr(load_config([("--set", {key: value})]), key)
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"lanes": 2.5}, ["lanes: expected whole number, at least 1, got 2.5 (from run.yaml): give e.g. lanes=8"]),
        ({"lanes": True}, ["lanes:", "got true"]),
        ({"lanes": 0}, ["at least 1, got 0"]),
        ({"lanes": "many"}, ["got 'many'"]),
        ({"lanes": None}, ["got None"]),
        ({"lanes": [8]}, ["got [8]"]),
        ({"workers": 0}, ["workers: expected whole number, at least 1, got 0"]),
        ({"threads": -1}, ["threads:", "at least 1"]),
        ({"seed": 2**63}, ["at most 9223372036854775807"]),
        ({"steps": 0}, ["steps: expected whole number or none, at least 1, got 0"]),
        ({"clip_norm": 0}, ["greater than 0, got 0"]),
        ({"clip_norm": "nan"}, ["clip_norm: expected number or none", "got 'nan'"]),
        ({"clip_norm": float("inf")}, ["got inf"]),
        ({"clip_norm": False}, ["got false"]),
        ({"hang_limit_s": "never"}, ["expected number or auto", "got 'never'", "hang_limit_s=auto"]),
        ({"quorum_wait_s": "auto"}, ["expected number, at least 0, got 'auto'"]),
        ({"precision": "fp8"}, ["expected fp32 | bf16 | fp16, got 'fp8'"]),
        (
            {"transport": "udp"},
            ["sockets | nccl, got 'udp' (from run.yaml): give e.g. transport=auto"],
        ),
        ({"device": "tpu"}, ["like cpu, cuda or cuda:0, got 'tpu'"]),
        ({"recompute": 1}, ["recompute: expected true or false, got 1"]),
        ({"early_stop.metric": 5}, ["early_stop.metric: expected text or none, got 5"]),
        ({"loader": 3}, ["loader: expected keys below it, got 3 (from run.yaml): set e.g. loader.workers"]),
        ({"task": 3}, ["task: expected keys below it"]),
        ({"chaos": "x" * 500, "lanes": "y" * 500}, ["..."]),
        (["lanes"], ["run.yaml: expected keys with values, got ['lanes']"]),
    ],
)
def test_refused(values, parts):
    message = refused(values)
    assert all(part in message for part in parts), message
    assert len(message) < 250


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("lane", "lanes"),
        ("loader.prefech", "loader.prefetch"),
        ("clip-norm", "clip_norm"),
        ("loader.worker", "loader.workers"),
        ("heartbeat.ceiling", "heartbeat.ceiling_s"),
        ("checkpoint.disk.pth", "checkpoint.disk.path"),
        ("checkpoint.pth", "checkpoint.disk.path"),
        ("loader_workers", "loader.workers"),
        ("on_fail", "on_failure"),
        ("eval_evrey", "eval_every"),
        ("notify.timeout", "notify.timeout_s"),
    ],
)
def test_unknown_keys_name_the_nearest(unknown, nearest):
    assert refused({unknown: 1}) == f"unknown key {unknown!r} (from run.yaml): did you mean {nearest!r}?"


def test_a_last_part_that_several_keys_have_names_all_of_them():
    assert refused({"mode": 1}).endswith("did you mean 'security.tls.mode' or 'early_stop.mode'?")
    assert "did you mean 'loader.prefetch' or 'cell.prefetch'?" in refused({"prefetch": 1})


@pytest.mark.parametrize("unknown", ["qqq", "dropout", "steps_per_epoch", "name", "min_lanes_2", "x" * 100_000])
def test_what_is_near_no_key_is_not_guessed(unknown):
    assert refused({unknown: 1}).endswith(
        "`everstep config` lists all keys, and `everstep config --search WORD` those with a word"
    )


def test_unknown_keys_in_nested_form_and_of_any_type():
    assert "unknown key 'loader.wrokers'" in refused({"loader": {"wrokers": 2}})
    assert "unknown key '3'" in refused({3: 1})
    assert "unknown key 'task.'" in refused({"task": {"": 1}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workers": 9}, "workers: expected at most 8 for 8 lanes, got 9: use fewer workers, or raise 'lanes' to 9"),
        ({"workers": 10**9}, "workers: expected at most 1000000, got 1000000000: lower it"),
        ({"spares": "9" * 9}, "spares: expected at most 1000000, got 999999999: lower it"),
        ({"stages": 10**9}, "stages: expected at most 100000, got 1000000000"),
        ({"stages": 10**5, "pool": 10**6}, "workers: expected at most 1000000, got 100000000000, by the pools"),
        ({"workers": 2, "min_workers": 3}, "min_workers: expected at most workers (2), got 3"),
        ({"stages": 2, "pool": 1, "redundancy": 0}, "pool: expected pool or redundancy, got both (1 and 0)"),
        ({"stages": 2, "pool": 3, "workers": 5}, "workers: expected 6 (2 stages x 3, for pool 3), got 5"),
        ({"redundancy": 1, "workers": 3}, "workers: expected 2 (1 stage x 2, for redundancy 1), got 3"),
        ({"stages": 2, "lanes": 2, "pool": 3}, "at most 2 active ones per stage for 2 lanes, got 3 in stage 0"),
        ({"stages": 2, "batch": "per_worker"}, "batch: expected constant for a model in 2 stages, got per_worker"),
        ({"stages": 2, "chunks": 2}, "chunks: expected 1 with schedule 1f1b, got 2"),
        ({"stages": 2, "schedule": "interleaved"}, "chunks: expected at least 2 with schedule interleaved, got 1"),
        (
            {"stages": 3, "schedule": "interleaved", "chunks": 2},
            "lanes: expected a multiple of the 3 stages with schedule interleaved, got 8: use 6 or 9",
        ),
        ({"map": [{"workers": [0]}], "pool": 1}, "pool: expected none"),
        ({"map": [{"workers": [0, 2]}]}, "map: expected the workers 0 to 1, each once, got [0, 2]"),
        ({"heartbeat.floor_s": 50}, "heartbeat.floor_s: expected at most heartbeat.ceiling_s (20), got 50"),
        ({"backoff.max_s": 0.1}, "backoff.initial_s: expected at most backoff.max_s (0.1), got 0.5"),
        (
            {"zero.stage": 3},
            "parameters are divided among the processes of each worker: set cell.fsdp=N",
        ),
        ({"cell.fsdp": 2, "device": "cuda:1"}, "cell.fsdp: expected 1 with device=cuda:1, got 2"),
        ({"cell.fsdp": 2, "stages": 2, "chunks": 2}, "in one backward pass; set chunks=1, or cell.fsdp=1"),
        (
            {"cell.fsdp": 2, "stages": 2, "chunks": 2, "schedule": "looped_bfs"},
            "cell.fsdp: expected 1 with chunks=2, got 2: its processes add up a stage's gradients in one backward "
            "pass; set chunks=1 and schedule=gpipe, or cell.fsdp=1",
        ),
        (
            {"cell.fsdp": 2, "cell.hosts": 2, "zero.stage": 1},
            "cell.hosts: expected 1 with zero.stage=1, got 2: each host of a worker has its own part of the "
            "optimizer's state already; set zero.stage=0, or cell.hosts=1",
        ),
        ({"cell.fsdp": 2, "zero.offload": "/disk/"}, "cell.fsdp: expected 1 with zero.offload=/disk/, got 2"),
        ({"cell.fsdp": 2, "batch": "per_worker"}, "cell.fsdp: expected 1 with batch=per_worker, got 2"),
        ({"cell.fsdp": 9}, "cell.fsdp: expected at most 8 for 8 lanes, got 9"),
        ({"cell.hosts": 2}, "cell.hosts: expected a divisor of cell.fsdp=1, got 2"),
        ({"cell.fsdp": 3, "cell.hosts": 2}, "cell.hosts: expected a divisor of cell.fsdp=3, got 2"),
        ({"zero.stage": 1, "device": "cuda"}, "zero.stage: expected 0 with device cuda, got 1"),
        (
            {"zero.stage": 1, "zero.offload": "/disk/", "zero.offload_params": True},
            "zero.offload_params: expected false with zero.stage=1, got true",
        ),
        ({"early_stop.target": 0.9}, "early_stop.target: expected early_stop.metric to be set too"),
    ],
)
def test_contradictions(values, message):
    assert message in refused(values)


def test_task_options_are_free():
    config = load_config(
        [("file", {"task": {"path": "a/b", "depth": 3}}), ("--set", {"task.depth": "5", "task.p": "1e-1"})]
    )
    assert config.task == {"path": "a/b", "depth": 5, "p": 0.1}
    assert load_config([("--set", {"task.x": "NaN"})]).task == {"x": "NaN"}


def test_it_survives_json():
    config = load_config(
        [
            (
                "x",
                {
                    "clip_norm": "0.1",
                    "hang_limit_s": 3,
                    "task.a": "[1, 2]",
                    "map": [{"leader": 0, "backups": [{"worker": 1, "role": "standby"}]}],
                    "checkpoint.object.url": "s3://b",
                },
            )
        ]
    )
    assert load_config([("job.json", json.loads(json.dumps(to_dict(config))))]) == config


def test_every_key_is_described_once():
    rows = describe()
    names = [name for name, *_ in rows]
    assert len(names) == len(set(names)) and all(all(isinstance(text, str) for text in row) for row in rows)
    assert all(meaning for *_, meaning in rows)
    assert next(row[:3] for row in rows if row[0] == "hang_limit_s") == ("hang_limit_s", "number or auto", "auto")
    assert next(row[:3] for row in rows if row[0] == "precision") == ("precision", "fp32 | bf16 | fp16", "fp32")

    def leaves(values, prefix=""):
        for name, value in values.items():
            if isinstance(value, dict) and name not in FREE:
                yield from leaves(value, f"{prefix}{name}.")
            else:
                yield prefix + name

    assert set(leaves(to_dict(Config()))) == {name.removesuffix(".*") for name in names}


def test_every_default_is_valid():
    def flat(values, prefix=""):
        for name, value in values.items():
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{name}.")
            else:
                yield prefix + name, value

    for name, value in flat(to_dict(Config())):
        assert load_config([("default", {name: value})]) == Config()
        assert load_config([("default", {name: str(value)})]) == Config()


def test_numerics_hold_what_the_bits_depend_on():
    base = load_config([("x", {"steps": 5})])
    same = {
        "steps": 9,
        "epochs": 2,
        "workers": 4,
        "spares": 1,
        "loader.workers": 2,
        "log_every": 7,
        "transport": "sockets",
        "stages": 2,
        "pool": 2,
        "schedule": "gpipe",
        "recompute": True,
        "emulate_compute_ms": 3,
        "resume_from": "x",
    }
    assert numerics(load_config([("x", same)])) == numerics(base)
    for key, value in (
        ("lanes", 4),
        ("micro_batch", 2),
        ("seed", 1),
        ("threads", 2),
        ("precision", "bf16"),
        ("clip_norm", 1),
        ("device", "cuda"),
        ("batch", "per_worker"),
        ("meta_init", True),
        ("task.depth", 3),
    ):
        changed = numerics(load_config([("x", {key: value})]))
        assert [name for name in changed if changed[name] != numerics(base).get(name)] == [key]
    assert numerics(load_config([("x", {"device": "cuda:3"})]))["device"] == "cuda"


def test_parse_set():
    assert parse_set("loader.workers=2") == ("loader.workers", "2")
    assert parse_set(" chaos = kill:target=worker:2,at=3") == ("chaos", "kill:target=worker:2,at=3")
    for wrong in ("lanes", "=3", ""):
        with pytest.raises(ConfigError, match="expected key=value"):
            parse_set(wrong)


def test_batch_size_sets_the_micro_batch():
    assert with_batch_size({"lanes": 4, "seed": 1}, 64) == {"lanes": 4, "seed": 1, "micro_batch": 16}
    assert with_batch_size({}, "16") == {"micro_batch": 2}
    with pytest.raises(ConfigError, match="multiple of the 8 lanes, got 50: use 48 or 56, or change 'lanes'"):
        with_batch_size({}, 50)
    with pytest.raises(ConfigError, match="got 3: use 8, or"):
        with_batch_size({}, 3)
    for wrong in (0, "x", 2.5, True):
        with pytest.raises(ConfigError, match="batch size: expected whole number, at least 1"):
            with_batch_size({}, wrong)


def test_it_needs_the_standard_library_alone():
    code = "import sys, everstep.base.config; print(sorted({'torch', 'numpy', 'msgspec', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_changes_nothing_in_a_cell_is_said_by_key() -> None:
    idle = {"cell.prefetch": 2, "cell.reshard_after_forward": "false", "cell.offload": "cpu", "cell.wrap": 1000}
    said = cell_notes(load_config([("t", idle)]).cell)
    assert [line.partition(" ")[0] for line in said] == [
        "cell.wrap=1000",
        "cell.offload=cpu",
        "cell.prefetch=2",
        "cell.reshard_after_forward=False",
    ]
    assert cell_notes(load_config([("t", {"cell.fsdp": 2, "cell.wrap": 1000})]).cell) == []
    spans = {"cell.fsdp": 2, "cell.hosts": 2, "cell.reshard_after_forward": False}
    assert cell_notes(load_config([("t", spans)]).cell) == []
    (told,) = cell_notes(load_config([("t", {**spans, "cell.shards": 2})]).cell)
    assert told.startswith("cell.reshard_after_forward=False changes nothing here: with cell.shards=2, other hosts'")
    for key, value in (("cell.wrap", "0"), ("cell.wrap", "layers"), ("cell.offload", "disk"), ("cell.prefetch", "-1")):
        with pytest.raises(ConfigError, match=key):
            load_config([("t", {key: value})])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, []),
        ({"zero.copies": 3}, ["zero.copies=3 changes nothing here"]),
        ({"zero.offload": "cpu", "zero.offload_params": True}, ["zero.offload=cpu with zero.offload_params changes"]),
        ({"zero.stage": 1, "workers": 2}, ["zero.stage=1 saves no memory where a stage has no more workers (2)"]),
        ({"zero.stage": 2, "workers": 3}, []),
    ],
)
def test_keys_that_divide_nothing_are_told(values: dict[str, object], said: list[str]) -> None:
    notes = zero_notes(load_config([("t", values)]))
    assert len(notes) == len(said) and all(note.startswith(one) for note, one in zip(notes, said, strict=True))


def test_types_of_passes_are_named_once_each_and_agree_with_autocast() -> None:
    named = load_config([("t", {"cell.precision": "buffers=bf16,reduction=fp16"})])
    assert named.cell.types == ("fp32", "fp16", "bf16") and named.passes == "fp32"
    assert load_config([("t", {"cell.precision": "fp16"})]).scales_loss
    assert load_config([("t", {"cell.precision": "bf16", "precision": "bf16"})]).passes == "bf16"
    for wrong in ("bf8", "parameters=bf16,parameters=fp16", "weights=bf16", "parameters=bf16,"):
        assert wrong in refused({"cell.precision": wrong})
    assert "set precision=fp32" in refused({"cell.precision": "bf16", "precision": "fp16"})
