"""Memory of a device for any split of a transformer, by kind, whether jobs can run it or not. Pure.

States are those of mixed precision with Adam (2 + 2 + 12 bytes per parameter: ZeRO, arXiv 1910.02054, section 3), or of
float32 (4 + 4 + 8). The fullest stage of a pipeline counts.
"""

from __future__ import annotations

from dataclasses import replace

from everstep.base.errors import check
from everstep.cost.memory import MemoryUse
from everstep.cost.models import ModelShape
from everstep.cost.step_time import ParallelSplit, parameter_parts

CONTEXT_BYTES = 1e9
"""Bytes that CUDA, its libraries and NCCL take on each device (assumed)."""
BUCKET_BYTES = 2 * 25 * 2**20
"""Two buckets of gradients under way: DistributedDataParallel's default size."""
FRAGMENTED = 0.05
"""Memory lost to fragmentation, as a share of what comes and goes (assumed)."""
SOURCE = "ZeRO paper (arXiv 1910.02054), arXiv 2205.05198 for activations; context and fragmentation assumed"


def in_flight(split: ParallelSplit, micro_batches: int, stage: int = 0) -> float:
    """Micro-batches of which a stage holds activations at once, in units of all its layers.

    1F1B: p - stage; GPipe and looped BFS: all; interleaved: 2 (p - stage - 1) + (c - 1) p + 1 chunks of 1 / c each.
    Source: arXiv 2104.04473, section 2.2; `placement.schedules` for the schedules that jobs run.
    """
    after = split.pp - stage - 1
    if split.schedule == "1f1b":
        return min(after + 1, micro_batches)
    if split.schedule == "interleaved":
        return min(2 * after + (split.chunks - 1) * split.pp + 1, micro_batches * split.chunks) / split.chunks
    return micro_batches


def split_memory(
    shape: ModelShape,
    split: ParallelSplit,
    micro_batches: int,
    dtype: str = "bf16",
    *,
    fused: bool = True,
    offload: bool = False,
    snapshots: int = 0,
) -> MemoryUse:
    """Bytes of the fullest device. offload: the optimizer's state is the host's. snapshots: of the state, in host
    memory. fused: the attention keeps no scores.

    In stage 3 two layers are gathered ahead and the sum of one is under way. In a pipeline, which would gather at each
    micro-batch, a stage keeps its parameters and float32 gradients whole during the step. Source: FSDP in torchtitan at
    9dec370, parallelize_llama.py.
    """
    check(micro_batches >= 1, f"expected at least one micro-batch, got {micro_batches}")
    wide = 2 if dtype == "fp32" else 1
    parts = parameter_parts(shape, split)
    held = sum(count for count, _ in parts)
    by_stage = [sum(count / (ranks if split.zero >= stage else 1) for count, ranks in parts) for stage in (1, 2, 3)]
    optimizer = (8 if dtype == "fp32" else 12) * by_stage[0]
    away = shape.experts * shape.expert_weights * (1 - 1 / split.ep)
    layer = 2.0 * wide * (shape.layer_weights - away) / split.tp
    tokens = split.micro_batch * shape.sequence / split.cp
    kept = wide * tokens * shape.kept_bytes(split.recompute, split.tp, split.sequence_parallel, fused)
    again = 0.0
    if split.recompute != "none":
        whole = shape.activation_bytes(split.tp, split.sequence_parallel, fused)
        again = wide * tokens * whole - kept
    output = 12 * tokens * shape.vocab / split.tp  # logits, their float32 and the gradients of both
    ends = {
        stage: (kept * shape.layers / split.pp * in_flight(split, micro_batches, stage) + again, output * last)
        for stage, last in ((0, split.pp == 1), (split.pp - 1, True))
    }
    activations, logits = max(ends.values(), key=sum)
    wire = BUCKET_BYTES if split.replicas > 1 else 0.0
    if split.cp > 1:  # keys and values of another part of the sequence come while those of one are used
        wire += 2 * 2.0 * wide * tokens * 2 * shape.kv_width / split.tp
    if split.ep > 1:  # tokens that go to experts, and those that come
        wire += 2 * 2.0 * wide * tokens * shape.experts_per_token * shape.hidden / split.tp
    if split.zero == 3:
        wire += (3 * layer if split.pp == 1 else (2 * wide + 4) * held) - BUCKET_BYTES * (split.replicas > 1)
    device = {
        "parameters": 2 * wide * by_stage[2],
        "gradients": 2 * wide * by_stage[1],
        "optimizer": 0.0 if offload else optimizer,
        "activations": activations,
        "output": logits,
        "wire": wire,
        "fragmentation": FRAGMENTED * (activations + logits + wire),
        "context": CONTEXT_BYTES,
    }
    host = {"optimizer": optimizer} if offload else {}
    if snapshots:
        host["snapshots"] = snapshots * (device["parameters"] + optimizer)
    grows = {"parameters", "gradients", "optimizer", "activations"} | ({"wire"} if split.zero == 3 else set())
    return MemoryUse(device, host, frozenset(grows))


def usual_splits(shape: ModelShape, base: ParallelSplit) -> dict[str, tuple[ParallelSplit, bool]]:
    """Usual ways to divide the devices of a split, each with whether the optimizer's state is offloaded."""
    devices = base.devices
    found = {"ddp": (replace(base, zero=0), False)}
    found |= {f"zero{stage}": (replace(base, zero=stage), False) for stage in (1, 2, 3)}
    found["fsdp+recompute"] = (replace(base, zero=3, recompute="full"), False)
    found["ddp+offload"] = (replace(base, zero=0), True)
    found["zero1+offload"] = (replace(base, zero=1), True)
    if base.tp == base.pp == 1:
        tp = max(n for n in (1, 2, 4, 8) if devices % n == 0 and shape.heads % n == 0)
        pp = max(n for n in (1, 2, 4, 8) if devices % n == 0 and n * base.chunks <= shape.layers)
        both = max(n for n in (1, 2, 4, 8) if devices % (tp * n) == 0 and n * base.chunks <= shape.layers)
        if tp > 1:
            found[f"tp{tp}"] = (replace(base, tp=tp, dp=devices // tp, zero=0), False)
            found[f"tp{tp}+sp"] = (replace(base, tp=tp, dp=devices // tp, zero=0, sequence_parallel=True), False)
        if pp > 1:
            found[f"pp{pp}"] = (replace(base, pp=pp, dp=devices // pp, zero=0), False)
        if tp > 1 and both > 1:
            each = replace(base, tp=tp, pp=both, dp=devices // tp // both, zero=1, sequence_parallel=True)
            found[f"tp{tp}+sp x pp{both}+zero1"] = (each, False)
    return found | _divided_sequences_and_experts(shape, base)


def _divided_sequences_and_experts(shape: ModelShape, base: ParallelSplit) -> dict[str, tuple[ParallelSplit, bool]]:
    """Context parallelism, and expert parallelism where there are experts, with ZeRO's stage 1."""
    found = {}
    if base.cp == 1:
        cp = max(n for n in (1, 2, 4, 8) if base.dp % n == 0 and shape.sequence % n == 0)
        if cp > 1:
            found[f"cp{cp}+zero1"] = (replace(base, cp=cp, dp=base.dp // cp, zero=1), False)
    if shape.experts and base.ep == 1:
        ep = max(n for n in (1, 2, 4, 8) if base.replicas % n == 0 and shape.experts % n == 0)
        if ep > 1:
            found[f"ep{ep}+zero1"] = (replace(base, ep=ep, zero=1), False)
    return found
