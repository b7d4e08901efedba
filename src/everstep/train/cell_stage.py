"""The head's end of one stage that the processes of its worker share: the whole model, if it is not split.

Parameters and the optimizer's state lie in memory that all of them have; the head tells the limbs the rest that changes
from step to step (`cell_beside`), and has them update parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everstep.base import errors
from everstep.base.config import Config
from everstep.base.errors import ConfigError, DeterminismError, EverstepError, TaskError
from everstep.base.ports import Piece, Reduced
from everstep.exact.extra_state import has_extra_state
from everstep.exact.pieces import Ranges
from everstep.parallel.cell_memory import CellMemory, PassBroken
from everstep.protocol.driver.nonfinite import NonfiniteRule
from everstep.protocol.driver.records import LaneReport
from everstep.runtime.host.cell import Head
from everstep.runtime.host.cell_doors import Deputies, PartLines
from everstep.train.cell_beside import beside_lanes, groups_of
from everstep.train.cell_elsewhere import OtherParts
from everstep.train.cell_lanes import SharedLanes, places_of
from everstep.train.cell_store import CellStore, give_back
from everstep.train.cell_units import UnitsHere
from everstep.train.cell_update import CellUpdate
from everstep.train.optimizer_kind import make_up
from everstep.train.optimizer_update import refuse_in_cell
from everstep.train.replica import StageReplica

ATTACH, UPDATE, ADOPT = "attach", "update", "adopt"


class CellStage:
    """One stage, as the head has it. store: what all processes have of it; shared: this one's part in the lanes; point:
    at which they have met last."""

    def __init__(self, head: Head, replica: StageReplica, config: Config, tick: Callable[[], None]) -> None:
        """Waits for the limbs, and moves the stage to where they find it.

        Raises: ConfigError for what a cell cannot train.
        """
        parts = replica.parts
        if parts.fill is not None:
            make_up(parts.optimizer, config.seed)
        refuse_in_cell(parts.optimizer, config.seed, unfit=NonfiniteRule.of(config).applies, kind=replica.update.kind)
        _refuse_model(parts.model)
        self._head, self.replica, self.number = head, replica, replica.spec.stage
        self._ranks, self._config = config.cell.ranks, config
        places = places_of(replica, config)
        self.store = CellStore(CellMemory.create(places.size), places, tick, self._look)
        self.store.move_in(replica.everything, made=parts.fill is None)
        self._update = CellUpdate(parts.optimizer, self.store, self._ranks, replica.spec.tied)
        self._span(head.deputies)
        self.shared = SharedLanes(replica, config, self.store)
        self.point = 0
        self._told: tuple[int, int] | None = None
        note = self.store.write_places(_named(replica)) if parts.as_made else 0
        about = {"path": self.store.memory.path, "size": places.size, "likeness": places.likeness, "note": note}
        about |= {"extent": self.store.places.extent, "parts": []}
        if head.deputies is not None:
            about["parts"] = [head.deputies.plan.name, list(head.deputies.plan.doors), 0]
        head.begin(ATTACH, stage=self.number, blank=parts.fill is not None, **about)
        if parts.fill is not None:
            fill(replica, self.store, self._update, config)
        raise_first(head.answers())
        replica.share_updates(self)

    def _span(self, deputies: Deputies | None) -> None:
        """The state lies where all processes have it. If the worker spans hosts: have each part hold its own."""
        store, replica, number = self.store, self.replica, self.number
        others = None
        if deputies is not None:
            deputies.door.show(number, store.memory)
            lines = PartLines(deputies.plan, number, deputies.call)
            others = spread(store, lines, self._update, replica, self._config, made=replica.parts.fill is None)
        replica.state.memory.share(others, self._update.room, self._update.release)

    # ---- lanes

    def begin_lanes(self, step: int) -> dict[str, Any] | None:
        """Lanes of this step come next. Returns what limbs have to take on before them; None if they have."""
        replica = self.replica
        self.store.others.hold(self.store.others.version)
        key = step, replica.lanes.discarded
        fresh, self._told = key != self._told, key
        if not fresh:
            return None
        replica.lanes.settle_buffers()  # another worker's lane may have been computed on trial
        self.store.give_buffers(replica.parts.model)
        return beside_lanes(replica) | {"version": self.store.others.version}

    def gate(self, *, opens: bool) -> bool:
        """Come to the gate before a pass, with what other workers have sent for it; returns whether the pass is made.
        Raises: PassBroken; what a limb has raised."""
        self.store.memory.open_gate(opens)
        self.meet()
        return opens

    def skip(self, points: int) -> None:
        """A pass has so many points at which ranks meet."""
        self.point += points

    def meet(self) -> None:
        """Meet all ranks at the next point. Raises: as `gate`."""
        self.point += 1
        self.store.meet(self.point, range(self._ranks))

    def leave(self) -> None:
        """Leave a pass in its middle: the loop has raised, or a limb has. The step's lanes start over."""
        self.shared.sums.leave()
        self.store.memory.break_pass()
        self.skip(2 * self.shared.sums.points)
        self._told = None

    def compare(self, rank: int, reports: Sequence[LaneReport]) -> None:
        """A rank has computed these lanes together with the first one of its seat. Raises: DeterminismError."""
        mine = {report.lane: report for report in self.replica.lanes.reports([report.lane for report in reports])}
        for report in reports:
            theirs = mine[report.lane].loss
            if report.loss.hex() != theirs.hex():
                raise DeterminismError(
                    f"cell.tp: rank {rank} of this worker has a loss of {report.loss!r} in lane {report.lane}, and the "
                    f"rank that computed it, too, has {theirs!r}: the loss depends on the process, or memory is damaged"
                )

    def _look(self) -> None:
        """A limb has left the pass: raise what it has raised."""
        raise_first(self._head.answers())

    # ---- updates

    def begin_update(self, step: int, factor: float, reduced: Reduced, wanted: Ranges | None) -> Ranges:
        """Have the limbs update their parts with this gradient, times `factor`; returns the head's part. wanted: what
        this worker updates, None: all."""
        gradient = self.store.slot(0)
        with torch.no_grad():
            for piece in reduced.pieces:
                gradient[piece.start : piece.stop].copy_(piece.data)
        update = self._update
        self.store.others.let_go()
        note = {
            "presence": reduced.presence,
            "there": [(piece.start, piece.stop) for piece in reduced.pieces],
            "dealt": update.deal(wanted),
            "groups": groups_of(self.replica.parts.optimizer),
            "kept": update.describe(),
        }
        self._head.begin(UPDATE, stage=self.number, step=step, factor=factor, note=self.store.write_note(note))
        return update.pieces

    def end_update(self) -> None:
        """Wait until all parts are updated. Raises: what an update of a limb has raised."""
        raise_first(self._head.answers())
        kept = self._update.new()
        if kept is not None:
            raise_first(self._head.command(ADOPT, stage=self.number, note=self.store.write_note(kept)))

    def close(self) -> None:
        if self._head.deputies is not None:
            self._head.deputies.door.show(self.number, None)
        self.store.close()


def limb_gradient(
    store: CellStore, replica: StageReplica, step: int, said: Mapping[str, Any], pieces: Ranges
) -> Reduced:
    """The gradient that the head has left for an update of these pieces; of other elements it need not be here. said:
    what the head says of it."""
    if isinstance(store.others, OtherParts):
        trained = {p for group in replica.parts.optimizer.param_groups for p in group["params"]}
        leaves = dict(replica.parts.model.named_parameters(remove_duplicate=False))
        for i in replica.layout.params:
            entry = replica.layout.entries[i]
            leaf = leaves[entry.name]
            for first, stop in pieces.get(leaf, ()) if leaf in trained else ((0, entry.numel),):
                store.bring_sum(0, 0, entry.offset + first, entry.offset + stop)
    there = (Piece(start, stop, store.slot(0)[start:stop]) for start, stop in said["there"])
    return Reduced(step, tuple(there), said["presence"], ())


def fill(replica: StageReplica, store: CellStore, update: CellUpdate, config: Config) -> None:
    """Make this process's share of the modules, and put what its host holds of them where all find it."""
    named = dict(_named(replica))
    each = config.cell.ranks // config.cell.hosts
    part, number = divmod(store.rank, each)
    shares, mine = update.shares(replica.parts.model), range(part * each, (part + 1) * each)

    def put(name: str, made: Tensor) -> None:
        place = named.get(name)
        if place is None:  # of another stage
            return
        runs = shares.get(place.data_ptr())
        with torch.no_grad():
            if config.cell.hosts == 1 or (runs is None and part == 0):
                place.copy_(made)
            elif runs is not None:
                for first, stop in (run for rank in mine for run in runs[rank]):
                    place.view(-1)[first:stop].copy_(made.view(-1)[first:stop])

    if replica.parts.fill is not None:
        replica.parts.fill(put, number, each)
    give_back()


def spread(
    store: CellStore, lines: PartLines, update: CellUpdate, replica: StageReplica, config: Config, *, made: bool
) -> OtherParts:
    """Have each part of a worker that spans hosts hold its own. Parameters of others are here while units compute with
    them, or for a whole step: shards of a module are computed without a call of it. made: all parameters are here."""
    others, units = store.spread(lines, update.shares(replica.parts.model), made=made), replica.parts.units
    numbers = {store.memory.address + place.offset: n for n, place in enumerate(store.places.parameters)}
    by_unit = config.cell.reshard_after_forward and config.cell.shards == 1
    UnitsHere(replica.parts.model, units if by_unit else (), numbers, others)
    return others


def raise_first(answers: list[Any]) -> list[Any]:
    """The answers. Raises: what a limb has raised, under its own name where that is one of ours."""
    failed = [answer["error"] for answer in answers if "error" in answer]
    for name, text in sorted(failed, key=lambda one: one[0] == PassBroken.__name__):
        kind = getattr(errors, name, TaskError)
        raise kind(text) if isinstance(kind, type) and issubclass(kind, EverstepError) else TaskError(text)
    return answers


def _named(replica: StageReplica) -> list[tuple[str, nn.Parameter]]:
    """All parameters with their names in the whole model, each leaf of a tie by its own."""
    own, share = replica.parts.model.named_parameters(remove_duplicate=False), replica.spec.share
    return [*own, *(() if share is None else share.foreign.items())]


def _refuse_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if has_extra_state(module):
            raise ConfigError(
                "cell.fsdp: expected modules whose state is parameters and buffers, got extra state in "
                f"{name or 'the model'} ({type(module).__name__}): set cell.fsdp=1"
            )
