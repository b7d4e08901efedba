"""Processes that run beside a job: the servers of `run --dashboard` and `--metrics`, and the job's sinks.

They are apart so that no browser, scraper, library or network can hold up the job. They end with it; a sink first
delivers the job's last event.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from everstep.base.below import APPEND, open_below, write_atomically
from everstep.base.config import Config
from everstep.base.config_keys import NOTICES, NotifyConfig
from everstep.base.doors import at_port, split_at_port
from everstep.base.errors import ConfigError
from everstep.runtime.host.bound import bound_command
from everstep.runtime.link.address import METRICS_FILE, METRICS_TOKEN_FILE
from everstep.runtime.process import own_command
from everstep.runtime.targets import put_target

ANY_PORT = "127.0.0.1:0"
NOTIFY_VARIABLE = "EVERSTEP_NOTIFY"
"""Variable in which a job gives `notify` settings to the process that sends its notices."""
_PUBLIC = {True: ["--public"], False: []}
PUBLIC_HELP = "Anyone who reaches the port may read without the token."
_SINK_WORDS_S = 15.0


def check_installed(what: str) -> None:
    """Raises: ConfigError if the servers cannot run here. what: the option that needs them, for the message."""
    for name in ("starlette", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"{what} needs {name}: pip install 'everstep[dashboard]'")


def check_metrics(listen: str | None, public: bool = False) -> None:
    """Raises: ConfigError if metrics are wanted and must not be served at this address."""
    if listen is None:
        return
    check_installed("metrics.listen")
    host, _ = parse_listen("metrics.listen", listen)
    if public:
        return
    from everstep.dashboard.guard import checked_token

    checked_token(host, _given_token(), "set EVERSTEP_METRICS_TOKEN")


def _given_token() -> str | None:
    return os.environ.get("EVERSTEP_METRICS_TOKEN") or None


def parse_listen(name: str, text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. An IPv6 address is in brackets; port 0 is any free port.

    Raises: ConfigError naming the option.
    """
    try:
        host, port = split_at_port(text.strip())
    except ValueError:
        host, port = "", 0
    if not host or any(c.isspace() or c in "/[]" for c in host):
        raise ConfigError(f"{name}: expected HOST:PORT like 127.0.0.1:9400, port 0 to 65535, got {text!r}")
    return host, port


@contextlib.contextmanager
def dashboard_beside(run_dir: Path, wanted: bool, public: bool = False) -> Iterator[str]:
    """Serve a dashboard over `run_dir` while the block lasts; yields its address, "" if none is wanted.

    public: readers need no token.
    """
    if not wanted:
        yield ""
        return
    with _beside(["dashboard", str(run_dir), *_PUBLIC[public]]) as (address, why):
        yield address or f"could not be started: {why}"


@contextlib.contextmanager
def metrics_beside(run_dir: Path, listen: str | None, public: bool = False) -> Iterator[str]:
    """Serve the metrics at `listen` while the block lasts. The run directory and its parent folder get a file for
    Prometheus' file_sd that names the address. The folder's names it until `put_target` takes it away: an alert tells
    of a job that is named and serves nothing. Yields the address, with the file that holds the token for scrapers if
    the job made that token."""
    if listen is None:
        yield ""
        return
    path = run_dir / METRICS_FILE
    kept = "" if public or _given_token() else f" (credentials_file for Prometheus: {run_dir / METRICS_TOKEN_FILE})"
    with _beside(["metrics", str(run_dir), "--listen", listen, *_PUBLIC[public]]) as (address, why):
        try:
            if address:
                with contextlib.suppress(OSError):
                    write_atomically(path, json.dumps([_target(address, run_dir)]))
                put_target(run_dir, _target(address, run_dir))
            yield f"{address}{kept}" if address else f"could not be started: {why}"
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _target(address: str, run_dir: Path) -> dict[str, Any]:
    """Entry of file_sd with the address of the metrics."""
    url = urlsplit(address)
    everywhere = url.hostname in ("0.0.0.0", "::")
    place = at_port(os.uname().nodename, url.port or 0) if everywhere else url.netloc
    return {"targets": [place], "labels": {"run": run_dir.resolve().name}}


@contextlib.contextmanager
def _beside(argv: list[str]) -> Iterator[tuple[str, str]]:
    """Run a command that prints its address; yields (address, reason); the address is "" if the command failed."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            bound_command(*own_command("everstep", *argv)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            address = process.stdout.readline().strip() if process.stdout is not None else ""
            errors.seek(0)
            said = "" if address else errors.read(10_000)
            yield address, said.strip().rpartition("\n")[2].removeprefix("error: ") or "it said nothing"
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.communicate()


def told(config: Config) -> tuple[str, ...]:
    """Names of the sinks of this job; notices are one of them if the config asks for any."""
    wanted = config.notify.events and (config.notify.command or config.notify.webhook)
    return (*config.sinks, NOTICES) if wanted else config.sinks


@contextlib.contextmanager
def sinks_beside(run_dir: Path, config: Config, tell: Callable[[str], None]) -> Iterator[None]:
    """Publish the job to its sinks while the block lasts, and deliver the rest at its end.

    tell: shows a line to the user, for a sink that lacks some events.
    """
    processes: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
    try:
        for name in told(config):
            log = run_dir / "logs" / f"sink-{name}.log"
            try:
                processes.append((name, log, _start_sink(run_dir, name, log, config.notify)))
            except OSError as error:
                tell(f"{name} could not be started: {error.strerror or error}; {again(run_dir, name, config.notify)}")
        yield
    finally:
        for _, _, process in processes:
            if process.stdin is not None:
                process.stdin.close()  # it ends when it has delivered the rest
        end_s = time.monotonic() + _SINK_WORDS_S
        for name, log, process in processes:
            try:
                code = process.wait(max(0.1, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if code:
                tell(f"{name} has not received everything: {again(run_dir, name, config.notify)} does the rest ({log})")


def again(run_dir: Path, name: str, notify: NotifyConfig) -> str:
    """The command that sends a sink the events that it lacks."""
    words = ["everstep", "publish", str(run_dir), "--to", name]
    if name == NOTICES:
        said = {"notify.command": notify.command, "notify.webhook": notify.webhook}
        words += [word for key, value in said.items() if value is not None for word in ("--set", f"{key}={value}")]
    return shlex.join(words)


def _start_sink(run_dir: Path, name: str, log: Path, notify: NotifyConfig) -> subprocess.Popen[bytes]:
    command = own_command("everstep", "publish", str(run_dir), "--to", name, "--beside")
    environment = {**os.environ, **({NOTIFY_VARIABLE: json.dumps(asdict(notify))} if name == NOTICES else {})}
    with os.fdopen(open_below(log, APPEND, 1, make=True), "ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True, env=environment
        )
