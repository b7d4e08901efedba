"""`everstep launch slurm | k8s | ray | ssh`: start a job on the hosts of an engine, or print what would start it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from ipaddress import ip_address
from pathlib import Path, PurePosixPath
from typing import Any

import click

from everstep.base.below import write_atomically
from everstep.base.config import read_layers
from everstep.base.config_keys import ControlConfig
from everstep.base.doors import canonical, is_loopback
from everstep.base.errors import ConfigError
from everstep.base.etcd_address import EtcdAddress
from everstep.base.given import read_given
from everstep.chaos.spec import parse
from everstep.cli.agent import STANDBYS_OWN, says_itself
from everstep.cli.completing import complete_task
from everstep.cli.config_file import said_layers
from everstep.cli.engines import kubernetes, ray_cluster, slurm, ssh
from everstep.cli.engines.launch import Launch
from everstep.cli.engines.strategic_merge import patched
from everstep.cli.run import command as run_command
from everstep.cli.task_loading import parse_task
from everstep.cli.tokens import given_token
from everstep.runtime.files.private import close_folder, close_run_dir
from everstep.runtime.lead.etcd_access import file_variables
from everstep.runtime.link import wire
from everstep.runtime.link.address import TOKEN_FILE
from everstep.runtime.link.interfaces import found_at
from everstep.runtime.process import own_command

_ARGV = "everstep.argv"
_OURS = ("--run-dir", "--workers", "--slots", "--listen", "--rank", "--world-size", "--master-addr", "--master-port")
_OURS_OF_SBATCH = ("array", "nodes", "ntasks", "ntasks-per-node", "requeue", "no-requeue", "signal", "wrap", "parsable")


class _Launch(click.Command):
    """Command whose TASK and unknown options are those of `everstep run`; words after "--" are the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = args.index("--") if "--" in args else len(args)
        ctx.meta[_ARGV] = tuple(args[own + 1 :])
        return super().parse_args(ctx, args[:own])


def _engine(**more: Any) -> Any:
    """Arguments of `click.command` that all commands share."""
    return {
        "cls": _Launch,
        "context_settings": {"ignore_unknown_options": True},
        "options_metavar": "[OPTIONS] [OPTIONS OF run]",
        **more,
    }


@click.group()
def launch() -> None:
    """Start a job on the hosts of an engine, or print (--print) the script or objects that would start it.

    TASK and all other options are passed on to 'everstep run'. The engine starts hosts and replaces lost ones;
    the job goes on meanwhile.
    """


def launch_of(
    words: Sequence[str], hosts: int, slots: int, run_dir: Path | str, python: str, *, here: bool = True, name: str = ""
) -> Launch:
    """The launch that these words ask for. words: TASK and options of `everstep run`. here: the hosts see this host's
    files. name: for the engine, "" for a name made from the task's.

    Raises: ConfigError, click.UsageError for words that `everstep run` would refuse.
    """
    if not words or words[0].startswith("-"):
        raise ConfigError(
            "expected TASK and the options of 'everstep run', got " + (repr(words[0]) if words else "none")
        )
    taken = [word for word in words[1:] if word.partition("=")[0] in (*_OURS, "--dry-run")]
    if taken:
        raise ConfigError(f"{taken[0]}: expected none here, because launch sets it")
    if "--fresh" in words:
        raise ConfigError("--fresh: expected none here, because host 0 would start over at every restart")
    if not str(run_dir).isprintable():  # the name stands in lines of scripts
        raise ConfigError(f"--run-dir: expected a path of printable characters, got {str(run_dir)!r}")
    values = _values(words, files=here)
    head, _, tail = words[0].partition(":")
    stem = re.sub(r"[^a-z0-9]+", "-", Path(head).stem.lower()).strip("-")[:30] or "task"
    argv = click.get_current_context().meta[_ARGV]
    if argv and (tail or not head.endswith(".py")):
        raise ConfigError(f"only a script takes arguments of its own, got {' '.join(argv)!r} for task {words[0]!r}")
    interface = str(values.get("network.interface") or "")
    if not re.fullmatch(r"[\w.:-]*", interface, re.ASCII):  # it stands in lines of scripts
        raise ConfigError(f"network.interface: expected the name of an interface such as eth0, got {interface!r}")
    named, folder = name or f"everstep-{stem}", os.getcwd() if here else ""
    etcd = str(values.get("control.etcd") or "")
    if etcd:
        EtcdAddress.parse("control.etcd", etcd)
    paths = {name: values.get(f"control.{name}") for name in ("etcd_ca", "etcd_cert", "etcd_key")}
    files: dict[str, Any] = {name: str(Path(folder, str(path))) for name, path in paths.items() if path}
    asks = tuple(file_variables(ControlConfig(**files)).items()) if etcd else ()
    keys = [key for key in values if (key in STANDBYS_OWN if etcd else says_itself(key))]
    own = tuple(f"{key}={values[key]}" for key in keys if key != "security.token_file")
    more = (etcd, asks)
    return Launch(named, words[0], tuple(words[1:]), argv, hosts, slots, str(run_dir), python, own, folder, *more)


def _values(words: Sequence[str], *, files: bool) -> dict[str, Any]:
    """Config keys that these options of `everstep run` set. files: the config file is on this host.

    Raises: ConfigError, click.UsageError for options that `everstep run` would refuse.
    """
    given = run_command.make_context("everstep run", list(words)).params
    values = read_layers(said_layers(given["config_file"] if files else None, given["settings"]))
    parse(given["chaos"] or str(values.get("chaos") or ""))
    return values


_WORDS = click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="TASK", shell_complete=complete_task)
_HOSTS = click.option("--hosts", type=click.IntRange(1), required=True, help="Number of hosts.")
_SLOTS = click.option("--slots", type=click.IntRange(1), default=1, show_default=True, help="Workers on each host.")
_RUN_DIR = click.option(
    "--run-dir", type=click.Path(path_type=Path), required=True, help="Directory of the job, which all hosts see."
)
_PYTHON = click.option("--python", help="Interpreter on the hosts with Everstep installed (the one that runs this).")
_PRINT = click.option("--print", "only_print", is_flag=True, help="Print it and start nothing.")


@launch.command("slurm", **_engine())
@_WORDS
@_HOSTS
@_SLOTS
@_RUN_DIR
@_PYTHON
@_PRINT
@click.option("--sbatch", "extra", multiple=True, metavar="NAME=VALUE", help="Option for sbatch; may be repeated.")
@click.option(
    "--notice",
    "notice_s",
    type=click.IntRange(1, 65535),
    default=60,
    show_default=True,
    help="Seconds between Slurm's notice and the end of a host.",
)
def launch_slurm(
    words: tuple[str, ...],
    hosts: int,
    slots: int,
    run_dir: Path,
    python: str | None,
    only_print: bool,
    extra: tuple[str, ...],
    notice_s: int,
) -> int:
    """Submit TASK as a job array with an element per host. Lost and preempted hosts come back; the others go on."""
    for text in extra:
        if not re.fullmatch(r"[a-z][a-z-]+(=.+)?", text) or not text.isprintable():
            raise ConfigError(f"--sbatch: expected NAME=VALUE such as partition=gpu, got {text!r}")
        if text.partition("=")[0] in _OURS_OF_SBATCH:
            raise ConfigError(f"--sbatch {text}: expected none here, because launch sets it (--hosts, --notice)")
    run_dir = run_dir.resolve()
    spec = _local(words)
    text = slurm.script(launch_of(spec, hosts, slots, run_dir, python or _own_python()), extra, notice_s)
    if only_print:
        print(text, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise ConfigError("sbatch is not on the PATH here: submit where Slurm is, or --print the script")
    path = _prepare(run_dir, "slurm.sh", text)
    return _submit(["sbatch", "--parsable", str(path)], f"everstep status {run_dir}; scancel ends it")


@launch.command("k8s", **_engine())
@_WORDS
@_HOSTS
@_SLOTS
@click.option("--run-dir", default="", help="Directory below /runs, where the claim is mounted (/runs/<task>).")
@click.option("--python", default="python3", show_default=True, help="Interpreter in the image.")
@_PRINT
@click.option("--image", required=True, help="Image with Everstep and the task (deploy/Dockerfile).")
@click.option("--claim", default="", help="PersistentVolumeClaim that all pods mount at /runs (ReadWriteMany).")
@click.option("--once", is_flag=True, help="With --jobset: only the job's own pod mounts the claim (ReadWriteOnce).")
@click.option(
    "--disk", default="", help="Instead of --claim, with control.etcd: size of a disk for each pod, e.g. 50Gi."
)
@click.option("--cpus", default="", help="CPUs of each host, as Kubernetes writes them: 4, 500m (one per slot).")
@click.option("--memory", default="", help="Memory of each host, e.g. 16Gi (4Gi per slot).")
@click.option("--shm", default="", help="Size of /dev/shm of each host, part of its memory (2Gi per slot).")
@click.option("--gpus", type=click.IntRange(0), default=0, help="GPUs of each host.")
@click.option("--name", default="", help="Name of the objects (everstep-<task>).")
@click.option("--namespace", default="", help="Namespace of the objects.")
@click.option("--queue", default="", help="Queue of Kueue.")
@click.option("--jobset", is_flag=True, help="Make a JobSet instead of an Indexed Job.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=kubernetes.PORT,
    show_default=True,
    help="Port of the job in pod 0.",
)
@click.option(
    "--patch",
    type=click.Path(path_type=Path),
    help="YAML file with changes to the objects (strategic merge); kind Pod changes the pods.",
)
def launch_k8s(
    words: tuple[str, ...],
    hosts: int,
    slots: int,
    run_dir: str,
    python: str,
    only_print: bool,
    name: str,
    jobset: bool,
    patch: Path | None,
    **pods: Any,
) -> int:
    """Apply TASK as an Indexed Job with a pod per host, or print it. Lost pods come back; the others go on.

    The Secret with the job's token is applied, and never printed.
    """
    found = launch_of(words, hosts, slots, run_dir or "/runs/job", python or "python3", here=False, name=name)
    if not run_dir:
        found = found._replace(run_dir=f"/runs/{found.name}")
    parts = PurePosixPath(found.run_dir).parts
    if parts[:2] != ("/", "runs") or len(parts) < 3 or ".." in parts:
        raise ConfigError(f"--run-dir: expected a folder below /runs, where the claim is mounted, got {run_dir!r}")
    _check_objects(name=name, **pods)
    _check_volumes(found, jobset=jobset, **pods)
    if pods["disk"] and "checkpoint.object.url" not in _values(words, files=False):
        text = "warning: --disk: checkpoints and weights go with the pods, unless checkpoint.object.url is set"
        print(text, file=sys.stderr, flush=True)
    settings = kubernetes.Pods(**pods)
    made = (kubernetes.job_set if jobset else kubernetes.indexed_job)(found, settings)
    made = patched(made, _patches(patch)) if patch is not None else made
    if only_print:
        print(kubernetes.secret_words(found, settings) + kubernetes.to_yaml(made), end="")
        return 0
    token = given_token() or wire.new_token()
    text = kubernetes.to_yaml([kubernetes.secret(found, settings, token.hex()), *made])
    if shutil.which("kubectl") is None:
        raise ConfigError("kubectl is not on the PATH here: --print the objects, and apply them where it is")
    inside = f"-n {pods['namespace']} " if pods["namespace"] else ""
    hint = f"kubectl {inside}logs -f --max-log-requests {hosts} -l everstep/job={found.name}"
    return _submit(["kubectl", "apply", "-f", "-"], hint, text, token.hex())


def _check_volumes(launch: Launch, *, claim: str, once: bool, disk: str, jobset: bool, **others: Any) -> None:
    """Raises: ConfigError if the pods' volumes do not fit the job."""
    if bool(claim) == bool(disk):
        came = "both" if claim else "neither"
        raise ConfigError(f"--claim: expected it, a volume of all pods, or --disk, a disk for each, got {came}")
    if jobset and launch.etcd:
        raise ConfigError(
            "--jobset: expected no control.etcd with it: a JobSet fails with pod 0, even while another pod leads"
        )
    if once and not (claim and (jobset or launch.hosts == 1)):
        raise ConfigError("--once: expected --claim and --jobset with it: pods of an Indexed Job all mount the same")
    if disk and launch.hosts > 1 and not launch.etcd:
        raise ConfigError(
            "--disk: expected --set control.etcd=... with it, as otherwise the job is lost with the disk of pod 0; or "
            "use --claim"
        )


def _patches(path: Path) -> list[Any]:
    """Objects in a file. Raises: ConfigError if it cannot be read as YAML."""
    import yaml

    try:
        return [one for one in yaml.safe_load_all(read_given(path, links=True)) if one is not None]
    except OSError as error:
        raise ConfigError(f"--patch: cannot read {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--patch: expected YAML in {path}: {' '.join(str(error).split())[:200]}") from None


_NAME = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"
"""With the suffixes put behind it, the name is still a valid DNS label."""


def _check_objects(**pods: Any) -> None:
    """Raises: ConfigError for values that Kubernetes would refuse or misread."""
    label = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
    kinds = dict.fromkeys(("cpus", "memory", "disk", "shm"), r"\d+(\.\d+)?(m|[kMGTPE]i?)?")
    kinds |= dict.fromkeys(("namespace", "queue"), label) | {"claim": rf"{label}(\.{label})*", "name": _NAME}
    for key, kind in kinds.items():
        if pods[key] and not re.fullmatch(kind, pods[key]):
            like = (
                "4, 500m or 16Gi" if key in ("cpus", "memory", "disk", "shm") else "lower-case letters, digits, hyphens"
            )
            most = " (40 at most, a letter first)" if key == "name" else ""
            raise ConfigError(f"--{key}: expected {like}{most}, got {pods[key]!r}")
    if not re.fullmatch(r"[\w.:/@-]+", pods["image"]):
        raise ConfigError(f"--image: expected a name such as registry.example/everstep:1, got {pods['image']!r}")


@launch.command("ssh", **_engine())
@_WORDS
@click.option(
    "--hosts", required=True, help="Host names for ssh, separated by commas; the first host runs the job itself."
)
@_SLOTS
@_RUN_DIR
@_PYTHON
@_PRINT
@click.option("--address", metavar="IP", help="Address of the first host for the others (that of its name).")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=29400, show_default=True, help="Port of the job on the first host."
)
@click.option("--ssh", "ssh_options", multiple=True, metavar="OPTION", help="Option for ssh; may be repeated.")
def launch_ssh(
    words: tuple[str, ...],
    hosts: str,
    slots: int,
    run_dir: Path,
    python: str | None,
    only_print: bool,
    address: str | None,
    port: int,
    ssh_options: tuple[str, ...],
) -> int:
    """Run TASK on these hosts over ssh, and stay until it is over. Lost hosts are tried again.

    Ctrl-C ends the job in order. Interpreter (--python), task and --run-dir must have the same paths on all hosts.
    """
    names = [name.strip() for name in hosts.split(",")]
    wrong = [name for name in names if not re.fullmatch(r"([\w.-]+@)?[A-Za-z0-9][\w.:-]*", name)]
    if wrong or len(set(names)) < len(names):
        raise ConfigError(f"--hosts: expected different names for ssh, separated by commas, got {hosts!r}")
    found = launch_of(_local(words), len(names), slots, run_dir.resolve(), python or _own_python())
    where = canonical(address or _address_of(names[0]))
    if address is None and len(names) > 1 and is_loopback(where):
        raise ConfigError(f"--hosts: {names[0]} is {where} here, which no other host can reach: give its --address")
    try:
        ip_address(where)
    except ValueError:
        raise ConfigError(f"--address: expected an IPv4 or IPv6 address of the first host, got {where!r}") from None
    scripts = [ssh.remote_words(found, number, where, port) for number in range(len(names))]
    if only_print:
        for name, script in zip(names, scripts, strict=True):
            print(f"# {name} (its first line of input is the job's token)\n{script}")
        return 0
    token, start = given_token() or wire.new_token(), ssh.ssh(ssh_options)
    return ssh.SshHosts(names, scripts, token, start, bool(found.etcd), found.wait_s).run()


def _address_of(name: str) -> str:
    """Address of a host. Raises: ConfigError if no host of this name has one."""
    try:
        return found_at(name.rpartition("@")[2], 0)[0][1][0]
    except (OSError, UnicodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"--hosts: {name} has no IPv4 address here, nor IPv6 ({why}): give it by --address") from None


@launch.command("ray", **_engine())
@_WORDS
@_HOSTS
@_SLOTS
@_RUN_DIR
@_PYTHON
@_PRINT
@click.option(
    "--address", metavar="HOST:PORT", help="Address of the cluster (RAY_ADDRESS, or the cluster on this machine)."
)
@click.option("--gpus", type=click.IntRange(0), default=0, show_default=True, help="GPUs of each worker.")
def launch_ray(
    words: tuple[str, ...],
    hosts: int,
    slots: int,
    run_dir: Path,
    python: str | None,
    only_print: bool,
    address: str | None,
    gpus: int,
) -> int:
    """Run TASK on a Ray cluster, with an actor per node. The command stays until the end; lost nodes are replaced."""
    found = launch_of(_local(words), hosts, slots, run_dir.resolve(), python or "")
    if only_print:
        found = found._replace(python=found.python or _own_python())
        for number in range(hosts):
            print(shlex.join([*found.everstep, *ray_cluster.arguments(found, number, "ADDRESS:PORT", "ADDRESS")]))
        return 0
    token, where = given_token() or wire.new_token(), address or os.environ.get("RAY_ADDRESS")
    least = int(_values([found.task, *found.options], files=True).get("hosts.min", 1))
    return ray_cluster.start(found, token, where, gpus, least)


def _own_python() -> str:
    return own_command("everstep")[0]


def _local(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words with a task name that holds on all hosts of the file system. Raises: ConfigError if there is no such
    task."""
    if not words or words[0].startswith("-"):
        return words
    spec = parse_task(words[0])
    parse_task(spec.canonical)
    if spec.kind == "module" and not _is_there(spec.where.partition(".")[0]):
        raise ConfigError(f"task {words[0]!r}: there is no module {spec.where} here")
    return (spec.canonical, *words[1:])


def _is_there(package: str) -> bool:
    """Whether the package could be imported, as `everstep run` would; nothing is imported."""
    return PathFinder.find_spec(package, [*sys.path, os.getcwd()]) is not None


def _prepare(run_dir: Path, name: str, text: str) -> Path:
    """Write the files to submit, and the job's token: the given one, or a new one if there is none yet. Hosts that come
    again need the same token."""
    folder, token = run_dir / "launch", given_token()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        close_folder(folder)
        close_run_dir(run_dir)
        if token is not None or not (run_dir / TOKEN_FILE).exists():
            wire.write_token(run_dir / TOKEN_FILE, token or wire.new_token())
        write_atomically(folder / name, text, 1)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}") from None
    return folder / name


def _submit(command: list[str], hint: str, given: str = "", hidden: str = "") -> int:
    ended = subprocess.run(command, input=given, capture_output=True, text=True, env=_without_launcher())
    if ended.returncode:
        said = " ".join((ended.stderr or ended.stdout).split())[:500]
        said = said.replace(hidden, "(the token)") if hidden else said
        raise ConfigError(f"{command[0]} refused it: {said or f'exit code {ended.returncode}'}")
    print(f"submitted as {' '.join(ended.stdout.split())}; {hint}")
    return 0


def _without_launcher() -> dict[str, str]:
    """Environment without the engine's variables, so that a submission from within a job of the engine works alike."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))} | {
        name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ
    }
