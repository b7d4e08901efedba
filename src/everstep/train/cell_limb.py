"""A limb of a cell: computes its lanes and updates its part of the state, as its head says.

It has a model, an optimizer and a dataset of its own, whose parameters lie in the memory that all ranks share, and no
connections. What it raises, its head raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from everstep.base.below import keep_to
from everstep.base.config import Config
from everstep.base.config_keys import ZeroConfig
from everstep.base.errors import ConfigError, check
from everstep.data.batch import to_device
from everstep.data.loader import LaneLoader, Recipe
from everstep.observe.logs import set_up_worker_log
from everstep.order.ledger import use_digest
from everstep.parallel.cell_memory import CellMemory
from everstep.placement.ranks import rounds
from everstep.protocol.converter import converter
from everstep.runtime.host.cell import Limb
from everstep.runtime.host.cell_doors import CellPlan, PartLines
from everstep.runtime.link.context import WorkerContext
from everstep.train.cell_beside import take_groups
from everstep.train.cell_course import PASSES, CellCourse
from everstep.train.cell_head import LANES
from everstep.train.cell_lanes import places_of
from everstep.train.cell_stage import ADOPT, ATTACH, UPDATE, limb_gradient
from everstep.train.cell_store import CellStore, parameters_in
from everstep.train.job_parts import BuiltTask
from everstep.train.limb_passes import LimbPasses, StageAtLimb
from everstep.train.replica import StageReplica
from everstep.train.task import Task, calling
from everstep.train.view import Stages

_course = converter(CellCourse)

log = logging.getLogger(__name__)


def run_limb(context: WorkerContext, load: Callable[[Config], Task] | None) -> int:
    """Be a limb until the head goes; returns the exit code. load: makes the task; None: the job runs a script, which
    its head will refuse to run in a cell."""
    be_limb(Limb(context), context, load)
    return 0


def be_limb(limb: Limb, context: WorkerContext, load: Callable[[Config], Task] | None) -> None:
    """Be this limb until its head goes. load: as of `run_limb`."""
    config = context.load_config()
    set_up_worker_log(2, context.worker_id, context.incarnation)
    keep_to(context.run_path)
    if load is None:
        limb.serve({})
        return
    with closing(CellLimb(limb, load(config), config, context)) as own:
        limb.serve(own.commands())


class CellLimb:
    """State of a limb, and the commands that it carries out."""

    def __init__(self, limb: Limb, task: Task, config: Config, context: WorkerContext) -> None:
        config = replace(config, zero=ZeroConfig())  # its head deals with other workers
        self._row, self._task, self._config = limb.row, task, config
        self._rank, self._context = context.cell_rank, context
        self._built = built = BuiltTask(task, config, context.worker_id, self._rank)
        self._device = built.device
        parts = built.make(() if config.meta_init else None)
        self._order = built.order()
        if config.stages > 1:
            self._stages = built.stages(parts, None, checked=True)
        elif config.meta_init:
            self._stages = Stages(1, lambda stage: StageReplica(built.make(), config, built.device))
        else:
            self._stages = Stages.unsplit(StageReplica(parts, config, built.device))
        self._loader = LaneLoader(Recipe(built.dataset, self._order, task.collate, config.seed), config.loader)
        self._held: dict[int, StageAtLimb] = {}

    def commands(self) -> dict[str, Callable[..., Any]]:
        acts: dict[str, Callable[..., dict[str, Any]]]
        acts = {ATTACH: self.attach, LANES: self.lanes, PASSES: self.passes, UPDATE: self.update, ADOPT: self.adopt}
        return {name: _answering(act) for name, act in acts.items()}

    def attach(
        self,
        stage: int,
        path: str,
        size: int,
        likeness: str,
        note: int,
        extent: Sequence[int],
        parts: Sequence[Any],
        blank: bool,
    ) -> dict[str, Any]:
        """Have a stage where the head has it. note: size of the head's about parameters that are not to be made again,
        0: none. extent: where parameters lie. parts: of a worker that spans hosts, see `CellPlan`. blank: parameters
        have no values yet, and this process makes some. Raises: ConfigError if that is another one."""
        lines = self._lines(stage, parts)
        memory = CellMemory.attach(path, self._rank, size)
        if note:
            self._built.take(parameters_in(memory, note))
        if stage not in self._stages or self._stages.split:
            self._row.set(phase="idle")
            self._stages.rebuild(stage)
        replica = self._stages[stage]
        replica.prove_update()
        places = places_of(replica, self._config)
        if (places.size, places.likeness) != (size, likeness):
            raise ConfigError(
                f"{self._config.cell.key}: expected the same model in all processes of a worker, but build_model has "
                "made different ones: let it depend on the config and torch's generators alone"
            )
        store = CellStore(memory, places, self._row.tick)
        store.move_in(replica.everything)
        held = self._held[stage] = StageAtLimb(replica, store, self._config, lines, made=not blank)
        if self._stages.split:
            replica.lanes.passes[stage].share(held.shared.sums)
        else:
            replica.loop.use(held.shared.sums)
            replica.state.settings.begin()
        return {}

    def _lines(self, stage: int, parts: Sequence[Any]) -> PartLines | None:
        """Connections to the other parts of this worker, if it spans hosts, of which there may be fewer than hosts."""
        self._config = replace(self._config, cell=self._config.cell.over(len(parts[1]) if parts else 1))
        if not parts:
            return None
        name, doors, part = parts
        context, each = self._context, self._config.cell.ranks // self._config.cell.hosts
        self._rank = part * each + context.cell_rank
        return PartLines(CellPlan(name, part, tuple(doors), each), stage, context.call_peer)

    # ---- the lanes of a model that is not split

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
        step's lanes start over."""
        held = self._attached()
        store, shared, replica = held.store, held.shared, held.replica
        sums, ranks, seats = shared.sums, self._config.cell.ranks, self._config.cell.fsdp
        if note:
            held.begin_lanes(step, scale, store.read_note(0, note))
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
                    store.others.end_passes()
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
        loop, beside = self._stages.only.loop, self._config.cell.tp > 1
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
            self._attached().shared.sums.gather()
        if is_told:
            told = loop.said(batch)
            said[str(lane)] = told.data, told.gave
        loop.leave(lane, len(samples), use_digest(samples))

    def _pass(self, batch: Any, count: int) -> None:
        self._row.set(phase="forward")
        replica = self._stages.only
        loss = calling(self._task, "loss", replica.parts.model, batch)
        self._row.set(phase="backward")
        loss, weight = loss if isinstance(loss, tuple) else (loss, None)
        replica.loop.backward(loss, weight, count / self._order.micro_batch)

    # ---- the lanes of stages

    def passes(self, stage: int, note: int, command: int, held: Sequence[int]) -> dict[str, Any]:
        """Go through the passes that are made, and say what this rank's lanes gave. stage: whose memory has the course,
        of this size; held: the stages that the head has."""
        for number in set(self._held).difference(held):
            self._held.pop(number).store.close()
        self._stages.keep(held)
        at = self._attached(stage)
        course = _course(at.store.read_note(0, note))
        for number, one in self._held.items():
            beside = course.beside[str(number)]
            if beside is not None:
                one.begin_lanes(course.step, course.scale, beside)
            one.replica.lanes.drop()
            one.shared.restart(command)
            one.shared.sums.begin(course.counted[str(number)], fresh=beside is not None)
        own = LimbPasses(self._held, self._loader, self._order, self._device, self._config, self._row)
        try:
            own.run(course)
        except BaseException:
            for one in self._held.values():
                one.shared.sums.leave()
                one.store.memory.break_pass()
            raise
        finally:
            self._row.set(phase="idle")
        return {"note": at.store.write_note(own.answer())}

    # ---- updates

    def update(self, stage: int, step: int, factor: float, note: int) -> dict[str, Any]:
        """Update this rank's part with the gradient that the head has left."""
        held = self._attached(stage)
        self._row.set(phase="update")
        held.store.others.let_go()
        said = held.store.read_note(0, note)
        take_groups(held.replica.parts.optimizer, said["groups"])
        held.update.take(said["dealt"])
        held.update.follow(said["kept"], adopts=False)
        gradient = limb_gradient(held.store, held.replica, step, said, held.update.pieces)
        held.replica.update_pieces(step, factor, gradient, held.update.pieces)
        self._row.set(phase="idle")
        return {}

    def adopt(self, stage: int, note: int) -> dict[str, Any]:
        """Put what an update has made where the others find it."""
        held = self._attached(stage)
        held.update.follow(held.store.read_note(0, note), adopts=True)
        return {}

    def _attached(self, stage: int = 0) -> StageAtLimb:
        check(stage in self._held, "a limb attaches before anything else")
        return self._held[stage]

    def close(self) -> None:
        """End the loader's processes."""
        self._loader.close()


def _answering(act: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Its exceptions become its answer, which the head raises."""

    def answer(**arguments: Any) -> dict[str, Any]:
        try:
            return act(**arguments)
        except Exception as error:
            log.info("told the head of %s: %s", type(error).__name__, error, exc_info=error)
            return {"error": [type(error).__name__, f"{error}"[:4000]]}

    return answer
