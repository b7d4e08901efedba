"""`everstep checkpoints export | import | copy`, and the search for the checkpoints that a user names.

A user names a run directory, a checkpoint directory, one checkpoint, or a URL; all commands accept the same words.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep.base.below import folder_of
from everstep.base.errors import BlobMissing, CheckpointCorrupt, ConfigError
from everstep.base.given import read_given
from everstep.base.hub_names import HUB_FILES, MOST_HUB_BYTES
from everstep.base.leaving import temporary_folder
from everstep.checkpoint.hosts_store import HostsStore
from everstep.checkpoint.names import BEST, LATEST, step_of
from everstep.checkpoint.object_store import ObjectOptions
from everstep.checkpoint.pointers import read_pins, read_pointer
from everstep.checkpoint.reader import Checkpoint, open_checkpoint, steps_in
from everstep.checkpoint.store import BlobStore, DirectoryStore
from everstep.checkpoint.stores.store_table import open_store
from everstep.cli.completing import complete_place
from everstep.cli.job import read_job
from everstep.cli.signed import require_signature, transfer_signed, vouched
from everstep.cli.terminal import console
from everstep.cli.tokens import token_in
from everstep.report.words import size_text
from everstep.runtime.files.host_directory import HOSTS_FILE, checkpoints_in, others
from everstep.runtime.files.run_lock import is_locked
from everstep.runtime.link.address import JOB_FILE, TOKEN_FILE
from everstep.runtime.link.handshake import PEER, role_token
from everstep.runtime.link.peer import peer_connect
from everstep.runtime.link.tls import Tls, shown_by

if TYPE_CHECKING:
    from everstep.checkpoint.transfer import Transferred

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", re.IGNORECASE)
_FORMATS = ("safetensors", "dcp", "torch", "hf")
_STEP = re.compile(r"(?P<top>.*?)/?(?P<step>step-[0-9]{10})/?$")


@click.command("export")
@click.argument("checkpoint", shell_complete=complete_place)
@click.option("--to", "target", required=True, type=click.Path(path_type=Path), help="New file or folder to write.")
@click.option("--format", "kind", type=click.Choice(_FORMATS), required=True, help="Format of the other tool.")
@click.option("--step", "which", metavar="STEP", help="Step, latest, best or a pin (the newest).")
@click.option("--optimizer", is_flag=True, help="Include the optimizer's state (dcp, torch).")
@click.option("--hf-config", type=click.Path(path_type=Path), help="config.json to copy into the folder (hf).")
@click.option("--shard-size", default="5GB", metavar="SIZE", help="Largest size of a shard (hf), e.g. 5GB.")
@require_signature
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export_command(
    checkpoint: str,
    target: Path,
    kind: str,
    which: str | None,
    optimizer: bool,
    hf_config: Path | None,
    shard_size: str,
    key_file: str | None,
    as_json: bool,
) -> int:
    """Write the model of a checkpoint for other tools.

    CHECKPOINT is a run directory, a directory or URL with checkpoints, or one of them (.../step-0000000010).
    """
    shard_bytes = _bytes(shard_size)
    if (hf_config is not None or shard_size != "5GB") and kind != "hf":
        raise ConfigError(f"--hf-config and --shard-size belong to --format hf, not {kind}")
    if target.exists():
        raise ConfigError(f"{target} exists already: choose another --to")
    key, place = required_key(key_file), find_place(checkpoint)
    found = choose(place, which)
    if not as_json:
        print(f"{found.name}: {origin_words(found)}", flush=True)
    from everstep.checkpoint.interchange import PassingWeights, read_weights
    from everstep.checkpoint.interchange_formats import WITH_OPTIMIZER, write_weights

    beside = _hub_files(checkpoint) if kind == "hf" and hf_config is None else {}
    with (
        vouched(found, place.store, key, target.absolute().parent) as source,
        progress_bar(f"reading step {found.step}", not as_json) as progress,
    ):
        whole = kind in WITH_OPTIMIZER or optimizer
        beside_it = target.absolute().parent
        read = partial(read_weights, optimizer=optimizer, aside=beside_it) if whole else PassingWeights
        weights = read(source, progress=progress)
        files = write_weights(weights, target, kind, hf_config=hf_config, shard_bytes=shard_bytes, beside=beside)
    size, count = sum(file.stat().st_size for file in files), len(weights.forms)
    told = {"from": found.name, "step": found.step, "to": str(target), "format": kind, "tensors": count}
    told |= {"bytes": size, "files": list(map(str, files)), "optimizer": weights.optimizer is not None}
    told |= {"signed_by": found.signed_by, "verified": key is not None}
    right = ", with a valid signature" if key is not None else ""
    _tell(told, as_json, f"{target}: {count} tensors of step {found.step}{right}, {size_text(size)}")
    return 0


@click.command("import")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--task", required=True, help="Task whose model gets the weights.")
@click.option("--to", "target", required=True, metavar="DIR_OR_URL", help="Directory for the checkpoint.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="YAML file of config keys.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a config key; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def import_command(
    path: Path, task: str, target: str, config_file: Path | None, settings: tuple[str, ...], as_json: bool
) -> int:
    """Make a checkpoint of step 0 from weights of another tool. `everstep run TASK --resume-from` starts from it.

    PATH is a safetensors file, a Hugging Face folder, a torch.distributed.checkpoint directory or a torch.save file.
    Nothing in it is executed: anything but tensors, numbers and containers of these is refused.
    """
    from everstep.cli.checkpoint_import import import_weights

    place = find_place(target, writes=True)
    with temporary_folder("everstep-import-") as scratch:
        say = (lambda words: None) if as_json else print
        told = import_weights(path, task, place.store, config_file, settings, scratch, say)
    _tell(told, as_json, f"{told['to']}: step 0 of {task}; {told['taken']}")
    return 0


@click.command("copy")
@click.argument("source", shell_complete=complete_place)
@click.argument("target", shell_complete=complete_place)
@click.option("--step", "which", metavar="STEP", help="Step, latest, best or a pin (the newest).")
@click.option("--all", "everything", is_flag=True, help="Copy all checkpoints, oldest first.")
@require_signature
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def copy_command(
    source: str, target: str, which: str | None, everything: bool, key_file: str | None, as_json: bool
) -> int:
    """Copy checkpoints between directories and object stores. Every byte is compared with its hash on the way.

    Files that exist at the destination stay, so an interrupted copy goes on where it stopped. Source and destination
    are run directories, or directories or URLs with checkpoints; SOURCE may be one checkpoint (.../step-0000000010).
    """
    if everything and which is not None:
        raise ConfigError("--all and --step contradict each other: give one of them")
    origin, goal = find_place(source), find_place(target, writes=True)
    if goal.step is not None:
        raise ConfigError(f"{target} names one checkpoint: give the directory or URL for the copy")
    if origin.store.url == goal.store.url:
        raise ConfigError(f"{origin.store.url} cannot be copied to itself: give another target")
    key = required_key(key_file)
    done = [_copy(origin, goal, step, key, as_json) for step in _steps(origin, which, everything)]
    told: dict[str, Any] = {
        "from": origin.store.url,
        "to": goal.store.url,
        "steps": [item.manifest.step for item in done],
        "bytes": sum(item.bytes for item in done),
        "files": sum(item.files for item in done),
        "skipped_bytes": sum(item.skipped_bytes for item in done),
        "signed_by": [choose(goal, str(item.manifest.step)).signed_by for item in done],
        "verified": key is not None,
    }
    steps = ", ".join(str(step) for step in told["steps"])
    there = f", {size_text(told['skipped_bytes'])} were there already" if told["skipped_bytes"] else ""
    signed = [key[:16] for key in dict.fromkeys(told["signed_by"]) if key]
    known = "which is right" if key is not None else "as they say"
    by = f"; signed by {', '.join(signed)}, {known}" if signed else ""
    _tell(told, as_json, f"{goal.store.url}: step {steps}; {size_text(told['bytes'])} copied{there}{by}")
    return 0


COMMANDS = {"export": export_command, "import": import_command, "copy": copy_command}
"""Commands that the group `everstep checkpoints` takes from here."""


def _steps(origin: StorePlace, which: str | None, everything: bool) -> list[int]:
    from everstep.checkpoint.reader import steps_in

    if not everything:
        return [choose(origin, which).step]
    steps = steps_in(origin.store)
    if not steps:
        raise ConfigError(f"there is no checkpoint in {origin.store.url}")
    return steps


def _copy(origin: StorePlace, goal: StorePlace, step: int, key: str | None, as_json: bool) -> Transferred:
    if not as_json:
        found = choose(origin, str(step))
        print(f"{found.name}: {origin_words(found)}", flush=True)
    with progress_bar(f"copying step {step}", not as_json) as progress:
        try:
            return transfer_signed(origin.store, goal.store, step, key, progress)
        except BlobMissing as error:
            raise CheckpointCorrupt(f"{error}: step {step} of {origin.store.url} is not whole") from None


def _bytes(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " ")) if found else 0
    if size < 1:
        raise ConfigError(f"--shard-size: expected a size such as 500MB or 5GB, got {text!r}")
    return size


def _tell(told: dict[str, Any], as_json: bool, line: str) -> None:
    print(json.dumps(told) if as_json else line)


@dataclass(frozen=True)
class StorePlace:
    """A store, and the step named with it (None: no particular step)."""

    store: BlobStore
    step: int | None = None


def find_place(
    text: str, endpoint: str | None = None, region: str | None = None, *, writes: bool = False
) -> StorePlace:
    """The store that PATH or a URL names; `.../step-0000000010` names one checkpoint in it. The store may be empty.

    A run directory stands for the place where its job puts checkpoints. endpoint, region: of an object store; None:
    from the environment. writes: the caller writes or deletes there; a run directory may then name no folder elsewhere.

    Raises: ConfigError.
    """
    found = _STEP.match(text)
    step = step_of(found["step"]) if found else None
    top = (found["top"] or ("/" if text.startswith("/") else ".")) if found else text
    if "://" in top and not top.startswith("file://"):
        return StorePlace(open_store(top, ObjectOptions(endpoint, region)), step)
    folder = Path(top.removeprefix("file://"))
    if (folder / JOB_FILE).is_file():
        return StorePlace(_store_of(folder, writes), step)
    if (folder / "checkpoints").is_dir() and not list(folder.glob("step-*")):
        folder = checkpoints_in(folder)
        if writes:
            _refuse_others(folder)
    return StorePlace(DirectoryStore(folder), step)


def required_key(key_file: str | None) -> str | None:
    """Key given with `--require-signature`. Raises: ConfigError if the file holds no key."""
    from everstep.checkpoint.keys import read_public_key

    return None if key_file is None else read_public_key(key_file)


def origin_words(found: Checkpoint) -> str:
    """Origin of a checkpoint by its own words; none of them is verified."""
    identity, version = found.manifest.identity, found.manifest.state["format"]
    signed = f"says it is signed by {found.signed_by[:16]}" if found.signed_by else "not signed"
    return f"format {version}, of task {identity['task']}, job {identity['job'] or 'unknown'}, {signed}"


def job_of(text: str) -> tuple[str | None, int]:
    """Name of the job in a run directory, as its checkpoints bear it, and the step that it began with; (None, 0) if the
    path is no run directory's."""
    run_dir = _run_dir_of(text)
    if run_dir is None:
        return None, 0
    job = read_job(run_dir, joined=False)
    return job.name, job.begins_after


def refuse_running(text: str) -> None:
    """Raises: ConfigError if the path is in the directory of a job that runs: it alone knows which of its checkpoints
    is the newest whose state was compared, to which it may have to go back."""
    run_dir = _run_dir_of(text)
    if run_dir is not None and is_locked(run_dir):
        raise ConfigError(
            f"the job in {run_dir} is running, and deletes checkpoints by its own rule (checkpoint.disk.keep_last, "
            "keep_every, keep_best): prune when it has ended"
        )


def _run_dir_of(text: str) -> Path | None:
    """The run directory that a path is in, or is; None for a URL and for a path elsewhere."""
    if "://" in text and not text.startswith("file://"):
        return None
    folder = Path(text.removeprefix("file://")).absolute()
    return next((d for d in (folder, *list(folder.parents)[:2]) if (d / JOB_FILE).is_file()), None)


def _hub_files(text: str) -> dict[str, bytes]:
    """Content, by name, of what `final/` of a run directory has beside the weights of a model in the hub's format.

    Raises: ConfigError if a file cannot be read.
    """
    run_dir, found = _run_dir_of(text), {}
    for path in () if run_dir is None else [run_dir / "final" / name for name in HUB_FILES]:
        try:
            found[path.name] = read_given(path, MOST_HUB_BYTES, 1)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    return found


def _store_of(run_dir: Path, writes: bool) -> BlobStore:
    """Store of a run directory's job; while the job runs, it includes checkpoints on disks of other hosts."""
    job, path = read_job(run_dir), _of_run(run_dir, writes)
    if "://" in path or not (run_dir / HOSTS_FILE).exists() or not is_locked(run_dir):
        return open_store(path)
    token, me = token_in(run_dir / TOKEN_FILE), job.config.network.address
    key, tls = role_token(token, PEER), Tls.of(shown_by(job.config.security.tls, token, me))
    return HostsStore(path, me, lambda: others(run_dir, me), lambda at, asked: peer_connect(at, key, asked, tls=tls))


def _of_run(run_dir: Path, writes: bool) -> str:
    path = read_job(run_dir).config.checkpoint.disk.path
    if path is not None and (writes or "://" in path):  # anybody can prepare a directory, and URLs may need keys
        what = "no address" if "://" in path else "no other folder to write to"
        raise ConfigError(
            f"{run_dir / JOB_FILE} has its checkpoints at {path[:200]!a}: {what} is taken from a directory, give "
            "it here in the place of the directory"
        )
    if path is not None:
        return path
    folder = checkpoints_in(run_dir)
    if writes:
        _refuse_others(folder)
    return os.fspath(folder)


def _refuse_others(folder: Path) -> None:
    """Raises: ConfigError if the folder, or a folder of checkpoints below it, belongs to another user."""
    for path, folders in ((folder, 0), (folder / "any", 1)):
        try:
            with folder_of(path, folders):
                pass
        except FileNotFoundError:
            pass  # it is made
        except OSError as error:
            raise ConfigError(f"cannot write {path.parent}: {error.strerror or error}") from None


def choose(place: StorePlace, which: str | None = None) -> Checkpoint:
    """The checkpoint that the user means. which: a step number, `latest`, `best` or a pin; None: the one that the place
    names, else the newest.

    Raises: ConfigError if there is none; CheckpointCorrupt if its manifest was altered.
    """
    store = place.store
    step = _step(place, which)
    try:
        return open_checkpoint(store, step)
    except BlobMissing:
        known = ", ".join(str(s) for s in steps_in(store)[-8:]) or "none"
        raise ConfigError(f"{store.url} has no checkpoint of step {step}; it has {known}") from None
    except CheckpointCorrupt as error:
        older = [s for s in steps_in(store) if s < step]
        hint = f"; the next older one is step {older[-1]}" if older else ""
        raise CheckpointCorrupt(f"{error}{hint}") from None


def _step(place: StorePlace, which: str | None) -> int:
    store = place.store
    if which is None and place.step is not None:
        return place.step
    if which is None or which == "latest":
        steps = steps_in(store)
        if not steps:
            raise ConfigError(f"there is no checkpoint in {store.url}")
        pointed = read_pointer(store, LATEST) if which == "latest" else None
        return pointed if pointed in steps else steps[-1]
    if which.isdecimal():
        return int(which)
    named = read_pointer(store, BEST) if which == "best" else read_pins(store).get(which)
    if named is None:
        known = ", ".join(sorted(read_pins(store))) or "none"
        raise ConfigError(
            f"{store.url} has no checkpoint called {which!r}: give a step, latest, best or a pin ({known})"
        )
    return named


@contextmanager
def progress_bar(words: str, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Progress bar on stderr, called with (bytes done, bytes in all). It is silent without `shown` or a terminal."""
    import sys

    if not shown or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(words, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
