"""What a `transformers.Trainer` keeps from update to update beside model, optimizer and scheduler, as state of a job.

Times are left out: they differ between workers, and nothing is trained by them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

from everstep.base.errors import ConfigError
from everstep.exact.jsonable import Undigested
from everstep.integrations.callback_state import CallbackState
from everstep.script.reachable import Carried

_KEPT = ("epoch", "global_step", "best_metric", "best_global_step")
_TIMES = ("_runtime", "_per_second", "_time")


class CarriedTraining:
    """State of a trainer's loop. trainer: a `transformers.Trainer`; seed: of the order of its samples, if any."""

    def __init__(self, trainer: Any, seed: int | None) -> None:
        self._trainer, self._seed = trainer, seed
        self._rate = 0.0
        self._states: dict[int, CallbackState] = {}

    def begin(self) -> None:
        """The optimizer is there, and no update has been made."""
        self._rate = self._now()

    def _now(self) -> float:
        return float(self._trainer.optimizer.param_groups[0]["lr"])

    def next_rate(self) -> float:
        """Learning rate of the update that was just made; from here on that of the next one is known."""
        made, self._rate = self._rate, self._now()
        return made

    def state_dict(self) -> dict[str, Any]:
        """Numbers, logs, the control's flags, and the state of callbacks."""
        trainer = self._trainer
        state = {name: getattr(trainer.state, name) for name in _KEPT}
        logs = [without_times(row) for row in trainer.state.log_history]
        best = trainer.state.best_model_checkpoint
        return {
            "state": {**state, "log_history": logs},
            "best": "" if best is None else os.path.basename(best),
            "control": dict(vars(trainer.control)),
            "loss": float(trainer._tr_loss),
            "total": trainer._total_loss_scalar,
            "logged": trainer._globalstep_last_logged,
            "rate": self._rate,
            "seed": self._seed,
            "callbacks": [state.state_dict() for state in self._callbacks()],
            "kinds": Undigested(names=self._kinds()),  # one that only shows things may differ between workers
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. Raises: ConfigError if the samples came in another order so far."""
        if state["seed"] != self._seed:
            raise ConfigError(
                f"the order of the samples: expected the seed {state['seed']}, with which the job began, got "
                f"{self._seed}: give TrainingArguments data_seed, or seed alike in each life of the script"
            )
        self._refuse_others(state["callbacks"], state.get("kinds", {}).get("names"))
        trainer, folder = self._trainer, self._trainer.args.output_dir
        vars(trainer.state).update(copy.deepcopy(state["state"]))
        best = os.path.join(folder, state["best"]) if state["best"] else None
        vars(trainer.state).update(best_model_checkpoint=best)
        vars(trainer.control).update(state["control"])
        trainer._tr_loss.fill_(state["loss"])
        vars(trainer).update(_total_loss_scalar=state["total"], _globalstep_last_logged=state["logged"])
        self._rate = state["rate"]
        for callback, saved in zip(self._callbacks(), state["callbacks"], strict=True):
            callback.load_state_dict(saved)

    def _callbacks(self) -> list[CallbackState]:
        """States of the callbacks, in their order."""
        trainer, present = self._trainer, self._trainer.callback_handler.callbacks
        if new := [callback for callback in present if id(callback) not in self._states]:
            carried = Carried.of(trainer.model, trainer.optimizer, trainer.lr_scheduler)
            others = (trainer, *(v for v in vars(trainer).values() if hasattr(v, "__dict__")), *present)
            self._states |= {id(callback): CallbackState(callback, carried, others) for callback in new}
        return [self._states[id(callback)] for callback in present]

    def _kinds(self) -> list[str]:
        return [type(callback).__name__ for callback in self._trainer.callback_handler.callbacks]

    def _refuse_others(self, states: list[dict[str, Any]], names: list[str] | None) -> None:
        """names: of the callbacks whose states these are; older checkpoints have none."""
        kinds = self._kinds()
        if names is None or (
            len(kinds) == len(names)
            and all(not state or kind == name for state, kind, name in zip(states, kinds, names, strict=True))
        ):
            return
        raise ConfigError(
            f"callbacks: expected {', '.join(names)}, whose state the job has, got {', '.join(kinds)}: give the same "
            "ones in the same order"
        )


def without_times(logs: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the log without how long things took."""
    return {name: value for name, value in logs.items() if not name.endswith(_TIMES)}
