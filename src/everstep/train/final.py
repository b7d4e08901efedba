"""What a finished job leaves: the model under its own names, and digests of everything.

In a split job the job's leader gets the stages that it does not hold from their pools. Digests are functions of the
merged manifest, so they are those of the unsplit job.
"""

from __future__ import annotations

import json
import logging
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
from everstep.base.errors import EverstepError
from everstep.base.plan import Plan
from everstep.exact import topology
from everstep.exact.extra_state import is_extra, to_file, unpack
from everstep.exact.image import BLOCK_BYTES, Scatter, entries_of, write_blocks
from everstep.exact.state import ModelState
from everstep.protocol.driver.comparing import WHOLE
from everstep.protocol.driver.operations import Finish
from everstep.runtime.link.peer import PeerConnection
from everstep.train import heal
from everstep.train.executor import Unusable
from everstep.train.view import WorkerView

log = logging.getLogger(__name__)
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
    """Write final/model.safetensors and, last, final/digest.json. Atomic, and the same bytes whoever does it.

    tensors: by their names in the whole model's state_dict. left: the loop was left before the last step.
    """
    final = run_dir / "final"
    digest = {"version": DIGEST_VERSION, "step": step, "model": model_digest, "state": state_digest}
    digest |= {"left": True} if left else {}
    _put(final / "model.safetensors", lambda path: save_file(dict(tensors), path))
    _put(final / "digest.json", lambda path: path.write_bytes(json.dumps(digest, indent=2).encode() + b"\n"))


def _put(path: Path, write: Callable[[Path], object]) -> None:
    with drafted(path, 1, make=True) as draft:
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        placed(draft, path.name)


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """state_dict as contiguous CPU tensors that share no storage, in a fixed order of names; extra state too.

    A tied parameter appears under each of its names, as in the model's own state_dict.
    """
    return {
        name: to_file(name, t) if is_extra(name) else t.detach().cpu().clone().contiguous()
        for name, t in sorted(model.state_dict().items())
    }


class Finisher:
    """Writes final/ where this worker is the job's leader, and gives its stages to the job's leader where it is not."""

    def __init__(self, view: WorkerView) -> None:
        self._view = view
        self._manifests: dict[tuple[int, int], dict[str, Any]] = {}

    def write(self, operation: Finish) -> bool:
        """Whether it was written: by the job's leader, unless the plan changed meanwhile."""
        plan, number, run_dir = operation.plan, operation.step, self._view.link.run_dir
        left = number < self._view.order.total_steps
        self._view.phase("finish", number, plan)
        if run_dir is None or not self._view.is_main:
            return False
        if not self._view.stages.split:
            model, state = self._view.stages.only.parts.model, self._view.stages.only.state
            digest = state.state_digest(number)
            _refuse_other({0: digest}, operation)
            write_final(run_dir, model_tensors(model), state.model_digest(), digest, number, left=left)
            return self._arrived(plan)
        parts = self._collect(plan, number)
        if parts is None:
            return False
        _refuse_other({k: topology.state_digest(manifest, number) for k, (manifest, _) in enumerate(parts)}, operation)
        merged = topology.merge([manifest for manifest, _ in parts])
        tensors = {name: t for _, found in parts for name, t in found.items()}
        ordered = {name: tensors[name] for name in sorted(tensors)}
        write_final(
            run_dir, ordered, topology.model_digest(merged), topology.state_digest(merged, number), number, left=left
        )
        return self._arrived(plan)

    def _arrived(self, plan: Plan) -> bool:
        """Where the job's directory is on another host: until final/ is there too; False if the plan changed before."""
        while not self._view.link.has_arrived("final/digest.json"):
            if self._view.cutter.over(plan.generation):
                return False
            self._view.tick()
            time.sleep(0.02)
        return True

    def _collect(self, plan: Plan, number: int) -> list[tuple[dict[str, Any], dict[str, Tensor]]] | None:
        """All stages; None if the plan changed before they were there."""
        while not self._view.cutter.over(plan.generation):
            try:
                return [self._stage(plan, stage, number) for stage in range(plan.stages)]
            except (EverstepError, OSError) as error:
                log.info("the stages could not be collected: %s", error)  # not there yet; or dead, then a plan comes
                self._view.tick()
                time.sleep(0.02)
        return None

    def _stage(self, plan: Plan, stage: int, number: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        view = self._view
        if stage in view.driver.machine.stages:
            replica = view.stages[stage]
            return self._manifest(stage, number), model_tensors(replica.parts.model)
        holders = [plan.member(seat.worker_id) for seat in plan.pool(stage)]
        request = {"kind": "final", "stage": stage, "step": number, "generation": plan.generation}
        connection = heal.connect_first(holders, view.link, request)
        with view.cutter.guarded(connection, plan.generation):
            while not connection.readable(0.005):
                view.tick()
            told = connection.recv_json()
            manifest = told["manifest"]
            blocks = heal.receive_blocks(connection, manifest, view.tick)
        return manifest, _tensors(manifest, told["names"], blocks)

    def _manifest(self, stage: int, number: int) -> dict[str, Any]:
        """Made once: nothing changes any more."""
        key = (stage, number)
        if key not in self._manifests:
            replica = self._view.stages[stage]
            replica.lanes.settle_buffers()
            self._manifests = {k: m for k, m in self._manifests.items() if k[1] == number}
            self._manifests[key] = replica.state.manifest()
        return self._manifests[key]

    def serve(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        """In a handler thread: the job's leader asks for a stage at the last step. Silent if it is not held like
        that."""
        view, stage, number = self._view, int(request["stage"]), int(request["step"])
        if view.step != number or stage not in view.driver.machine.stages:
            return
        replica = view.stages[stage]
        manifest = self._manifest(stage, number)
        connection.send_json({"manifest": manifest, "names": names_of(replica.parts.model, replica.state)})
        heal.send_blocks(connection, replica.state)


def _refuse_other(digests: Mapping[int, str], operation: Finish) -> None:
    """Raises: Unusable if a stage is not the one that all have agreed on."""
    for stage, digest in digests.items():
        agreed = operation.digests.get(stage, "")[:WHOLE]
        if agreed and digest != agreed:
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


def _tensors(manifest: Mapping[str, Any], names: Mapping[str, str], blocks: list[memoryview]) -> dict[str, Tensor]:
    """The tensors of a manifest by their names in the model's state_dict.

    Raises: CheckpointCorrupt if a block does not match its digest.
    """
    entries = entries_of(manifest)
    image = bytearray(len(blocks) * BLOCK_BYTES)
    memory = [memoryview(image)[e.offset : e.offset + e.nbytes] for e in entries]
    write_blocks(manifest, Scatter(entries, memory), lambda i: blocks[i])
    found: dict[str, Tensor] = {}
    for entry, data in zip(entries, memory, strict=True):
        if entry.name.startswith(_MODEL):
            dtype = getattr(torch, entry.dtype)
            flat = torch.frombuffer(data, dtype=dtype) if entry.nbytes else torch.empty(0, dtype=dtype)
            found[entry.name] = flat.view(entry.shape)
    return {
        name: to_file(name, unpack(found[entry])) if is_extra(name) else found[entry].clone()
        for name, entry in names.items()
    }
