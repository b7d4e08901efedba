"""`everstep checkpoints`: list checkpoints, verify them, compare two of them, and delete those that are not needed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep.base.config_keys import TierConfig
from everstep.base.errors import BlobMissing, CheckpointCorrupt, ConfigError
from everstep.cli.completing import complete_place
from everstep.cli.signed import not_before
from everstep.report.words import aligned, size_text

if TYPE_CHECKING:
    from everstep.checkpoint.manifest import Manifest
    from everstep.checkpoint.reader import Checkpoint
    from everstep.cli.checkpoints_exchange import StorePlace

_EXCHANGE = "everstep.cli.checkpoints_exchange"
_ELSEWHERE = ("export", "import", "copy")
_NAMED = 10
_HEADER = ("step", "taken", "state", "written", "base", "marks", "hosts", "reason")


class _Group(click.Group):
    """Group that also knows the commands of the other module, and imports it when one of them is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *_ELSEWHERE]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        found: click.Command = import_module(_EXCHANGE).COMMANDS[cmd_name]
        return found


@click.group("checkpoints", cls=_Group)
def command() -> None:
    """List, verify, compare, sign and delete checkpoints.

    PLACE is a run directory, a directory with checkpoints, one of them (.../step-0000000010), or a URL such as
    s3://bucket/prefix or gs://bucket/prefix.
    """


# ---- ls, show


@command.command("ls")
@click.argument("places", nargs=-1, required=True, metavar="PLACE...", shell_complete=complete_place)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with an object per checkpoint.")
def ls_command(places: tuple[str, ...], as_json: bool) -> int:
    """List checkpoints, oldest first."""
    rows = [row for text in places for row in _rows(_place(text))]
    if as_json:
        print(json.dumps(rows))
    else:
        print("\n".join(aligned([_HEADER, *map(_line, rows)])) if rows else "no checkpoints")
    return 0


@command.command("show")
@click.argument("place", shell_complete=complete_place)
@click.option("--step", "which", metavar="STEP", help="Step, latest, best or a pin (the newest).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show_command(place: str, which: str | None, as_json: bool) -> int:
    """Show the contents of one checkpoint, and the places of its parts."""
    from everstep.cli.checkpoints_exchange import choose

    found = choose(_place(place), which)
    manifest = found.manifest
    told = {
        "name": found.name,
        **_facts(manifest),
        "identity": dict(manifest.identity),
        "metrics": dict(manifest.metrics),
        "digest": manifest.state["digest"],
        "signed_by": found.signed_by,
        "blocks": manifest.n_blocks,
        "files": [
            {"name": f.name, "size_bytes": f.size, "hosts": list(manifest.hosts.get(f.name, ()))}
            for f in manifest.files
        ],
        "tensors": [
            {"name": e.name, "dtype": e.dtype, "shape": list(e.shape), "digest": digest}
            for e, digest in zip(manifest.entries, manifest.state["digests"], strict=True)
        ],
    }
    if as_json:
        print(json.dumps(told))
        return 0
    numerics = ", ".join(f"{key} {value}" for key, value in manifest.identity["numerics"].items())
    print(f"{found.name}: step {manifest.step} of {manifest.identity['task']}, {_when(manifest.created_unix_ns)}")
    print(f"reason: {manifest.reason or '-'}; generation {manifest.generation}; {numerics}")
    size, written = size_text(manifest.size_bytes), size_text(manifest.written_bytes)
    print(f"state {size} in {manifest.n_blocks} blocks, {written} written")
    print(f"signed by {found.signed_by or 'nobody'}" + (", as it says" if found.signed_by else ""))
    for file in manifest.files:
        where = manifest.hosts.get(file.name, ())
        print(f"  {file.name}  {size_text(file.size)}{'  on ' + ', '.join(where) if where else ''}")
    for entry in manifest.entries:
        print(f"  {entry.name}  {entry.dtype}{list(entry.shape)}")
    return 0


def _rows(place: StorePlace) -> list[dict[str, Any]]:
    from everstep.checkpoint.names import BEST, LATEST
    from everstep.checkpoint.pointers import read_pins, read_pointer
    from everstep.checkpoint.reader import open_checkpoint, steps_in

    store = place.store
    steps = steps_in(store)
    marks: dict[int, list[str]] = {}
    for name, mark in ((LATEST, "latest"), (BEST, "best")):
        try:
            pointed = read_pointer(store, name)
        except CheckpointCorrupt:
            continue
        if pointed is not None:
            marks.setdefault(pointed, []).append(mark)
    try:
        for pin, step in read_pins(store).items():
            marks.setdefault(step, []).append(f"pin:{pin}")
    except CheckpointCorrupt as error:
        print(f"warning: {error}", file=sys.stderr)
    rows = []
    for step in steps if place.step is None else [place.step]:
        row: dict[str, Any] = {"step": step, "place": store.url, "marks": marks.get(step, []), "damaged": None}
        try:
            found = open_checkpoint(store, step)
            row |= {**_facts(found.manifest), "signed_by": found.signed_by}
        except (CheckpointCorrupt, ConfigError) as error:
            row["damaged"] = str(error)
        except BlobMissing:
            raise ConfigError(f"{store.url} has no checkpoint of step {step}") from None
        rows.append(row)
    return rows


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "created_unix_ns": manifest.created_unix_ns,
        "generation": manifest.generation,
        "size_bytes": manifest.size_bytes,
        "written_bytes": manifest.written_bytes,
        "base": manifest.base,
        "depth": manifest.depth,
        "reason": manifest.reason,
        "hosts": sorted({host for hosts in manifest.hosts.values() for host in hosts}),
    }


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    marks = ",".join(row["marks"])
    if row["damaged"]:
        return (str(row["step"]), "-", "-", "-", "-", marks, "-", f"damaged: {row['damaged']}")
    base = "-" if row["base"] is None else str(row["base"])
    sizes = (size_text(row["size_bytes"]), size_text(row["written_bytes"]))
    return (
        str(row["step"]),
        _when(row["created_unix_ns"]),
        *sizes,
        base,
        marks,
        ",".join(row["hosts"]) or "-",
        row["reason"],
    )


# ---- verify, diff


@command.command("verify")
@click.argument("places", nargs=-1, required=True, metavar="PLACE...", shell_complete=complete_place)
@click.option("--step", "which", metavar="STEP", help="Checkpoint to verify: a step, latest, best or a pin (all).")
@click.option(
    "--require-signature", "key_file", metavar="KEY", help="Require each to be signed with this key (PEM file)."
)
@not_before
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify_command(
    places: tuple[str, ...], which: str | None, key_file: str | None, not_before: int | None, as_json: bool
) -> int:
    """Read every byte and compare it with its hash. Exit code 0: no damage; 1: damage.

    With --not-before, exit code 1 may also mean that the newest whole checkpoint is older. With --require-signature, it
    may also mean that a checkpoint is unsigned, signed with another key, altered since, or, in a run directory, of
    another job. KEY is the public or the private key.
    """
    from everstep.cli.checkpoints_exchange import required_key

    key = required_key(key_file)
    problems: list[dict[str, Any]] = []
    checked = 0
    for text in places:
        number, found = _verify(_place(text), which, shown=not as_json)
        checked += number
        problems += found
        unsigned = _unsigned(text, _place(text), which, key) if key is not None else []
        problems += unsigned + _too_old(text, {p["step"] for p in found + unsigned}, not_before)
    if as_json:
        print(json.dumps({"checked": checked, "problems": problems}))
    else:
        for problem in problems:
            print(problem["what"] if problem["name"] in problem["what"] else f"{problem['name']} {problem['what']}")
        print(f"{checked} checkpoints, " + (f"{len(problems)} problems" if problems else "all whole"))
    return 1 if problems else 0


def _verify(place: StorePlace, which: str | None, *, shown: bool) -> tuple[int, list[dict[str, Any]]]:
    """Verify the checkpoints of a place: (number of checkpoints read, damage found in them)."""
    from everstep.checkpoint.reader import bytes_of_files, steps_in, verify_store
    from everstep.cli.checkpoints_exchange import choose, progress_bar

    named = which is not None or place.step is not None
    steps = [_step_of(place, which)] if named else steps_in(place.store)
    if not steps:
        choose(place)  # says that there is none
    total, done = bytes_of_files(place.store, steps), 0
    with progress_bar(f"verifying {place.store.url}", shown) as progress:

        def told(n: int) -> None:
            nonlocal done
            done += n
            progress(done, total)

        found = verify_store(place.store, steps if named else None, told)
    return len(steps), [{"place": place.store.url, "step": p.step, "name": p.name, "what": p.what} for p in found]


def _too_old(text: str, bad: set[int], not_before: int | None) -> list[dict[str, Any]]:
    """Finding if the newest usable checkpoint is before `not_before`, or none. bad: steps of damaged checkpoints."""
    from everstep.checkpoint.reader import steps_in

    store = _place(text).store
    newest = max((step for step in steps_in(store) if step not in bad), default=0)
    if not_before is None or newest >= not_before:
        return []
    what = f"the newest checkpoint that is right is of step {newest}: expected one of step {not_before} or later"
    return [{"place": store.url, "step": newest, "name": store.url, "what": f"{store.url}: {what}"}]


def _unsigned(text: str, place: StorePlace, which: str | None, key: str) -> list[dict[str, Any]]:
    """Findings, one for each checkpoint that the key does not vouch for."""
    from everstep.checkpoint.reader import steps_in
    from everstep.checkpoint.signing import check_signature
    from everstep.cli.checkpoints_exchange import job_of

    named = which is not None or place.step is not None
    job, begins_after = job_of(text)
    found = []
    for step in [_step_of(place, which)] if named else steps_in(place.store):
        try:
            check_signature(place.store, step, key, job=None if step == begins_after else job)
        except (BlobMissing, CheckpointCorrupt):
            continue  # damage has been told
        except ConfigError as error:
            name = f"step-{step:010d}/manifest.json"
            found.append({"place": place.store.url, "step": step, "name": name, "what": f"{name}: {error}"})
    return found


def _step_of(place: StorePlace, which: str | None) -> int:
    """Step of the wanted checkpoint, even if its manifest is damaged. Raises: ConfigError if there is none."""
    from everstep.checkpoint.reader import steps_in
    from everstep.cli.checkpoints_exchange import choose

    step = int(which) if which is not None and which.isdecimal() else None
    if step is None and which is None:
        step = place.step
    if step is None:
        return choose(place, which).step
    if step not in steps_in(place.store):
        choose(place, str(step))  # says what there is instead
    return step


@command.command("diff")
@click.argument("place_a", metavar="A", shell_complete=complete_place)
@click.argument("place_b", metavar="B", shell_complete=complete_place)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def diff_command(place_a: str, place_b: str, as_json: bool) -> int:
    """Show which tensors and values of two checkpoints differ. It compares hashes. Exit code 1: they differ."""
    from everstep.cli.checkpoints_exchange import choose

    a, b = choose(_place(place_a)), choose(_place(place_b))
    told = _differences(a, b)
    equal = not any(told.values())
    if as_json:
        print(json.dumps({"a": a.name, "b": b.name, "equal": equal, **told}))
        return 0 if equal else 1
    if equal:
        print(f"equal: {a.name} and {b.name}, digest {a.manifest.state['digest']}")
        return 0
    for key, words in (
        ("only_a", "only in the first"),
        ("only_b", "only in the second"),
        ("other_kind", "of another type or shape"),
        ("differ", "differ"),
        ("values", "values that differ"),
        ("identity", "of the job"),
    ):
        names = told[key]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            print(f"{words}: {', '.join(names[:_NAMED])}{more}")
    return 1


def _differences(a: Checkpoint, b: Checkpoint) -> dict[str, list[str]]:
    from everstep.exact.image import digested

    mine, theirs = _tensors(a.manifest), _tensors(b.manifest)
    both = [name for name in mine if name in theirs]
    other_kind = [name for name in both if mine[name][:2] != theirs[name][:2]]
    job_a, job_b = a.manifest.identity, b.manifest.identity
    task = ["task"] if job_a["task"] != job_b["task"] else []
    return {
        "only_a": [name for name in mine if name not in theirs],
        "only_b": [name for name in theirs if name not in mine],
        "other_kind": other_kind,
        "differ": [name for name in both if name not in other_kind and mine[name] != theirs[name]],
        "values": _other(digested(a.manifest.state["values"]), digested(b.manifest.state["values"])),
        "identity": task + _other(job_a["numerics"], job_b["numerics"]),
    }


def _other(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Keys whose values differ."""
    return [key for key in sorted({*a, *b}) if a.get(key) != b.get(key)]


def _tensors(manifest: Manifest) -> dict[str, tuple[str, tuple[int, ...], str]]:
    pairs = zip(manifest.entries, manifest.state["digests"], strict=True)
    return {e.name: (e.dtype, e.shape, digest) for e, digest in pairs}


# ---- prune, pin


@command.command("prune")
@click.argument("places", nargs=-1, required=True, metavar="PLACE...", shell_complete=complete_place)
@click.option("--keep-last", type=click.IntRange(min=1), default=2, show_default=True, help="Keep the newest N.")
@click.option("--keep-every", type=click.IntRange(min=1), help="Keep checkpoints of every Nth step.")
@click.option("--keep-best", type=click.IntRange(min=0), default=0, help="Keep the best N by --metric.")
@click.option("--metric", help="Metric that ranks checkpoints.")
@click.option(
    "--mode", type=click.Choice(["max", "min"]), default="max", help="Whether a larger or a smaller value is better."
)
@click.option("--dry-run", is_flag=True, help="Only print the checkpoints that it would delete.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def prune_command(
    places: tuple[str, ...],
    keep_last: int,
    keep_every: int | None,
    keep_best: int,
    metric: str | None,
    mode: str,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Delete old checkpoints, but no byte that a kept one needs. Pinned and damaged checkpoints stay. A job that runs
    prunes its own."""
    from everstep.checkpoint.retention import apply, would_go
    from everstep.cli.checkpoints_exchange import refuse_running

    if keep_best and metric is None:
        raise ConfigError("--keep-best needs --metric: name the metric that checkpoints are compared by")
    rule = TierConfig(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
    for text in places if not dry_run else ():
        refuse_running(text)
    stores, prune = [_place(text, writes=not dry_run).store for text in places], would_go if dry_run else apply
    told = [{"place": store.url, "deleted": prune(store, rule, metric, mode)} for store in stores]
    if as_json:
        print(json.dumps({"dry_run": dry_run, "places": told}))
        return 0
    for row in told:
        steps = ", ".join(str(step) for step in row["deleted"]) or "nothing"
        print(f"{row['place']}: {'would delete' if dry_run else 'deleted'} {steps}")
    return 0


@command.command("pin")
@click.argument("place", shell_complete=complete_place)
@click.argument("name")
@click.option("--step", "which", metavar="STEP", help="Step, latest or best (the newest).")
@click.option("--remove", is_flag=True, help="Remove the pin.")
def pin_command(place: str, name: str, which: str | None, remove: bool) -> int:
    """Keep a checkpoint for ever, under a name."""
    from everstep.checkpoint.pointers import read_pins, write_pins
    from everstep.cli.checkpoints_exchange import choose

    where = _place(place, writes=True)
    pins = read_pins(where.store)
    if name.isdecimal() or name in ("latest", "best"):
        raise ConfigError(f"expected a name other than a step, 'latest' or 'best', got {name!r}: choose another")
    if remove:
        if name not in pins:
            raise ConfigError(f"{where.store.url} has no pin {name!r}; it has {', '.join(sorted(pins)) or 'none'}")
        step = pins.pop(name)
    else:
        step = pins[name] = choose(where, which).step
    write_pins(where.store, pins)
    print(f"{where.store.url}: step {step} is {'no longer' if remove else 'now'} pinned as {name}")
    return 0


# ---- keygen


@command.command("keygen")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def keygen_command(file: Path, as_json: bool) -> int:
    """Make a pair of keys for signing checkpoints. FILE gets the private key, FILE.pub the public key.

    checkpoint.sign_key=FILE signs checkpoints. With --require-signature FILE.pub, `run`, `eval` and `checkpoints
    verify`, `copy` and `export` accept no others.
    """
    from everstep.checkpoint.keys import make_keys

    public, key = make_keys(file)
    if as_json:
        print(json.dumps({"private": str(file), "public": str(public), "key": key}))
    else:
        print(f"{file}: private key, keep it secret; {public}: public key, for verifying; {key}")
    return 0


# ---- words


def _place(text: str, *, writes: bool = False) -> StorePlace:
    """writes: as for `find_place`. Raises: ConfigError if it does not exist."""
    from everstep.checkpoint.hosts_store import HostsStore
    from everstep.checkpoint.store import DirectoryStore
    from everstep.cli.checkpoints_exchange import find_place

    place = find_place(text, writes=writes)
    scattered = isinstance(place.store, HostsStore) and place.store.scattered
    if isinstance(place.store, DirectoryStore) and not scattered and not place.store.path.is_dir():
        raise ConfigError(f"there are no checkpoints at {text}: {place.store.path} does not exist")
    return place


def _when(unix_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_ns / 1e9))
