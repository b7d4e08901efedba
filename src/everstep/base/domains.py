"""Failure domains: workers that die together. Labels such as rack=r1 say in which domains a host is. Pure.

Domains lie inside one another: racks of different rows are different racks even if they bear the same name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from everstep.base.errors import ConfigError

WIDTHS = ("region", "zone", "row", "rack", "switch", "nvlink", "host", "gpu")
"""Kinds of domains, the widest first. Host and GPU are detected, labels name the others."""
LABELS = WIDTHS[: WIDTHS.index("host")]
LABEL_NAME = rf"\A(?:{'|'.join(LABELS)})\Z"
LABEL_VALUE = r"\A[A-Za-z0-9][A-Za-z0-9_.:-]{0,62}\Z"
VARIABLE = "EVERSTEP_DOMAIN"
_SLURM, _SLURM_PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
_SLURM_KINDS = {"switch": "switch", "block": "nvlink"}

Domains = tuple[tuple[str, str], ...]
"""The labels of one worker: (kind, name), the widest first, each kind at most once."""


def parse_domains(text: str, where: str) -> dict[str, str]:
    """Labels in text such as "rack=r1,nvlink=u7". where: the option or variable that held it. Raises: ConfigError, one
    line, for anything else."""
    found: dict[str, str] = {}
    for part in text.split(","):
        kind, equals, name = part.strip().partition("=")
        if not equals or not re.match(LABEL_NAME, kind) or not re.match(LABEL_VALUE, name):
            raise ConfigError(
                f"{where}: expected labels like rack=r1,nvlink=u7 of {', '.join(LABELS)}, got {part.strip()!r:.80}: "
                "names have letters, digits and _.:-, at most 63 of them"
            )
        if kind in found:
            raise ConfigError(f"{where}: expected each label once, got {kind} twice: keep one of them")
        found[kind] = name
    return found


def found_domains(given: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Labels of this host: the given ones, else those in the environment, else Slurm's network topology. Raises:
    ConfigError for invalid labels."""
    labels = _slurm_domains(environment.get(_SLURM, ""), environment.get(_SLURM_PATTERN, ""))
    if environment.get(VARIABLE):
        labels |= parse_domains(environment[VARIABLE], f"${VARIABLE}")
    return labels | (parse_domains(given, "--domain") if given is not None else {})


def _slurm_domains(address: str, pattern: str) -> dict[str, str]:
    """Switch and block nearest to the node, from Slurm's "s0.s4.node7" and "switch.switch.node"."""
    found = zip(pattern.split("."), address.split("."), strict=False)  # the later ones are nearer
    return {_SLURM_KINDS[kind]: name for kind, name in found if kind in _SLURM_KINDS and re.match(LABEL_VALUE, name)}


def ordered(labels: Mapping[str, str], host: str, gpu: str = "") -> Domains:
    """All labels of a worker: its host's, the host itself, and the GPU if it has one."""
    if host and not labels and not gpu:  # a coordinator of thousands of workers asks for each of them per plan
        return (("host", host),)
    known = {"gpu": gpu, **labels, "host": host}
    return tuple((kind, known[kind]) for kind in WIDTHS if known.get(kind))
