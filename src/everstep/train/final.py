"""Results of a finished job: the model under its own names, and digests of everything.

In a split job the job's leader copies the stages that it does not hold from their pools. Digests are functions of the
merged manifest, so they are those of the unsplit job.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from everstep.base.below import drafted, placed
from everstep.base.cause import Cause, Why
from everstep.base.digests import DIGEST_VERSION
from everstep.base.hub_names import ADAPTER_WEIGHTS
from everstep.base.plan import Plan
from everstep.checkpoint.interchange import adapter_tensors, tensor_of
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

_MODEL = "model/"


def write_final(
    run_dir: Path,
    tensors: Mapping[str, Tensor],
    model_digest: str,
    state_digest: str,
    step: int,
    *,
    left: bool = False,
) -> None:
    """Write final/model.safetensors and, last, final/digest.json. Atomic; all workers would write the same bytes. If
    the model has an adapter by the package peft, the adapter is written apart, too.

    tensors: by their names in the whole model's state_dict. left: the loop was left before the last step.
    """
    final = run_dir / "final"
    digest = {"version": DIGEST_VERSION, "step": step, "model": model_digest, "state": state_digest}
    digest |= {"left": True} if left else {}
    adapter = adapter_tensors(tensors)
    if adapter:
        _put(final / ADAPTER_WEIGHTS, lambda path: save_file(adapter, path, {"format": "pt"}))
    _put(final / "model.safetensors", lambda path: save_file(dict(tensors), path, {"format": "pt"}))
    _put(final / "digest.json", lambda path: path.write_bytes(json.dumps(digest, indent=2).encode() + b"\n"))


def _put(path: Path, write: Callable[[Path], object]) -> None:
    with drafted(path, 1, make=True) as draft:
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        placed(draft, path.name)


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """state_dict as contiguous CPU tensors that share no storage with each other, in a fixed order of names; extra
    state, too. Those that the model has like this are its own: they change with it.

    A tied parameter appears under each of its names, as in the model's own state_dict.
    """
    found: dict[str, Tensor] = {}
    there: set[int] = set()
    for name, tensor in sorted(model.state_dict().items()):
        if is_extra(name):
            found[name] = to_file(name, tensor)
            continue
        held = tensor.detach().cpu()
        storage = held.untyped_storage()
        alone = storage.nbytes() == held.nbytes and storage.data_ptr() not in there
        found[name] = held if alone and held.is_contiguous() else held.clone().contiguous()
        there.add(storage.data_ptr())
    return found


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
        if not self._view.stages.split:
            model, state = self._view.stages.only.parts.model, self._view.stages.only.state
            _refuse_other({0: self._view.stages.only.compared(number)}, operation)
            digest = self._digest(operation)
            write_final(run_dir, model_tensors(model), state.model_digest(), digest, number, left=left)
            return self._arrived(plan)
        parts = self._collect(operation)
        if not self._view.config.zero.stage:  # else others are looked at as members compare them
            digests = {k: topology.state_digest(manifest, number) for k, (manifest, _) in enumerate(parts)}
            _refuse_other(digests, operation)
        merged = topology.merge([manifest for manifest, _ in parts])
        tensors = {name: t for _, found in parts for name, t in found.items()}
        ordered = {name: tensors[name] for name in sorted(tensors)}
        write_final(
            run_dir, ordered, topology.model_digest(merged), topology.state_digest(merged, number), number, left=left
        )
        return self._arrived(plan)

    def _look(self, plan: Plan, number: int) -> None:
        """Warn if the trained state is not finite: the loss does not show a gradient of the last step, or parameters
        that it no longer depends on."""
        for stage in self._view.driver.machine.stages if self._view.link.run_dir is not None else ():
            if plan.leader(stage) != self._view.me:
                continue
            named = self._view.stages[stage].parts.model.named_parameters()
            strange = [name for name, p in named if p.requires_grad and not bool(p.isfinite().all())]
            if strange:
                more = f" (and {len(strange) - 1} more)" if len(strange) > 1 else ""
                reason = f"after step {number}, the last, {strange[0]}{more} is not finite: the weights are of no use"
                self._view.publisher.emit("warning", step=number, cause=Cause.NONFINITE, reason=reason)

    def _arrived(self, plan: Plan) -> bool:
        """Where the job's directory is on another host: until final/ is there too; False if the plan changed before."""
        while not self._view.link.has_arrived("final/digest.json"):
            if self._view.cutter.over(plan.generation):
                return False
            self._view.tick()
            time.sleep(0.02)
        return True

    def _digest(self, operation: Finish) -> str:
        """Digest of the unsplit state. What the members have divided passes by. Raises: as `_pass_by`."""
        state = self._view.stages.only.state
        passed = self._pass_by(operation)
        if not passed:
            return state.state_digest(operation.step)
        return rows_digest(passed[0].seen.rows(), passed[0].values, operation.step)

    def _collect(self, operation: Finish) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
        """All stages: manifests, and tensors by their names in the whole model's state_dict. Raises: as `_pass_by`."""
        found: dict[int, tuple[dict[str, Any], dict[str, Tensor]]] = {}
        for stage, passed in self._pass_by(operation).items():
            found[stage] = passed.told(), passed.tensors()
        for stage in (k for k, there in self._view.driver.machine.held.items() if there.whole):
            replica = self._view.stages[stage]
            replica.lanes.settle_buffers()
            found[stage] = replica.state.manifest(), model_tensors(replica.parts.model)
        return [found[stage] for stage in range(operation.plan.stages)]

    def _pass_by(self, operation: Finish) -> dict[int, _Passed]:
        """The stages that this worker lacks, or has in part, from others and from here.

        Raises: CollectiveAborted; Unusable if no member has a stage.
        """
        found: dict[int, _Passed] = {}
        at = operation.plan, operation.position, operation.sources, operation.pieces
        for offer in self._copier.pass_by(*at):
            for stage, state in offer.states.items():
                if stage not in found:
                    own = self._own(stage, operation)
                    found[stage] = _Passed(state.manifest(), offer.names.get(stage, {}), own)
                found[stage].seen.take(state.blocks)
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

    def __init__(self, manifest: Mapping[str, Any], names: Mapping[str, str], own: Image | None) -> None:
        """manifest: of a member that has a part. names: entries by the names in the whole model's state_dict. own: the
        part that is here.

        Raises: CheckpointCorrupt if the manifest does not match its digest; Unusable if it is not of the state here.
        """
        entries = entries_of(manifest)
        if own is not None and own.entries != entries:
            raise Unusable(Why(Cause.CORRUPT, "another member's state has other tensors than that of this one"), True)
        read = own.read_block if own is not None else None
        self.seen = PassingState(entries, read, lambda name: bool(names) and name.startswith(_MODEL))
        self.values = manifest["values"] if own is None else own.values
        self._manifest, self._names = manifest, names

    def told(self) -> dict[str, Any]:
        """The manifest with the digests of its entries as they passed, for who told it may have had a part of each."""
        body = {key: value for key, value in self._manifest.items() if key != "digest"}
        return sealed({**body, "digests": self.seen.digests()})

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the model by their names in the whole model's state_dict."""
        entries = {entry.name: entry for entry in self.seen.entries}
        found = {name: tensor_of(entries[name], data) for name, data in self.seen.kept.items()}
        return {
            name: to_file(name, unpack(found[entry])) if is_extra(name) else found[entry].clone()
            for name, entry in self._names.items()
        }


def _refuse_other(digests: Mapping[int, str], operation: Finish) -> None:
    """Raises: Unusable if a stage is not the one that all have agreed on."""
    for stage, digest in digests.items():
        agreed = operation.digests.get(stage, "")[:WHOLE]
        if agreed and digest[:WHOLE] != agreed:
            text = f"stage {stage} has changed since all had agreed on it after the last step"
            raise Unusable(Why(Cause.CORRUPT, f"{text} ({digest[:12]}, expected {agreed[:12]})"), torn=True)


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
