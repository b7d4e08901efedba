"""Catalogue of devices: what they compute, hold, move and cost, and how often they fail. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.base.errors import ConfigError, did_you_mean

SHEETS = "data sheets of the makers, 2025"
PRICES = "typical prices of specialised clouds, on demand, 2025 to 2026; hyperscalers ask up to twice as much"
NODE_MTBF = "100,000 h for a node, the usual assumption, times its devices"
DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")


@dataclass(frozen=True)
class DeviceKind:
    """A device. peak: dense operations per second by dtype. memory_gb: in 10^9 bytes. bandwidth, link, network: bytes
    per second of its memory, to others in its node and to other nodes, in one direction. price: dollars per hour.
    mtbf_h: hours between failures of one device. sources: by figure."""

    name: str
    peak: Mapping[str, float]
    memory_gb: float
    bandwidth: float
    link: float
    network: float
    price: float
    mtbf_h: float
    sources: Mapping[str, str]


_SOURCES = {"peak": SHEETS, "memory_gb": SHEETS, "bandwidth": SHEETS, "link": SHEETS, "network": "usual nodes, assumed"}
_SOURCES |= {"price": PRICES, "mtbf_h": NODE_MTBF}
_A100_MTBF = "arXiv 2410.21680: 6.5 failures per 1,000 node-days of 8 (recalled)"
_H100_MTBF = "arXiv 2407.21783: 419 interruptions in 54 days on 16,384"
# TFLOP/s in fp32, tf32, fp16, bf16, fp8; memory in GB, GB/s of it, of the link, Gb/s of the network, dollars
_ROWS = (
    ("a10-24", (31.2, 62.5, 125, 125, 0), 24, 600, 32, 25, 0.75),
    ("a100-40", (19.5, 156, 312, 312, 0), 40, 1555, 300, 200, 1.29),
    ("a100-80", (19.5, 156, 312, 312, 0), 80, 2039, 300, 200, 1.5),
    ("b200-180", (80, 1125, 2250, 2250, 4500), 180, 8000, 900, 400, 4.5),
    ("h100-80", (67, 494.5, 989.5, 989.5, 1979), 80, 3350, 450, 400, 2.5),
    ("h100hbm2e-96", (67, 494.5, 989.5, 989.5, 1979), 96, 2400, 450, 400, 2.5),
    ("h200-141", (67, 494.5, 989.5, 989.5, 1979), 141, 4800, 450, 400, 3.5),
    ("l4-24", (30.3, 60.5, 121, 121, 242.5), 24, 300, 32, 25, 0.6),
    ("l40s-48", (91.6, 183, 362, 362, 733), 48, 864, 32, 100, 0.9),
    ("mi300x-192", (163.4, 653.7, 1307.4, 1307.4, 2614.9), 192, 5300, 448, 400, 2.5),
    ("rtx3090-24", (35.6, 35.6, 71, 71, 0), 24, 936, 16, 10, 0.25),
    ("rtx4090-24", (82.6, 82.6, 165.2, 165.2, 330.3), 24, 1008, 32, 10, 0.4),
    ("t4-16", (8.1, 0, 65, 0, 0), 16, 320, 16, 25, 0.35),
    ("v100-16", (15.7, 0, 125, 0, 0), 16, 900, 150, 25, 0.6),
    ("v100-32", (15.7, 0, 125, 0, 0), 32, 900, 150, 25, 0.8),
)


def _kind(
    name: str, peaks: tuple[float, ...], gb: int, moved: float, link: float, network: float, price: float
) -> DeviceKind:
    peak = {dtype: flops * 1e12 for dtype, flops in zip(DTYPES, peaks, strict=True) if flops}
    mtbf_h, sources = 100_000.0 * 8, dict(_SOURCES)
    if name.startswith("a100"):
        mtbf_h, sources["mtbf_h"] = 8 * 24 / 6.5e-3, _A100_MTBF
    elif name.startswith(("h100", "h200")):
        mtbf_h, sources["mtbf_h"] = 16384 * 54 * 24 / 419, _H100_MTBF
    if name == "h100hbm2e-96":
        sources["peak"] = sources["bandwidth"] = (
            "torchtitan's benchmark of December 2024; peak of the SXM, at 500 W not reached"
        )
    return DeviceKind(name, peak, gb, moved * 1e9, link * 1e9, network * 1e9 / 8, price, mtbf_h, sources)


CATALOGUE = {row[0]: _kind(*row) for row in _ROWS}


def device_named(name: str, known: Mapping[str, DeviceKind] = CATALOGUE) -> DeviceKind:
    """A device by name. A name without its size will do where there is one size only.

    Raises: ConfigError, with the nearest name.
    """
    wanted = name.lower()
    if wanted in known:
        return known[wanted]
    alike = [full for full in known if full.startswith(f"{wanted}-")]
    if len(alike) == 1:
        return known[alike[0]]
    if alike:
        raise ConfigError(f"--gpu: {name[:40]} has several sizes; name one of {', '.join(alike)}")
    near = did_you_mean(wanted, known, "{}")
    raise ConfigError(f"--gpu: expected one of {', '.join(known)}, got {name[:40]!r}{near}; --catalogue gives another")
