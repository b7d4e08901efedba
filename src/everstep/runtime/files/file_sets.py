"""Names of the files that go between hosts: from a host without the job's directory, and to a standby host."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from everstep.base.hub_names import HUB_FILES
from everstep.runtime.link.address import DATASET_FILE, EVENTS_FILE, JOB_FILE, NOTES_FILE

LATEST = "checkpoints/latest.json"
NEWEST_FILE = "newest-checkpoint.json"
"""The name that `LATEST` gets in the job's directory: the newest checkpoint on disks of hosts, for a resume."""
LEDGER = re.compile(r"ledger/worker-\d{1,7}-\d{1,9}\.jsonl")
_SOURCE = r"[0-9a-f]{16}"
SOURCE = re.compile(_SOURCE)
"""Form of the word of a host's own directory."""
_FROM_ALL = (
    rf"final/((adapter_)?model\.safetensors|digest\.json)|rehearsed\.json|{re.escape(DATASET_FILE)}"
    r"|profiles/[0-9A-Za-z][0-9A-Za-z_-]{0,63}/worker-\d{1,7}\.json\.gz"
)
_FOLDERS = ("", "ledger/", "metrics/", "logs/", "final/", "chaos/", "wandb/", "otel/", "notify/")


@dataclass(frozen=True)
class FileSet:
    """A set of files. grows: names of files that grow by lines. whole: names of files that count only once complete."""

    grows: re.Pattern[str]
    whole: re.Pattern[str]

    def has(self, name: str) -> bool:
        """Whether a file of this name is one of them."""
        return bool(self.grows.fullmatch(name) or self.whole.fullmatch(name))

    def found(self, folder: Path) -> list[tuple[str, Path]]:
        """The files in a directory, in the order in which they are sent: events first, the digest of the weights last.
        A reader who finds the digest thus finds the weights. Raises: OSError if not all can be listed."""
        names = [name for inner in _FOLDERS for name in _listed(folder, inner)]
        names += [name for inner in _listed(folder, "profiles/") for name in _listed(folder, f"{inner}/")]
        files = [(name, folder / name) for name in sorted(names) if self.has(name)]
        return sorted(files, key=lambda file: (comes_last(file[0]), file[0] not in (JOB_FILE, EVENTS_FILE)))


def _listed(folder: Path, inner: str) -> list[str]:
    """Names of all that is in a folder below `folder`; none if it is not there, or another user's. Raises: OSError."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        return [f"{inner}{name}" for name in os.listdir(folder / inner)]
    return []


def comes_last(name: str) -> bool:
    """Whether a file is to arrive after all others."""
    return name.endswith("digest.json")


TO_HEAD = FileSet(
    re.compile(
        rf"{re.escape(EVENTS_FILE)}|{LEDGER.pattern}|metrics/[A-Za-z0-9_][A-Za-z0-9._-]{{0,63}}\.jsonl|logs/output\.log"
    ),
    re.compile(rf"{_FROM_ALL}|{re.escape(LATEST)}"),
)
TO_STANDBY = FileSet(
    re.compile(
        rf"{re.escape(EVENTS_FILE)}|ledger/worker-\d{{1,7}}-\d{{1,9}}(-{_SOURCE})?\.jsonl"
        r"|metrics/[A-Za-z0-9_][A-Za-z0-9._-]{0,69}\.jsonl|logs/output(\.1)?\.log"
    ),
    re.compile(
        rf"{_FROM_ALL}|{'|'.join(map(re.escape, (JOB_FILE, NOTES_FILE, NEWEST_FILE)))}"
        rf"|final/({'|'.join(map(re.escape, HUB_FILES))})"
        r"|chaos/[0-9][0-9.-]{0,40}|(wandb|otel|notify)/published\.json"
    ),
)
