"""TensorBoard files, read back with TensorBoard's own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sink_cases import at, killed_run, publish, run_dir_of, samples

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.util import tensor_util

from everstep.sinks.tensorboard_files import TensorBoardFiles


def written(run_dir: Path) -> Any:
    """What the library reads from the folder, all of it."""
    folder = str(run_dir / "tensorboard")
    return plugin_event_accumulator.EventAccumulator(folder, size_guidance={"tensors": 0}).Reload()


def scalars(found: Any, tag: str) -> list[tuple[int, float, float]]:
    """step, value, time."""
    return [(e.step, tensor_util.make_ndarray(e.tensor_proto).item(), e.wall_time) for e in found.Tensors(tag)]


def texts(found: Any, tag: str) -> list[tuple[float, int, str]]:
    return [(e.wall_time, e.step, e.tensor_proto.string_val[0].decode()) for e in found.Tensors(tag)]


def test_scalars_texts_and_config_are_those_of_the_events(tmp_path: Path) -> None:
    run_dir = run_dir_of(tmp_path, killed_run(), samples())
    publish(run_dir, "tensorboard", TensorBoardFiles())
    found = written(run_dir)
    told = [json.loads(line) for line in (run_dir / "events.jsonl").read_bytes().splitlines()]
    for tag, name in (("train/loss", "loss"), ("train/grad_norm", "grad_norm")):
        want = [
            (e["step"], float(np.float32(e[name])), e["time_unix_ns"]) for e in told if e["kind"] == "step_committed"
        ]
        got = scalars(found, tag)
        assert [g[:2] for g in got] == [w[:2] for w in want]
        times = zip(got, want, strict=True)
        assert all(abs(g[2] * 1e9 - w[2]) < 1000 for g, w in times), "the event's own time"
    tags = set(found.Tags()["tensors"])
    assert {"train/lr", "speed/step_s", "speed/samples_per_s", "time/backward_s", "job/generation"} <= tags
    assert {"job/workers", "job/goodput", "eval/accuracy"} <= tags
    [(wall_time, step, text)] = texts(found, "events/worker_evicted")
    assert (step, text) == (5, "worker 0 was evicted: killed by SIGKILL")
    assert wall_time == pytest.approx(at(8.625) / 1e9, abs=1e-6)
    assert "worker 1 has joined" in texts(found, "events/worker_joined")[0][2], "those of one step are one text"
    assert "| lanes | 4 |" in texts(found, "config")[0][2]
    assert found.SummaryMetadata("events/worker_evicted").plugin_data.plugin_name == "text"


def test_the_config_as_hyperparameters(tmp_path: Path) -> None:
    run_dir = run_dir_of(tmp_path, killed_run())
    publish(run_dir, "tensorboard", TensorBoardFiles())
    plugin = written(run_dir).PluginTagToContent("hparams")
    start = plugin_data_pb2.HParamsPluginData.FromString(plugin["_hparams_/session_start_info"])
    values = start.session_start_info.hparams
    assert (values["lanes"].number_value, values["precision"].string_value) == (4, "fp32")
    assert values["checkpoint.enabled"].bool_value is True
    end = plugin_data_pb2.HParamsPluginData.FromString(plugin["_hparams_/session_end_info"])
    assert end.session_end_info.status == 1


@pytest.mark.parametrize("forgotten", [0, 6, 13])
def test_publishing_again_gives_no_duplicates(tmp_path: Path, forgotten: int) -> None:
    """Also by one that was killed after it had written more than it remembers, or remembers nothing."""
    lines = killed_run()
    run_dir = run_dir_of(tmp_path, lines[:13])
    publish(run_dir, "tensorboard", TensorBoardFiles(), over=False)
    cursor = run_dir / "tensorboard" / "published.json"
    said = json.loads(cursor.read_text())
    assert said["lines"] == 13
    cursor.write_text(json.dumps({**said, "lines": 13 - forgotten}))
    (run_dir / "events.jsonl").write_bytes(b"".join(lines))
    publish(run_dir, "tensorboard", TensorBoardFiles())
    publish(run_dir, "tensorboard", TensorBoardFiles())
    assert len(list((run_dir / "tensorboard").glob("*tfevents*"))) == 2
    found = written(run_dir)
    assert [step for step, _, _ in scalars(found, "train/loss")] == list(range(1, 11))
    assert [step for step, _, _ in scalars(found, "eval/accuracy")] == [10]
    assert len(texts(found, "config")) == 1
    assert len(texts(found, "events/worker_evicted")) == 1


def test_a_full_disk_is_an_error_and_no_hang(tmp_path: Path) -> None:
    sink = TensorBoardFiles()
    run_dir = run_dir_of(tmp_path, killed_run())
    publication_file = tmp_path / "tensorboard"
    publication_file.mkdir()
    from everstep.sinks.publication import Publication

    publication = Publication(run_dir, "tensorboard", sink)
    publication.advance(over=False)
    sink._writer._writer = open("/dev/full", "wb")  # noqa: SIM115
    sink.event(10, "x", {"kind": "warning", "time_unix_ns": at(15)})
    with pytest.raises(OSError, match="space"):
        sink.flush()
    with pytest.raises(OSError, match="space"):
        sink._writer._writer.close()
