"""Length of a training step: roofline of the matrices, traffic of all else, communication, pipeline. Pure.

A step is m micro-batches through a pipeline, (m + (p - 1) / c) times the time of one, then what of the gradients' sum
is not hidden, then the update. A micro-batch takes the operations at the share of the peak that a stack reaches, the
bytes of activations that are moved, the sums within layers (tensor parallelism), what goes to experts and back (expert
parallelism), keys and values of other parts of the sequence (context parallelism), and the messages between stages.
Messages: latency plus bytes over bandwidth (alpha-beta), rings for sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from everstep.base.errors import check
from everstep.cost.catalogue import DeviceKind
from everstep.cost.models import ModelShape

LINK_LATENCY_S, NETWORK_LATENCY_S = 5e-6, 15e-6
"""Seconds for one message within a node and between nodes; magnitudes of NCCL's tests (assumed)."""
REACHED = 0.8
"""Share of a link's speed that large messages reach: NCCL's tests show 235 of 300 GB/s on A100s (recalled)."""


@dataclass(frozen=True)
class SoftwareStack:
    """What a training program reaches. matmul: share of the peak in matrix products. passes: how often the bytes of a
    layer's activations (`ModelShape.activation_bytes`) move per forward and backward pass. fused_attention: no scores
    are kept. overlap: share of the compute that hides sums of gradients. calibrated: the rows that matmul and passes
    were fitted to."""

    name: str
    matmul: float
    passes: float
    fused_attention: bool
    overlap: float
    calibrated: str


_TITAN = "torchtitan, December 2024, 8B on 8 GPUs"
STACKS = {
    stack.name: stack
    for stack in (
        SoftwareStack("megatron-2021", 0.6255, 5.93, False, 0.0, "arXiv 2104.04473, table 1: rows 1.7B and 1008B"),
        SoftwareStack("torchtitan-compile", 0.46, 2.0, True, 1.0, f"{_TITAN}, compiled; 2 passes assumed"),
        SoftwareStack("torchtitan-eager", 0.46, 9.035, True, 1.0, f"{_TITAN}: matmul as compiled, passes by eager"),
    )
}


@dataclass(frozen=True)
class Fleet:
    """Devices of one kind in nodes. network: bytes per second of each device between nodes. slowest: speed of the
    slowest device, relative to the others, for which all wait."""

    device: DeviceKind
    count: int
    per_node: int
    network: float
    slowest: float = 1.0


@dataclass(frozen=True)
class ParallelSplit:
    """How a job is divided: tensor, pipeline, data parallel; sequences of a micro-batch; stage of ZeRO; schedule with
    its chunks per stage; what is computed again (`RECOMPUTE`). cp: devices among which each sequence is divided
    (context parallelism). ep: devices, of those that are data or context parallel, among which experts are divided."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    ep: int = 1
    cp: int = 1

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.replicas

    @property
    def replicas(self) -> int:
        """Devices with the same parameters, experts aside: their gradients are summed."""
        return self.dp * self.cp


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part, and rates. model_flops: per device and second, nothing that is computed twice;
    hardware_flops: with it. mfu: model_flops over the peak. bubble: share of the pipeline's time, in 0..1. straggler_s:
    all wait for the slowest device."""

    step_s: float
    matrices_s: float
    traffic_s: float
    tensor_s: float
    stages_s: float
    experts_s: float
    context_s: float
    bubble_s: float
    gradients_s: float
    update_s: float
    straggler_s: float
    bubble: float
    micro_batches: int
    model_flops: float
    hardware_flops: float
    mfu: float
    tokens_per_s: float


def ring_s(size_bytes: float, ranks: int, bandwidth: float, latency_s: float, sums: int = 2) -> float:
    """Seconds of a ring over so many ranks. sums: 2 for an all-reduce, 1 for a reduce-scatter or an all-gather.

    Source: alpha-beta model; Thakur et al. 2005: sums (n - 1) (latency + size / n / bandwidth), latency by log2.
    """
    if ranks == 1:
        return 0.0
    return sums * (math.ceil(math.log2(ranks)) * latency_s + (ranks - 1) / ranks * size_bytes / bandwidth)


def bubble_share(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle share of a pipeline's time: (p - 1) / (c m + p - 1). Source: arXiv 2104.04473, section 2.2."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def micro_batches_of(batch: int, split: ParallelSplit) -> int:
    """Micro-batches of a step through each pipeline, 0 if the batch cannot be divided so."""
    count, rest = divmod(batch, split.dp * split.micro_batch)
    return 0 if rest else count


def step_time(
    shape: ModelShape, fleet: Fleet, split: ParallelSplit, batch: int, dtype: str, stack: SoftwareStack
) -> StepTime:
    """The length of a step. batch: sequences of all devices. dtype: of the matrices, a key of the device's peaks."""
    count = micro_batches_of(batch, split)
    check(count > 0, f"a batch of {batch} cannot be divided by {split}")
    device, tokens = fleet.device, split.micro_batch * shape.sequence / split.cp
    share = split.tp * split.pp
    matrices_s = tokens / share / stack.matmul * _at_peak_s(shape, device, split.recompute, dtype)
    layers = shape.layers / split.pp
    again = 4 / 3 if split.recompute in ("alternate", "full") else 1.0
    moved = shape.activation_bytes(split.tp, split.sequence_parallel, stack.fused_attention) * tokens * layers
    wide = 2 if dtype == "fp32" else 1
    traffic_s = stack.passes * again * wide * moved / device.bandwidth
    tensor_s = _tensor_s(shape, fleet, split, tokens, layers, wide)
    stages_s = _stages_s(shape, fleet, split, tokens, wide)
    experts_s = _experts_s(shape, fleet, split, tokens, layers, wide)
    attention_s = 3 * shape.forward_flops()[1] * tokens / share / stack.matmul / device.peak[_narrow(dtype)]
    context_s = _context_s(shape, fleet, split, tokens, layers, wide, attention_s)
    waits_s = (matrices_s + traffic_s) * (1 / fleet.slowest - 1)
    each_s = matrices_s + traffic_s + tensor_s + stages_s + experts_s + context_s + waits_s
    parts = parameter_parts(shape, split)
    sums_s = sum(_sum_s(fleet, split, 2 * wide * held, ranks) for held, ranks in parts)
    gradients_s = max(0.0, sums_s - each_s * count * stack.overlap)
    update_s = 28 * sum(held / (ranks if split.zero else 1) for held, ranks in parts) / device.bandwidth
    idle_s = each_s * (split.pp - 1) / split.chunks
    step_s = each_s * count + idle_s + gradients_s + update_s
    whole = batch * shape.sequence / split.devices
    model = shape.flops() * whole / step_s
    return StepTime(
        step_s,
        matrices_s * count,
        traffic_s * count,
        tensor_s * count,
        stages_s * count,
        experts_s * count,
        context_s * count,
        idle_s,
        gradients_s,
        update_s,
        waits_s * count,
        bubble_share(split.pp, count, split.chunks),
        count,
        model,
        shape.flops(split.recompute) * whole / step_s,
        model / device.peak[dtype],
        batch * shape.sequence / step_s,
    )


def _at_peak_s(shape: ModelShape, device: DeviceKind, recompute: str, dtype: str) -> float:
    """Seconds for the operations of a token at the device's peak. In fp8 attention and output stay in bf16."""
    _, attention, output = shape.forward_flops()
    rest = 3 * (attention + output) + (attention if recompute in ("selective", "full") else 0)
    return (shape.flops(recompute) - rest) / device.peak[dtype] + rest / device.peak[_narrow(dtype)]


def _narrow(dtype: str) -> str:
    """The numbers of attention and output."""
    return "bf16" if dtype == "fp8" else dtype


def parameter_parts(shape: ModelShape, split: ParallelSplit) -> tuple[tuple[float, int], ...]:
    """Parameters that a device holds, each with the number of devices that hold the same; experts are the second."""
    share, experts = split.tp * split.pp, shape.expert_parameters
    dense = ((shape.parameters - experts) / share, split.replicas)
    return (dense, (experts / share / split.ep, split.replicas // split.ep)) if experts else (dense,)


def _tensor_s(shape: ModelShape, fleet: Fleet, split: ParallelSplit, tokens: float, layers: float, wide: int) -> float:
    """Sums within layers: two in a forward pass, two in a backward pass, two more where all is computed again.

    Source: arXiv 1909.08053, section 3; with sequence parallelism as many bytes (arXiv 2205.05198, section 4.2.2).
    """
    bandwidth, latency_s = _link(fleet, split.tp)
    sums = 6 if split.recompute == "full" else 4
    return sums * layers * ring_s(2.0 * wide * tokens * shape.hidden, split.tp, bandwidth, latency_s)


def _experts_s(shape: ModelShape, fleet: Fleet, split: ParallelSplit, tokens: float, layers: float, wide: int) -> float:
    """Tokens to their experts and back, in both passes; twice more where all is computed again. Each goes to another
    device with probability (e - 1) / e.

    Source: GShard (arXiv 2006.16668, section 3.2): two all-to-alls per layer and pass; experts evenly loaded.
    """
    if split.ep == 1:
        return 0.0
    bandwidth, latency_s = _link(fleet, split.tp * split.ep)
    size = 2.0 * wide * tokens * shape.experts_per_token * shape.hidden / split.tp
    times = 6 if split.recompute == "full" else 4
    return times * layers * ((split.ep - 1) * latency_s + (split.ep - 1) / split.ep * size / bandwidth)


def _context_s(
    shape: ModelShape,
    fleet: Fleet,
    split: ParallelSplit,
    tokens: float,
    layers: float,
    wide: int,
    attention_s: float,
) -> float:
    """Keys and values that go round the ring of a sequence's parts, their gradients in the backward pass, beyond the
    attention that hides them.

    Source: ring attention (arXiv 2310.01889, section 3).
    """
    if split.cp == 1:
        return 0.0
    bandwidth, latency_s = _link(fleet, split.tp * split.ep * split.cp)
    size = 2.0 * wide * tokens * 2 * shape.kv_width / split.tp
    passes = 4 if split.recompute in ("selective", "full") else 3
    return max(0.0, passes * layers * (split.cp - 1) * (latency_s + size / bandwidth) - attention_s)


def _link(fleet: Fleet, devices: int) -> tuple[float, float]:
    """Bytes per second that large messages reach, and seconds of latency, between so many neighbouring devices."""
    inside = devices <= fleet.per_node
    bandwidth = (fleet.device.link if inside else fleet.network) * REACHED
    return bandwidth, LINK_LATENCY_S if inside else NETWORK_LATENCY_S


def _stages_s(shape: ModelShape, fleet: Fleet, split: ParallelSplit, tokens: float, wide: int) -> float:
    """Activations and gradients to the next stage, each tensor parallel device sends its part; between nodes wherever a
    stage fills one."""
    if split.pp == 1:
        return 0.0
    bandwidth, latency_s = _link(fleet, split.devices)
    return 2 * split.chunks * (latency_s + 2.0 * wide * tokens * shape.hidden / split.tp / bandwidth)


def _sum_s(fleet: Fleet, split: ParallelSplit, size_bytes: float, ranks: int) -> float:
    """Seconds that the sum of gradients over so many devices takes. In stage 3 parameters are gathered in both passes,
    too. A ring enters and leaves a node over the links of all its members there."""
    members = max(1, min(ranks, fleet.per_node // split.tp))
    inside = ranks * split.tp <= fleet.per_node
    bandwidth = fleet.device.link if inside else min(fleet.device.link, fleet.network * members)
    sums = 3 if split.zero == 3 else 2
    latency_s = LINK_LATENCY_S if inside else NETWORK_LATENCY_S
    return ring_s(size_bytes, ranks, bandwidth * REACHED, latency_s, sums)
