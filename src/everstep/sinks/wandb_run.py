"""Weights & Biases: a thin adapter. Without a key the run stays offline, in `DIR/wandb`, for `wandb sync`."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import wandb

from everstep.report.words import Event, whole_number
from everstep.sinks.sink import Sink, SinkJob

_PROJECT = "everstep"
_SERVER = "https://api.wandb.ai"


class WandbRun(Sink):
    """Scalars by `step`, events as text. WANDB_PROJECT, WANDB_NAME, WANDB_MODE and the others work as usual.

    No flush is needed: W&B's own process has written everything to disk.
    """

    def begin(self, run: SinkJob, config: Mapping[str, Any]) -> None:
        """Begin the run, or go on with it: its id stays."""
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            name=os.environ.get("WANDB_NAME") or run.name,
            id=run.identity,
            resume="allow",
            dir=str(run.run_dir),
            mode=mode,
            config={"task": run.task, **config},
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, time_ns: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values, "_timestamp": time_ns / 1e9})

    def event(self, step: int, text: str, event: Event) -> None:
        if event["kind"] != "evaluated":
            time_s = whole_number(event.get("time_unix_ns")) / 1e9
            self._run.log({"step": step, f"events/{event['kind']}": text, "_timestamp": time_s})

    def end(self, state: str) -> None:
        """End the run. Raises: the errors of wandb if it cannot hand over the rest."""
        self._run.summary["state"] = state
        self._run.finish(exit_code=1 if state in ("failed", "interrupted") else 0)


def _has_key() -> bool:
    """Whether there is a key, in the environment or where `wandb login` leaves it; the user is not asked."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or _SERVER).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
