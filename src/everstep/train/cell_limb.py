"""A limb of a cell: computes its lanes and updates its part of the state, as its head says.

It has a model, an optimizer and a dataset of its own, whose parameters lie in the memory that all ranks share, and no
connections. What it raises, its head raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from everstep.base.below import keep_to
from everstep.base.config import Config
from everstep.base.errors import ConfigError, check
from everstep.data.batch import to_device
from everstep.data.loader import LaneLoader, Recipe
from everstep.observe.logs import set_up_worker_log
from everstep.order.ledger import use_digest
from everstep.parallel.cell_memory import CellMemory
from everstep.placement.ranks import rounds
from everstep.runtime.host.cell import Limb
from everstep.runtime.link.context import WorkerContext
from everstep.train.cell_beside import take_beside, take_groups
from everstep.train.cell_head import ADOPT, ATTACH, LANES, UPDATE, limb_gradient
from everstep.train.cell_lanes import SharedLanes, places_of
from everstep.train.cell_store import CellStore
from everstep.train.cell_update import CellUpdate
from everstep.train.job_parts import BuiltTask
from everstep.train.replica import StageReplica
from everstep.train.task import Task, calling

log = logging.getLogger(__name__)


def run_limb(context: WorkerContext, load: Callable[[Config], Task] | None) -> int:
    """Be a limb until the head goes; returns the exit code. load: makes the task; None: the job runs a script, which
    its head will refuse to run in a cell."""
    config = context.load_config()
    set_up_worker_log(2, context.worker_id, context.incarnation)
    keep_to(context.run_path)
    limb = Limb(context)
    if load is None:
        limb.serve({})
        return 0
    with closing(CellLimb(limb, load(config), config, context)) as own:
        limb.serve(own.commands())
    return 0


class CellLimb:
    """What a limb has, and what it does when it is told to."""

    def __init__(self, limb: Limb, task: Task, config: Config, context: WorkerContext) -> None:
        self._row, self._task, self._config = limb.row, task, config
        self._rank = context.cell_rank
        built = BuiltTask(task, config, context.worker_id, self._rank)
        self._device = built.device
        self._replica = StageReplica(built.make(), config, built.device)
        self._replica.prove_update()
        self._order = built.order()
        self._loader = LaneLoader(Recipe(built.dataset, self._order, task.collate, config.seed), config.loader)
        self._store: CellStore | None = None
        self._shared: SharedLanes | None = None
        self._update: CellUpdate | None = None

    def commands(self) -> dict[str, Callable[..., Any]]:
        """What the head may command."""
        acts: dict[str, Callable[..., dict[str, Any]]]
        acts = {ATTACH: self.attach, LANES: self.lanes, UPDATE: self.update, ADOPT: self.adopt}
        return {name: _answering(act) for name, act in acts.items()}

    def attach(self, path: str, size: int, likeness: str) -> dict[str, Any]:
        """Have the model where the head has it. Raises: ConfigError if that is another one."""
        model = self._replica.parts.model
        places = places_of(self._replica, self._config)
        if (places.size, places.likeness) != (size, likeness):
            raise ConfigError(
                f"{self._config.cell.key}: expected the same model in all processes of a worker, but build_model has "
                "made different ones: let it depend on the config and torch's generators alone"
            )
        self._store = CellStore(CellMemory.attach(path, self._rank, size), places, self._row.tick)
        self._store.move_in(model)
        self._update = CellUpdate(self._replica.parts.optimizer, self._store, self._config.cell.ranks)
        self._shared = SharedLanes(self._replica, self._config, self._store)
        self._replica.loop.use(self._shared.sums)
        self._replica.state.settings.begin()
        return {}

    def lanes(
        self,
        point: int,
        command: int,
        step: int,
        lanes: Sequence[int],
        told: Sequence[int],
        scale: float,
        due: bool,
        note: int,
    ) -> dict[str, Any]:
        """Compute this rank's lanes of the rounds that are made, and say what they gave. note: its size, where the
        step's lanes begin anew."""
        store, shared, replica = self._attached()
        sums, ranks, seats = shared.sums, self._config.cell.ranks, self._config.cell.fsdp
        if note:
            replica.abandon()
            take_beside(replica, store.read_note(0, note))
            store.take_buffers(replica.parts.model)
            replica.begin_lanes(step, scale)
        shared.restart(command)
        mine = lanes[shared.seat :: seats]
        self._loader.schedule(step, mine)
        said: dict[str, tuple[str, str]] = {}
        done: list[int] = []
        try:
            sums.begin(lanes, fresh=note > 0)
            for turn in rounds(lanes, seats):
                point += 1
                store.meet(point, range(ranks))
                if not store.memory.go:
                    break
                sums.round(turn, point)
                if shared.seat < len(turn):
                    lane = turn[shared.seat]
                    with shared.together():
                        self._lane(step, lane, said, is_told=lane in told, due=due)
                    done.append(lane)
                point += sums.points
        except BaseException:
            sums.leave()
            store.memory.break_pass()
            raise
        finally:
            self._row.set(phase="idle")
        reports = [[r.lane, r.loss, r.weight, r.count, r.use] for r in replica.lanes.reports(done)]
        (buffers,) = replica.lanes.buffer_reports()
        return {"note": store.write_note({"reports": reports, "said": said, "buffers": buffers})}

    def _lane(self, step: int, lane: int, said: dict[str, tuple[str, str]], *, is_told: bool, due: bool) -> None:
        """One lane, as `Step` has it at the head: what a head computes together with this rank, it does so often."""
        loop, beside = self._replica.loop, self._config.cell.tp > 1
        self._row.set(step=step - 1, phase="load")
        batch, samples = self._loader.batch(step, lane)
        batch = to_device(batch, self._device)
        loop.enter(step, lane, apart=is_told or (beside and due))
        twice = beside and loop.probes(due)
        self._pass(batch, len(samples))
        if twice:
            loop.again()
            self._pass(batch, len(samples))
            loop.compare()
        if is_told or (due and twice):
            self._attached()[1].gather_gradients()
        if is_told:
            told = loop.said(batch)
            said[str(lane)] = told.data, told.gave
        loop.leave(lane, len(samples), use_digest(samples))

    def _pass(self, batch: Any, count: int) -> None:
        self._row.set(phase="forward")
        loss = calling(self._task, "loss", self._replica.parts.model, batch)
        self._row.set(phase="backward")
        loss, weight = loss if isinstance(loss, tuple) else (loss, None)
        self._replica.loop.backward(loss, weight, count / self._order.micro_batch)

    def update(self, step: int, factor: float, note: int) -> dict[str, Any]:
        """Update this rank's part with the gradient that the head has left."""
        store, _, replica = self._attached()
        self._row.set(phase="update")
        said = store.read_note(0, note)
        check(self._update is not None, "a limb attaches before it updates")
        take_groups(replica.parts.optimizer, said["groups"])
        self._update.follow(said["kept"], adopts=False)  # type: ignore[union-attr]
        pieces = self._update.pieces  # type: ignore[union-attr]
        gradient = limb_gradient(store, step, said["presence"], replica.layout.numel)
        replica.update_pieces(step, factor, gradient, pieces)
        self._row.set(phase="idle")
        return {}

    def adopt(self, note: int) -> dict[str, Any]:
        """Put what an update has made where the others find it."""
        store, _, _ = self._attached()
        self._update.follow(store.read_note(0, note), adopts=True)  # type: ignore[union-attr]
        return {}

    def _attached(self) -> tuple[CellStore, SharedLanes, StageReplica]:
        check(self._store is not None and self._shared is not None, "a limb attaches before anything else")
        return self._store, self._shared, self._replica  # type: ignore[return-value]

    def close(self) -> None:
        """End the loader's processes."""
        self._loader.close()


def _answering(act: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """What it raises becomes its answer: the head is to raise it."""

    def answer(**arguments: Any) -> dict[str, Any]:
        try:
            return act(**arguments)
        except Exception as error:
            log.info("told the head of %s: %s", type(error).__name__, error, exc_info=error)
            return {"error": [type(error).__name__, f"{error}"[:4000]]}

    return answer
