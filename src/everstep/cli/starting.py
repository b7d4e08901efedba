"""Facts that this host has before it starts anything of a job: the one place where commands put them together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from everstep.base.config import Config
from everstep.base.domains import VARIABLE, found_domains
from everstep.cli.early_server import PRELOAD
from everstep.cli.task_loading import TaskSpec
from everstep.cli.worker import ENTRY, FILES
from everstep.runtime.lead.etcd_access import taken_secrets
from everstep.runtime.start import Start
from everstep.script.first_imports import first_imports

_OF_HUB = ("everstep.zoo.hub_library:hub_library", "transformers:PreTrainedModel", "everstep.zoo.decoder_units:")
DOMAIN_HELP = f"Failure domains of this host, e.g. rack=r1,nvlink=u7 (${VARIABLE}, and Slurm's switch)."


def start_here(config: Config, domain: str | None = None, **known: Any) -> Start:
    """Start of a job on this host. domain: of `--domain`. known: the other fields of `Start`, as far as they are known.

    The secrets for etcd leave this process's environment, so call it once. Raises: ConfigError if there is no such
    domain.
    """
    domains = found_domains(domain, os.environ)
    return Start(config, ENTRY, PRELOAD, FILES, domains=domains, secrets=taken_secrets(), **known)


def packages_of(spec: TaskSpec) -> tuple[str, ...]:
    """Names of installed packages that a fork server imports once for all workers of a task here; ":" is in each."""
    if spec.kind in ("script", "file"):
        return first_imports(Path(spec.where))
    return _OF_HUB if spec.kind == "zoo" and spec.where == "hf" else ()
