"""Results of a finished job: the model under its own names, and digests of everything.

In a split job the job's leader copies the stages that it does not hold from their pools. Digests are functions of the
merged manifest, so they are those of the unsplit job. All goes tensor by tensor: no process has the whole.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from everstep.base.below import drafted, folder_of, placed
from everstep.base.cause import Cause, Why
from everstep.base.digests import DIGEST_VERSION
from everstep.base.errors import check
from everstep.base.hub_names import ADAPTER_WEIGHTS
from everstep.base.plan import Plan
from everstep.checkpoint.interchange import adapter_names, tensor_of
from everstep.checkpoint.tensor_file import Aside, TensorFile, TensorForm, bytes_in, form_of
from everstep.exact import topology
from everstep.exact.extra_state import is_extra, to_file, unpack
from everstep.exact.image import Image, entries_of, rows_digest, sealed
from everstep.exact.passing import PassingState
from everstep.exact.state import ModelState
from everstep.protocol.driver.comparing import WHOLE
from everstep.protocol.driver.operations import Finish
from everstep.train.executor import Unusable
from everstep.train.taking import Copier
from everstep.train.view import WorkerView

log = logging.getLogger(__name__)

_MODEL = "model/"
_SYNCED_BYTES = 1 << 30
_ROOM_WAIT_S = 600.0
_RETRY_S = 1.0
_SAY_S = 60.0
_LITTLE_BYTES = 1 << 20


class Lying(NamedTuple):
    """A tensor that lies somewhere. read: gives it, when its turn has come."""

    form: TensorForm
    read: Callable[[], Tensor]


def write_final(
    run_dir: Path,
    tensors: Mapping[str, Lying],
    model_digest: str,
    state_digest: str,
    step: int,
    *,
    left: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Write final/model.safetensors and, last, final/digest.json. Atomic; all workers would write the same bytes. If
    the model has an adapter by the package peft, the adapter is written apart, too. One tensor is read at a time.

    tensors: by their names in the whole model's state_dict. left: the loop was left before the last step.
    tick: called after each tensor.
    """
    final = run_dir / "final"
    digest = {"version": DIGEST_VERSION, "step": step, "model": model_digest, "state": state_digest}
    digest |= {"left": True} if left else {}
    adapter = {other: tensors[name] for name, other in adapter_names(tensors).items()}
    if adapter:
        _put(final / ADAPTER_WEIGHTS, partial(_write_each, adapter, tick))
    _put(final / "model.safetensors", partial(_write_each, tensors, tick))
    _put(final / "digest.json", lambda path: path.write_bytes(json.dumps(digest, indent=2).encode() + b"\n"))


def _write_each(tensors: Mapping[str, Lying], tick: Callable[[], None], path: Path) -> None:
    with TensorFile(path, {name: one.form for name, one in tensors.items()}) as file:
        waiting = 0
        for name, one in tensors.items():
            file.put(name, one.read())
            waiting += bytes_in(one.form)
            if waiting > _SYNCED_BYTES:  # or the end would take as long as a slow disk needs for what memory holds
                file.sync()
                waiting = 0
            tick()


def _size(tensors: Mapping[str, Lying]) -> int:
    """Bytes of all that `write_final` writes of these, but for a little."""
    names = [*tensors, *adapter_names(tensors)]
    return sum(bytes_in(tensors[name].form) for name in names)


def _put(path: Path, write: Callable[[Path], object]) -> None:
    with drafted(path, 1, make=True) as draft:
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        placed(draft, path.name)


class Room:
    """Free space for what is written. needed: bytes of it, as far as that is known."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.needed = 0

    def need(self, size: int) -> None:
        """At least so many bytes are written in all."""
        self.needed = max(self.needed, size)

    def is_there(self) -> bool:
        """Whether it would fit now. Raises: OSError."""
        found = os.statvfs(self._folder)
        return found.f_bavail * found.f_frsize >= self.needed + _LITTLE_BYTES


def when_there_is_room(
    write: Callable[[], None], room: Room, goes_on: Callable[[], bool], wait_s: float = _ROOM_WAIT_S
) -> bool:
    """Write; while the disk is full, wait and try again, since what the whole job has computed is at stake. What would
    not fit is not tried: others write to that disk. False if it is not to go on before that.

    Raises: OSError after `wait_s`, or if it is not for want of room.
    """
    end_s, said = time.monotonic() + wait_s, False
    while True:
        try:
            write()
            return True
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or time.monotonic() >= end_s:
                raise
            if not said:
                log.warning("the result cannot be written (%s): free some space; it waits up to %g s", error, wait_s)
            said = True
        retry_s = time.monotonic() + _RETRY_S
        while (now_s := time.monotonic()) < retry_s or (now_s < end_s and not room.is_there()):
            if not goes_on():
                return False
            time.sleep(0.02)


def model_tensors(model: nn.Module, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> dict[str, Lying]:
    """state_dict, in a fixed order of names; extra state, too. A tied parameter appears under each of its names, as in
    the model's own state_dict. whole: gives the content of a tensor, wherever it lies."""
    named = sorted(model.state_dict().items())
    return {name: _lying(to_file(name, t) if is_extra(name) else t.detach(), whole) for name, t in named}


def _lying(tensor: Tensor, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Lying:
    return Lying(form_of(tensor), lambda: whole(tensor))


class Finisher:
    """Writes final/ where this worker is the job's leader, of its own stages and those that its copier brings."""

    def __init__(self, view: WorkerView, copier: Copier) -> None:
        self._view = view
        self._copier = copier

    def write(self, operation: Finish) -> bool:
        """Whether it was written: by the job's leader, unless the plan changed meanwhile."""
        plan, number, run_dir = operation.plan, operation.step, self._view.link.run_dir
        left = number < self._view.order.total_steps
        self._view.phase("finish", number, plan)
        self._look(plan, number)
        if run_dir is None or not self._view.is_main:
            return False
        room = Room(run_dir)
        if self._view.stages.split:
            return self._put(plan, room, lambda: self._write_split(run_dir, operation, room, left=left))
        model, state = self._view.stages.only.parts.model, self._view.stages.only.state
        self._refuse_other({0: self._view.stages.only.compared(number)}, operation)
        digest = self._digest(operation)
        tensors = model_tensors(model, state.memory.whole)
        room.need(_size(tensors))
        about = tensors, state.model_digest(), digest
        return self._put(plan, room, lambda: write_final(run_dir, *about, number, left=left, tick=self._view.tick))

    def _write_split(self, run_dir: Path, operation: Finish, room: Room, *, left: bool) -> None:
        """May be repeated: the other members have their states on the shelf until the job is over.

        Raises: OSError; as `_pass_by`.
        """
        number, ordered = operation.step, dict[str, Lying]()
        with _aside(run_dir) as aside:
            try:
                parts = self._collect(operation, aside)
                if not self._view.config.zero.stage:  # else others are looked at as members compare them
                    digests = {k: topology.state_digest(manifest, number) for k, (manifest, _) in enumerate(parts)}
                    self._refuse_other(digests, operation)
                merged = topology.merge([manifest for manifest, _ in parts])
                tensors = {name: one for _, found in parts for name, one in found.items()}
                ordered = {name: tensors[name] for name in sorted(tensors)}
                about = ordered, topology.model_digest(merged), topology.state_digest(merged, number)
                write_final(run_dir, *about, number, left=left, tick=self._view.tick)
            finally:
                room.need(aside.size + _size(ordered))

    def _refuse_other(self, digests: Mapping[int, str], operation: Finish) -> None:
        """Raises: Unusable if a stage is not the one that all have agreed on. Who gave one of which this worker has
        nothing has changed it."""
        for stage, digest in digests.items():
            agreed = operation.digests.get(stage, "")[:WHOLE]
            if agreed and digest[:WHOLE] != agreed:
                text = f"stage {stage} has changed since all had agreed on it after the last step"
                why = Why(Cause.CORRUPT, f"{text} ({digest[:12]}, expected {agreed[:12]})")
                own = stage in self._view.driver.machine.held
                raise Unusable(why, torn=own, odd=() if own else operation.sources[stage][:1])

    def _put(self, plan: Plan, room: Room, write: Callable[[], None]) -> bool:
        """Write, also to a disk that is full for a while; False if it did not go on before."""
        return when_there_is_room(write, room, lambda: self._goes_on(plan)) and self._arrived(plan)

    def _goes_on(self, plan: Plan) -> bool:
        """Whether the plan is still that, and this worker's host does not end the job."""
        self._view.tick()
        return not (self._view.cutter.over(plan.generation) or self._view.link.row.end_asked)

    def _look(self, plan: Plan, number: int) -> None:
        """Warn if the trained state is not finite: the loss does not show a gradient of the last step, or parameters
        that it no longer depends on."""
        for stage in self._view.driver.machine.stages if self._view.link.run_dir is not None else ():
            if plan.leader(stage) != self._view.me:
                continue
            replica = self._view.stages[stage]
            trained = ((name, p) for name, p in replica.parts.model.named_parameters() if p.requires_grad)
            strange = [name for name, p in trained if not bool(replica.state.memory.whole(p).isfinite().all())]
            if strange:
                more = f" (and {len(strange) - 1} more)" if len(strange) > 1 else ""
                reason = f"after step {number}, the last, {strange[0]}{more} is not finite: the weights are of no use"
                self._view.publisher.emit("warning", step=number, cause=Cause.NONFINITE, reason=reason)

    def _arrived(self, plan: Plan) -> bool:
        """Where the job's directory is on another host: until final/ is there too; False if it did not go on before.
        Raises: OSError if it could not come there for a minute."""
        warn_s, name, since_s = time.monotonic() + _SAY_S, "", 0.0
        while not self._view.link.has_arrived("final/digest.json"):
            if not self._goes_on(plan):
                return False
            now_s, found = time.monotonic(), self._view.link.refused("final/") or ("", "")
            name, since_s = found[0], since_s if name == found[0] else now_s
            if name and now_s - since_s >= _SAY_S:
                raise OSError(errno.EIO, f"{found[1]}, in the job's directory", name)
            if now_s > warn_s:
                log.warning("the result is not in the job's directory yet: is there room on the disk of its head?")
                warn_s += _ROOM_WAIT_S
            time.sleep(0.02)
        return True

    def _digest(self, operation: Finish) -> str:
        """Digest of the unsplit state. What the members have divided passes by. Raises: as `_pass_by`."""
        state = self._view.stages.only.state
        passed = self._pass_by(operation)
        if not passed:
            return state.state_digest(operation.step)
        return rows_digest(passed[0].seen.rows(), passed[0].values, operation.step)

    def _collect(self, operation: Finish, aside: Aside) -> list[tuple[dict[str, Any], dict[str, Lying]]]:
        """All stages: manifests, and tensors by their names in the whole model's state_dict. aside: where those go that
        are not here. Raises: as `_pass_by`."""
        found: dict[int, tuple[dict[str, Any], dict[str, Lying]]] = {}
        for stage, passed in self._pass_by(operation, aside).items():
            found[stage] = passed.told(), passed.tensors()
        for stage in (k for k, there in self._view.driver.machine.held.items() if there.whole):
            replica = self._view.stages[stage]
            replica.lanes.settle_buffers()
            found[stage] = replica.state.manifest(), model_tensors(replica.parts.model, replica.state.memory.whole)
        return [found[stage] for stage in range(operation.plan.stages)]

    def _pass_by(self, operation: Finish, aside: Aside | None = None) -> dict[int, _Passed]:
        """The stages that this worker lacks, or has in part, from others and from here. aside: where tensors of a model
        that is split go.

        Raises: CollectiveAborted; Unusable if no member has a stage.
        """
        found: dict[int, _Passed] = {}
        at = operation.plan, operation.position, operation.sources, operation.pieces
        for offer in self._copier.pass_by(*at):
            for stage, state in offer.states.items():
                if stage not in found:
                    own = self._own(stage, operation)
                    found[stage] = _Passed(state.manifest(), offer.names.get(stage, {}), own, aside)
                found[stage].seen.take([b if b is None else state.read_block(n) for n, b in enumerate(state.blocks)])
        return found

    def _own(self, stage: int, operation: Finish) -> Image | None:
        """The part of a stage that is here, if it passes by in part only."""
        if stage not in operation.pieces or operation.pieces[stage].missing.whole:
            return None
        replica = self._view.stages[stage]
        replica.lanes.settle_buffers()
        return replica.state.image()


class _Passed:
    """A stage that passes by. seen: what has passed; values: beside its tensors."""

    def __init__(
        self, manifest: Mapping[str, Any], names: Mapping[str, str], own: Image | None, aside: Aside | None
    ) -> None:
        """manifest: of a member that has a part. names: entries by the names in the whole model's state_dict. own: the
        part that is here. aside: where what has such a name goes.

        Raises: CheckpointCorrupt if the manifest does not match its digest; Unusable if it is not of the state here.
        """
        entries = entries_of(manifest)
        if own is not None and own.entries != entries:
            raise Unusable(Why(Cause.CORRUPT, "another member's state has other tensors than that of this one"), True)
        wanted = set(names.values()) if aside is not None else set()
        self._places = {e.name: (e, aside.room(e.nbytes)) for e in entries if aside is not None and e.name in wanted}
        self.seen = PassingState(entries, own.read_block if own is not None else None, self._take)
        self.values = manifest["values"] if own is None else own.values
        self._manifest, self._names, self._aside = manifest, names, aside

    def _take(self, name: str, at: int, data: memoryview) -> None:
        if self._aside is not None and name in self._places:
            self._aside.write(self._places[name][1] + at, data)

    def told(self) -> dict[str, Any]:
        """The manifest with the digests of its entries as they passed, for who told it may have had a part of each."""
        body = {key: value for key, value in self._manifest.items() if key != "digest"}
        return sealed({**body, "digests": self.seen.digests()})

    def tensors(self) -> dict[str, Lying]:
        """Tensors of the model by their names in the whole model's state_dict."""
        found = {}
        for name, entry_name in self._names.items():
            entry, _ = self._places[entry_name]
            read = partial(self._read, entry_name)
            form = entry.dtype, entry.shape
            found[name] = _lying(to_file(name, unpack(read()))) if is_extra(name) else Lying(form, read)
        return found

    def _read(self, name: str) -> Tensor:
        entry, at = self._places[name]
        check(self._aside is not None, "nothing was put aside")
        return tensor_of(entry, self._aside.read(at, entry.nbytes))  # type: ignore[union-attr]


@contextmanager
def _aside(run_dir: Path) -> Iterator[Aside]:
    """On the disk that final/ is on. Raises: OSError, which names that."""
    path = run_dir / "final"
    with folder_of(path / "model.safetensors", 1, make=True) as folder:
        try:
            with closing(Aside(Path(f"/proc/self/fd/{folder}"))) as aside:
                yield aside
        except OSError as error:
            if error.filename is not None and not str(error.filename).startswith("/proc/self/fd/"):
                raise
            raise OSError(error.errno, error.strerror, str(path)) from None


def names_of(model: nn.Module, state: ModelState) -> dict[str, str]:
    """For each name of the model's state_dict, the entry of the manifest that it is in."""
    entries, tensors, _, _ = state.live_tensors()
    mine = [(e, t) for e, t in zip(entries, tensors, strict=True) if e.name.startswith(_MODEL)]
    by_name = {e.name for e, _ in mine}
    by_place = {(t.data_ptr(), tuple(t.shape), t.dtype): e.name for e, t in mine if t.numel()}
    names = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if is_extra(name):
            names[name] = _MODEL + name
            continue
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
        names[name] = _MODEL + name if _MODEL + name in by_name else by_place[place]
    return names
