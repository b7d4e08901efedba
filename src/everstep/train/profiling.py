"""Recordings of this worker's steps with torch's profiler, on request (`everstep profile`).

Without a request nothing is done, and nothing is checked per lane. A recording draws no random numbers and changes no
arithmetic, so the bits stay. Any error of it is reported to the requester, and training goes on.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from everstep.base.below import drafted, folder_of, placed
from everstep.protocol import messages as wire
from everstep.runtime.link.address import PROFILES_FOLDER, TRACE_KEY
from everstep.train.worker_link import WorkerLink

log = logging.getLogger(__name__)

_ARRIVE_S, _LOOK_S = 30.0, 0.1
_GZIP_LEVEL = 3


class WorkerProfiling:
    """A worker's recordings, one at a time. `ask` may be called by any thread; the others by the training loop's.

    wanted: the open request.
    """

    def __init__(self, link: WorkerLink, device: torch.device, tell: Callable[[wire.AnyMessage], None]) -> None:
        self.wanted: wire.ProfileNow | None = None
        self._link = link
        self._device = device
        self._tell = tell
        self._recording: _Recording | None = None
        self._done: dict[str, wire.Profiled] = {}
        self._writing: threading.Thread | None = None

    def ask(self, request: wire.ProfileNow) -> None:
        """Record these steps; the answer of a finished recording is repeated."""
        if request.name in self._done:
            self._tell(self._done[request.name])
        elif self.wanted is None:
            self.wanted = request
        elif self.wanted.name != request.name:
            self._say(request.name, f"it records another profile ({self.wanted.name})")

    def begin_step(self, number: int) -> None:
        """A step is about to begin, and there is a request."""
        request, recording = self.wanted, self._recording
        if request is None or number < request.first_step or self._writing is not None or request.name in self._done:
            return
        if recording is None:
            self._start(request)
            recording = self._recording
        elif len(recording.steps) >= request.steps:
            self._stop(recording)
            return
        if recording is not None:
            recording.steps.append((time.time_ns(), number))

    def end(self) -> None:
        """There is no further step: finish with the steps recorded so far."""
        recording, request = self._recording, self.wanted
        if recording is not None:
            self._stop(recording)
        elif request is not None and self._writing is None and request.name not in self._done:
            self._fail(request, f"the job was over before step {request.first_step} began")
        self.close()

    def close(self) -> None:
        writing = self._writing
        if writing is not None:
            writing.join()

    # ---- one recording

    def _start(self, request: wire.ProfileNow) -> None:
        try:
            self._recording = _Recording(request, self._link, self._device)
        except Exception as error:
            log.warning("no profile: %s", error, exc_info=True)
            self._fail(request, f"the profiler does not start: {error}")

    def _stop(self, recording: _Recording) -> None:
        """Take the trace; a thread of its own compresses it."""
        self._recording = None
        request = recording.request
        try:
            trace = recording.stop()
        except Exception as error:
            recording.held.close()
            log.warning("no profile: %s", error, exc_info=True)
            self._fail(request, f"its trace cannot be written: {error}")
            return
        self._writing = threading.Thread(target=self._compress, args=(recording, trace), name="everstep-profile")
        self._writing.start()

    def _compress(self, recording: _Recording, trace: Path) -> None:
        request = recording.request
        try:
            with recording.held, drafted(recording.path, 2) as small:
                with open(trace, "rb") as plain, gzip.open(small, "wb", _GZIP_LEVEL) as file:
                    shutil.copyfileobj(plain, file, 1 << 20)
                placed(small, recording.path.name)
        except Exception as error:
            self._fail(request, f"its trace cannot be written: {error}")
            return
        name = f"{PROFILES_FOLDER}/{request.name}/worker-{self._link.me.worker_id}.json.gz"
        end_s = time.monotonic() + _ARRIVE_S
        while not self._link.has_arrived(name) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        self._say(request.name, "" if self._link.has_arrived(name) else "its trace did not arrive in time")
        self.wanted = self._writing = None

    def _fail(self, request: wire.ProfileNow, reason: str) -> None:
        self._say(request.name, reason)
        self._recording = self.wanted = self._writing = None

    def _say(self, name: str, reason: str) -> None:
        me = self._link.me
        told = wire.Profiled(
            worker_id=me.worker_id,
            incarnation=me.incarnation,
            name=name,
            ok=not reason,
            reason=" ".join(reason.split()),
        )
        self._done[name] = told
        self._tell(told)


class _Recording:
    """A recording, until `stop`. steps: (unix time in ns, number) of those that have begun."""

    def __init__(self, request: wire.ProfileNow, link: WorkerLink, device: torch.device) -> None:
        if link.run_dir is None:
            raise FileNotFoundError("there is no run directory")
        self.request = request
        self.steps: list[tuple[int, int]] = []
        self.held = contextlib.ExitStack()  # the draft of the trace
        self._phases: list[tuple[int, str]] = []
        self._link = link
        self.path = link.run_dir / PROFILES_FOLDER / request.name / f"worker-{link.me.worker_id}.json.gz"
        with folder_of(self.path, 2, make=True):
            pass  # the folder can be written
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it reports begin and end on stderr
        self._profiler = torch.profiler.profile(
            activities=activities, profile_memory=request.memory, with_stack=request.stacks
        )
        link.row.tick()
        self._profiler.start()
        link.row.tick()
        link.row.mark(self._phases)

    def stop(self) -> Path:
        """Stop; returns the path of the trace, which exists until `held` is closed."""
        end_ns = time.time_ns()
        link, log_context = self._link, self._link.log
        link.row.mark(None)
        said: dict[str, Any] = {
            "worker_id": link.me.worker_id,
            "incarnation": link.me.incarnation,
            "pid": log_context.pid,
            "host": log_context.host,
            "stage": log_context.stage,
            "role": log_context.role,
            "steps": self.steps,
            "phases": self._phases,
            "end_ns": end_ns,
        }
        self._profiler.add_metadata_json(TRACE_KEY, json.dumps(said))
        self._profiler.stop()
        link.row.tick()
        draft = self.held.enter_context(drafted(self.path, 2))
        self._profiler.export_chrome_trace(str(draft))
        link.row.tick()
        return draft
