"""The job of `bench/cost.py --parts`: a plain script whose processes note how long some functions of Everstep took.

Each function is wrapped with the clock of its thread, so what else runs on the machine does not count. After the
loop each adds a line of JSON to the file COST_PARTS: processor seconds of
the process and of each part since its first steps.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

import everstep
from models import MODELS

_REPLICA, _SETTINGS = "everstep.train.replica:StageReplica", "everstep.exact.settings:Settings"
PARTS = {
    "settings": ((_REPLICA, "how_set"), (_SETTINGS, "before_lanes"), (_SETTINGS, "after_update")),
    "comparing": ((_REPLICA, "compared"),),
    "survey": (
        ("everstep.train.loop_survey:LoopSurvey", "turn"),
        ("everstep.train.loop_survey:LoopSurvey", "_compare"),
    ),
}
"""Names of parts, and whose methods they are."""
FIRST = 10
"""The step from which on time counts."""

spent: defaultdict[str, float] = defaultdict(float)


def timed(part: str, inner: Any) -> Any:
    """The same method, its thread's time added up."""

    @functools.wraps(inner)
    def outer(*given: Any, **more: Any) -> Any:
        began = time.thread_time()
        try:
            return inner(*given, **more)
        finally:
            spent[part] += time.thread_time() - began

    return outer


def probes(lanes: Any) -> None:
    """The same for lanes that are computed for a comparison alone, with the user's own code in them, and for what is
    said of those that are compared. lanes: `LoopLane`."""
    trial, said = lanes.trial, lanes.said

    @contextlib.contextmanager
    def timed_trial(*given: Any) -> Iterator[None]:
        began = time.thread_time()
        with trial(*given):
            yield
        spent["probe"] += time.thread_time() - began

    def timed_said(self: Any, batch: Any) -> Any:
        return said(self, batch) if self._on_trial else timed("probe", said)(self, batch)

    lanes.trial, lanes.said = timed_trial, timed_said


def wrap() -> None:
    """Have all parts timed."""
    for part, methods in PARTS.items():
        for place, method in methods:
            module, _, name = place.partition(":")
            owner = getattr(importlib.import_module(module), name)
            setattr(owner, method, timed(part, getattr(owner, method)))
    probes(importlib.import_module("everstep.train.stage_lanes").LoopLane)


def tell() -> None:
    """One line for this process."""
    with open(os.environ["COST_PARTS"], "a") as file:
        file.write(json.dumps({"process": time.process_time() - begun, **spent}) + "\n")


wrap()
task = MODELS[os.environ["COST_MODEL"]]()
torch.manual_seed(0)
model = task.build_model()
optimizer = task.build_optimizer(list(model.parameters()))
given = {k: task.defaults[k] for k in ("lanes", "micro_batch")}
run = everstep.join(model, optimizer, task.build_dataset("train"), steps=int(os.environ["COST_STEPS"]), **given)
begun = 0.0
for step in run:
    if step.number == FIRST:
        spent.clear()
        begun = time.process_time()
    for batch in step:
        step.backward(task.loss(model, batch))
tell()
