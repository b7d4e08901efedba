"""Telling a job to a sink: exact values, once each, whatever stops and begins again in between."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sink_cases import Recorder, at, event, generation, killed_run, publish, run_dir_of, samples, step

from everstep.base.config_keys import SINKS
from everstep.base.errors import ConfigError
from everstep.sinks import sink as sink_module
from everstep.sinks.publication import Publication, follow, sole_publisher
from everstep.sinks.sink import Sink, SinkFailed, check_installed


def test_what_a_run_with_a_kill_is_worth(tmp_path: Path) -> None:
    sink = Recorder()
    done = publish(run_dir_of(tmp_path / "mine", killed_run(), samples()), "x", sink)
    steps = range(1, 11)
    assert sink.series("train/loss") == {n: 1 / n for n in steps}
    assert sink.series("train/lr") == {n: 0.1 / n for n in steps}
    assert sink.series("train/grad_norm") == {n: 2.0 + n for n in steps}
    assert sink.series("speed/step_s") == {n: 1.5 if n == 6 else 1.0 for n in steps if n > 1}
    assert sink.series("speed/samples_per_s")[6] == pytest.approx(8 / 1.5)
    assert sink.series("job/generation") == {n: 1 if n < 6 else 2 for n in steps}
    assert sink.series("job/workers") == {n: 3 if n < 6 else 2 for n in steps}
    assert sink.series("job/goodput")[10] == pytest.approx((13.5 - 3 - 1) / 13.5)
    assert sink.series("eval/accuracy") == {10: 0.75}
    assert sink.points["train/loss", 6][0][0] == at(9.5)
    assert ("worker_evicted", 5, "worker 0 was evicted: killed by SIGKILL") in sink.said
    assert not any(kind == "step_committed" for kind, _, _ in sink.said)
    assert (done.steps, done.events, sink.ended) == (10, 11, ["completed"])
    assert (sink.begun[0].name, sink.begun[0].task, sink.begun[0].fresh) == ("mine", "mine", True)


def test_seconds_of_a_worker_by_phase_add_up(tmp_path: Path) -> None:
    sink = Recorder()
    publish(run_dir_of(tmp_path, killed_run(), samples()), "x", sink)
    backward = sink.series("time/backward_s")
    assert backward[2] == pytest.approx(0.5)
    assert sink.series("time/other_s")[2] == pytest.approx(1.0)
    assert max(backward) == 10


@pytest.mark.parametrize("cut", range(0, 24, 3))
def test_told_in_two_parts_is_told_once(tmp_path: Path, cut: int) -> None:
    lines = killed_run()
    run_dir = run_dir_of(tmp_path, lines[:cut], samples())
    sink = Recorder()
    publish(run_dir, "x", sink, over=False)
    (run_dir / "events.jsonl").write_bytes(b"".join(lines))
    publish(run_dir, "x", sink)
    whole = Recorder()
    publish(run_dir, "y", whole)
    for name in ("train/loss", "speed/step_s", "job/workers", "eval/accuracy"):
        assert sink.series(name) == whole.series(name)
    assert sink.said == whole.said
    nothing = Recorder()
    again = publish(run_dir, "x", nothing)
    assert (again.steps, again.events, nothing.begun, nothing.points) == (0, 0, [], {})


def test_steps_that_are_done_again_draw_no_second_line(tmp_path: Path) -> None:
    lines = killed_run()[:15]
    lines += [event("job_started", 50, step=0, workers=1), generation(51, 3, {0: [0, 1, 2, 3]}, "all are there")]
    lines += [step(n, 51 + n, 3) for n in range(1, 12)]
    sink = Recorder()
    publish(run_dir_of(tmp_path, lines), "x", sink)
    assert sorted(sink.series("train/loss")) == list(range(1, 12))
    assert sink.series("speed/step_s")[11] == 1.0


class Breaking(Recorder):
    """Raises where it is told to, once."""

    def __init__(self, where: str, count: int) -> None:
        super().__init__()
        self.where, self.left = where, count

    def _maybe(self, where: str) -> None:
        if where == self.where:
            self.left -= 1
            if self.left == 0:
                raise OSError(28, "No space left on device")

    def begin(self, run: Any, config: Mapping[str, Any]) -> None:
        self._maybe("begin")
        super().begin(run, config)

    def scalars(self, step: int, time_ns: int, values: Mapping[str, float]) -> None:
        self._maybe("scalars")
        super().scalars(step, time_ns, values)

    def flush(self) -> None:
        self._maybe("flush")
        super().flush()


@pytest.mark.parametrize(("where", "count"), [("begin", 1), ("scalars", 4), ("flush", 1)])
def test_a_sink_that_fails_is_warned_of_once_and_told_the_rest_later(tmp_path: Path, where: str, count: int) -> None:
    run_dir = run_dir_of(tmp_path, killed_run())
    sinks = [Breaking(where, count), Breaking(where, count), Recorder()]
    made: list[Recorder] = []
    waited: list[float] = []
    warned: list[tuple[str, bool]] = []

    def make() -> Publication:
        made.append(sinks[len(made)])
        return Publication(run_dir, "x", made[-1])

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) > 4

    assert follow(make, wait, lambda text, running: warned.append((text, running)))
    assert len(made) == 3 and waited[1] >= 60
    [(text, running)] = warned
    assert text.startswith("the sink x failed: OSError") and "No space left" in text
    assert running == (where != "flush"), "the end of the job was read before that"
    assert sinks[2].series("train/loss") == {n: 1 / n for n in range(1, 11)}
    assert sinks[2].ended == ["completed"]


def test_what_fails_after_the_end_is_not_waited_for(tmp_path: Path) -> None:
    run_dir = run_dir_of(tmp_path, killed_run())
    warned: list[str] = []
    failing = lambda: Publication(run_dir, "x", Breaking("flush", 1))  # noqa: E731
    assert not follow(failing, lambda s: True, lambda text, running: warned.append(text))
    assert len(warned) == 1
    assert publish(run_dir, "x", Recorder()).steps == 10


def test_another_job_in_the_same_directory_is_told_from_its_beginning(tmp_path: Path) -> None:
    run_dir = run_dir_of(tmp_path, killed_run())
    publish(run_dir, "x", Recorder())
    (run_dir / "events.jsonl").write_bytes(b"".join([event("job_started", 99, step=0, workers=1), step(1, 100, 1)]))
    sink = Recorder()
    publish(run_dir, "x", sink)
    assert sink.series("train/loss") == {1: 1.0}


def test_a_loss_that_is_not_finite_is_told_though_it_has_no_number(tmp_path: Path) -> None:
    lost = event("step_committed", 102, step=2, loss=None, samples=8, nonfinite="loss")
    sink = Recorder()
    publish(run_dir_of(tmp_path, [event("job_started", 99, step=0, workers=1), step(1, 100, 1), lost]), "x", sink)
    assert sink.series("train/loss") == {1: 1.0} and sink.series("train/nonfinite") == {2: 1.0}


def test_nonsense_is_passed_over(tmp_path: Path) -> None:
    bad = [event("step_committed", 1, step="x", loss="y"), event("step_committed", 2, step=1, lr={}, loss=None)]
    bad += [event("evaluated", 3, step=1, metrics=[1]), event("evaluated", 4, step=2, metrics={"a\n": "b"})]
    bad += [b'{"kind":"x"}\n', b"{torn", event("recovery_completed", 5, phases_s=3, duration_s="z")]
    sink = Recorder()
    publish(run_dir_of(tmp_path, bad), "x", sink)
    assert sink.series("train/loss") == {} and sink.series("eval/a") == {}


def test_one_publisher_at_a_time(tmp_path: Path) -> None:
    with sole_publisher(tmp_path, "x"):
        with pytest.raises(ConfigError, match="being published to x"), sole_publisher(tmp_path, "x"):
            pass
        with sole_publisher(tmp_path, "y"):
            pass
    with sole_publisher(tmp_path, "x"):
        pass


def test_a_missing_library_is_named_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module.importlib.util, "find_spec", lambda name: None)
    for name in SINKS:
        with pytest.raises(ConfigError, match=rf"pip install 'everstep\[{name}\]'"):
            check_installed([name])
    monkeypatch.undo()
    (tmp_path / "nosuchsink").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not sink_module._found("nosuchsink"), "a folder of that name is no library"
    assert not sink_module._found("nosuchsink.deep.er")
    monkeypatch.setitem(sink_module._BEHIND, "otel", "everstep.sinks.no_such_module:X")
    monkeypatch.setattr(sink_module, "check_installed", lambda names: None)
    with pytest.raises(SinkFailed, match="cannot be used: ModuleNotFoundError"):
        sink_module.make_sink("otel")


def test_each_worker_is_told_of_while_the_job_runs(tmp_path: Path) -> None:
    lines = [event("job_started", 0, step=0, workers=1), generation(1, 1, {0: [0]}, "there")]
    lines += [step(n, 1 + n, 1) for n in range(1, 7)]
    rows = [
        {"worker_id": 0, "incarnation": 0, "step": n, "rss_bytes": 5, "bytes": {"reduce": 100 * n}, "seconds": {}}
        for n in range(1, 7)
    ]
    measured = [json.dumps({"t": at(1 + n), "host": "h", "workers": [row]}) for n, row in enumerate(rows, 1)]
    run_dir = run_dir_of(tmp_path / "mine", lines, ("\n".join(measured) + "\n").encode())
    told: dict[str, float] = {}

    class Listening(Sink):
        def scalars(self, step: int, time_ns: int, values: Mapping[str, float]) -> None:
            told.update(values)

    Publication(run_dir, "x", Listening()).advance(over=False)
    assert {name: told[name] for name in told if name.startswith("worker0/")} == {
        "worker0/rss_bytes": 5,
        "worker0/step_s": 1.0,
        "worker0/communication_s": 0.0,
        "worker0/busy": 0.0,
        "worker0/sent_bytes_per_s/reduce": 100.0,
    }
