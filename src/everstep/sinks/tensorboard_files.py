"""TensorBoard: event files in `DIR/tensorboard`, written with the library's own record format, at once.

No writer thread: one that meets a full disk dies silently, and this is a process of its own anyway.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from everstep.base.below import NEW, open_below
from everstep.base.config import dotted
from everstep.report.words import Event, whole_number
from everstep.sinks.sink import OVER, Sink, SinkJob

_MOST_HPARAM = 200


class TensorBoardFiles(Sink):
    """Scalars, events as texts by kind, the config as text and as hyperparameters."""

    def __init__(self) -> None:
        self._writer: Any = None
        self._texts: dict[tuple[str, int], tuple[int, list[str]]] = {}
        self._last_ns = 0

    def begin(self, run: SinkJob, config: Mapping[str, Any]) -> None:
        """Open a new file. If the run goes on, the file voids an older one's entries beyond the last step that it is
        known to hold."""
        seconds, rest = divmod(time.time_ns(), 10**9)  # readers go by the order of names
        name = f"events.out.tfevents.{seconds:010d}.{rest:09d}.{socket.gethostname()}.everstep"
        self._writer = RecordWriter(os.fdopen(open_below(run.folder / name, NEW, 1), "wb"))
        self._last_ns = run.created_ns
        first = event_pb2.Event(wall_time=self._last_ns / 1e9, file_version="brain.Event:2")
        self._writer.write(first.SerializeToString())
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(0 if run.fresh else run.last_step + 1, run.created_ns, session_log=start)
        if not run.fresh:
            return
        said = "\n".join(f"| {key} | {_shown(value)} |" for key, value in sorted(dotted(config).items()))
        table = f"task `{run.task}`\n\n| key | value |\n| --- | --- |\n{said}"
        self._summary(0, run.created_ns, [_text("config", table), _hparams(run, config)])

    def scalars(self, step: int, time_ns: int, values: Mapping[str, float]) -> None:
        """Write one record for all values of a step."""
        found = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._summary(step, time_ns, found)

    def event(self, step: int, text: str, event: Event) -> None:
        """Keep a text; texts of one kind and step become one, because readers keep only one."""
        kind = str(event["kind"])
        if kind == "evaluated":
            return
        self._last_ns = whole_number(event.get("time_unix_ns"))
        lines = self._texts.setdefault((kind, step), (self._last_ns, []))[1]
        lines.append(text)

    def flush(self) -> None:
        """Write kept texts. Raises: OSError, for example for a full disk."""
        for (kind, step), (time_ns, lines) in self._texts.items():
            self._summary(step, time_ns, [_text(f"events/{kind}", "\n\n".join(lines))])
        self._texts.clear()
        self._writer.flush()

    def end(self, state: str) -> None:
        """Write the state as the outcome of the trial."""
        if state in OVER:
            status = 1 if state == "completed" else 2  # api.proto: STATUS_SUCCESS, STATUS_FAILURE
            ended = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=self._last_ns / 1e9)
            data = plugin_data_pb2.HParamsPluginData(session_end_info=ended)
            self._summary(0, self._last_ns, [_plugin("_hparams_/session_end_info", data)])
        self._writer.flush()
        self._writer.close()

    def _summary(self, step: int, time_ns: int, values: list[Any]) -> None:
        self._write(step, time_ns, summary=summary_pb2.Summary(value=values))

    def _write(self, step: int, time_ns: int, **what: Any) -> None:
        self._writer.write(event_pb2.Event(wall_time=time_ns / 1e9, step=step, **what).SerializeToString())


def _text(tag: str, text: str) -> Any:
    """A text summary. Made by hand: the library's own maker imports TensorFlow if it is installed."""
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING, string_val=[text.encode()], tensor_shape=tensor_shape_pb2.TensorShapeProto()
    )
    metadata = summary_pb2.SummaryMetadata(
        plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="text"),
        data_class=summary_pb2.DATA_CLASS_TENSOR,
    )
    return summary_pb2.Summary.Value(tag=tag, tensor=tensor, metadata=metadata)


def _hparams(run: SinkJob, config: Mapping[str, Any]) -> Any:
    start = plugin_data_pb2.SessionStartInfo(group_name=run.identity, start_time_secs=run.created_ns / 1e9)
    for key, value in {"task": run.task, **dotted(config)}.items():
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[key].number_value = value
        else:
            start.hparams[key].string_value = _shown(value)[:_MOST_HPARAM]
    return _plugin("_hparams_/session_start_info", plugin_data_pb2.HParamsPluginData(session_start_info=start))


def _plugin(tag: str, data: Any) -> Any:
    """Entry of the HParams page, which reads only the metadata."""
    content = summary_pb2.SummaryMetadata.PluginData(plugin_name="hparams", content=data.SerializeToString())
    metadata = summary_pb2.SummaryMetadata(plugin_data=content, data_class=summary_pb2.DATA_CLASS_TENSOR)
    nothing = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=0)])
    null = tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, tensor_shape=nothing)
    return summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=null)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "\\|")
