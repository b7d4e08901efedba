"""The loop of a `Task`: only code that a user would write with `join`, plus evaluation and early stop."""

from __future__ import annotations

import math
from typing import Any

from everstep.base.cause import Cause
from everstep.base.config import Config
from everstep.base.config_keys import EarlyStopConfig
from everstep.base.errors import ConfigError
from everstep.protocol.driver.policy import evaluates_after
from everstep.train.executor import StateJumped
from everstep.train.run import Run, Step
from everstep.train.task import Task, calling, samples_evaluated_at_once


class EarlyStop:
    """Stops when the metric has reached its target, or has not improved for `patience` evaluations.

    Its state is healed and saved with the rest, so that every worker comes to the same conclusion.
    """

    def __init__(self, config: EarlyStopConfig) -> None:
        """config: without a metric it never stops."""
        self.config = config
        self.sign = 1.0 if config.mode == "max" else -1.0
        self.best = -math.inf
        self.stale = 0

    def observe(self, metrics: dict[str, float]) -> str | None:
        """Take in an evaluation; returns the reason to stop, or None.

        Raises: ConfigError if it lacks the metric.
        """
        metric, target = self.config.metric, self.config.target
        if metric is None:
            return None
        if metric not in metrics:
            raise ConfigError(
                f"early_stop.metric: expected one of the task's metrics ({', '.join(metrics)}), got {metric!r}"
            )
        value = self.sign * metrics[metric]
        if target is not None and value >= self.sign * target:
            return f"{metric} {metrics[metric]:.4f} has reached the target {target}"
        if value > self.best + self.config.min_delta:
            self.best, self.stale = value, 0
            return None
        self.stale += 1
        if self.stale >= self.config.patience:
            return f"{metric} has not improved for {self.stale} evaluations; best {self.sign * self.best:.4f}"
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "stale": self.stale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.stale = float(state["best"]), int(state["stale"])


def train(task: Task, run: Run, early_stop: EarlyStop) -> None:
    """Train the task to its end."""
    config: Config = task.config
    test = calling(task, "build_dataset", "test") if config.eval_every or config.eval_every_epochs else None
    for step in run:
        try:
            _one_step(task, run, step)
            if test is None or not _evaluates(config, run, step):
                continue
            metrics = _evaluate(task, run, test)
        except StateJumped:
            continue  # a stage was lost: the run goes on from the members' common step
        run.report("evaluated", step=step.number, metrics=metrics)
        reason = early_stop.observe(metrics)
        if reason is not None:
            run.report("warning", step=step.number, cause=Cause.EARLY_STOP, reason=f"stopped early: {reason}")
            run.stop()


def _evaluates(config: Config, run: Run, step: Step) -> bool:
    """Whether an evaluation follows this step."""
    every = config.eval_every, config.eval_every_epochs
    return step.number == run.total_steps or evaluates_after(step.number, step.epochs_over, *every)


def _one_step(task: Task, run: Run, step: Step) -> None:
    if run.is_split:
        step.run_split()
        return
    for batch in step:
        loss = calling(task, "loss", run.model, batch)
        if isinstance(loss, tuple):
            step.backward(loss[0], weight=loss[1])
        else:
            step.backward(loss)


def _evaluate(task: Task, run: Run, test: Any) -> dict[str, float]:
    size = samples_evaluated_at_once(task)
    if run.is_split:
        return run.evaluate_split(
            lambda model, batch: calling(task, "metrics", model, batch), test, batch_size=size, collate=task.collate
        )
    return run.evaluate(
        lambda batch: calling(task, "metrics", run.model, batch), test, batch_size=size, collate=task.collate
    )
