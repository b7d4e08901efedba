"""Notices: a command, or a web address, is told of chosen events (`notify.*`).

A sink like the others, so in a process of its own: it tells events in order, tries again, and never gets in the way of
training. Delivered notices are kept in `DIR/notify`, so that a new try repeats none. Their number is bounded: of a
storm of events, the first ones are told, and then a count of the rest; the end of a job is always told. The address of
a webhook is a secret: it comes from the environment alone, and no message, file or page shows it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from everstep.base.below import write_atomically
from everstep.base.config_fields import SECRET_VARIABLES
from everstep.base.config_keys import NotifyConfig
from everstep.base.errors import ConfigError
from everstep.base.given import read_json
from everstep.report.words import Event, as_dict, cause, known, one_line, reason_text, whole_number
from everstep.runtime.host.bound import bound_command
from everstep.sinks.sink import Sink, SinkFailed, SinkJob

_DELIVERED_FILE = "delivered.json"
_AT_ONCE = 10
_HOURLY = 60
_HOUR_S = 3600.0
_STALE_S = 3600.0
_STALE_END_S = 7 * 86400.0
_PAUSES_S = (0.0, 0.5, 2.0)
_REFUSED = tuple(f"the server answered {code}" for code in (400, 413, 422))
"""Errors that are about one notice, which is left out."""
_REMEMBERED = 512
_MOST_BYTES = 1 << 16
_PLAIN = str.maketrans("<>", "‹›")  # chats take <...> for links and mentions
_ENDS = ("job_failed", "job_completed")
_NO_FAILURES = ("busy", "regrouped")
Notice = dict[str, Any]


def check_notify(config: NotifyConfig) -> None:
    """Check the settings of notices. Raises: ConfigError, one line without secrets, if they cannot be sent."""
    if config.command is not None:
        words = _words(config.command)
        if shutil.which(words[0]) is None:
            raise ConfigError(
                f"notify.command: expected a program that can be run, found no {words[0]!r}: give its path"
            )
    if config.webhook is not None:
        _address(config.webhook)


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"notify.command: {str(error).lower()}: write it as in a shell") from None
    if not words:
        raise ConfigError(
            "notify.command: expected a program and its arguments, got nothing: give e.g. notify.command=mail.sh"
        )
    return words


def _address(variable: str) -> str:
    """Address in an environment variable. Raises: ConfigError, which does not show it."""
    url = os.environ.get(variable, "").strip()
    if not url:
        raise ConfigError(f"notify.webhook: expected an address in the environment variable {variable}, it is not set")
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"notify.webhook: expected https://HOST/... in {variable}, it holds something else")
    return url


class Notices(Sink):
    """Sends notices of chosen events. sleep, clock: for tests."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.time) -> None:
        self._sleep, self._clock = sleep, clock
        self._ways: list[tuple[str, Callable[[Notice], str]]] = []
        self._wanted: frozenset[str] = frozenset()
        self._timeout_s = 20.0
        self._waiting: list[Notice] = []
        self._told: deque[str] = deque(maxlen=_REMEMBERED)
        self._lately: deque[float] = deque(maxlen=_HOURLY)
        self._left_out: Counter[str] = Counter()
        self._file = Path()
        self._about: Notice = {}

    def begin(self, run: SinkJob, config: Mapping[str, Any]) -> None:
        """Take the rules, and the notices that an earlier process has delivered. Raises: ConfigError."""
        rule = as_dict(config.get("notify"))
        self._wanted = frozenset(map(str, rule.get("events") or ()))
        timeout_s = rule.get("timeout_s")
        self._timeout_s = float(timeout_s) if isinstance(timeout_s, int | float) else self._timeout_s
        if rule.get("command"):
            words = _words(str(rule["command"]))
            self._ways.append(("notify.command", lambda notice: self._run(words, notice)))
        if rule.get("webhook"):
            url = _address(str(rule["webhook"]))
            self._ways.append(("notify.webhook", lambda notice: self._post(url, notice)))
        self._file = run.folder / _DELIVERED_FILE
        with contextlib.suppress(OSError, ValueError):
            told = as_dict(read_json(self._file, _MOST_BYTES, 1)).get("told")
            self._told.extend(str(one)[:200] for one in (told if isinstance(told, list) else []))
        self._about = {
            "run": run.name,
            "run_dir": str(run.run_dir.resolve()),
            "task": run.task,
            "host": os.uname().nodename,
        }

    def event(self, step: int, text: str, event: Event) -> None:
        kind = str(event["kind"])
        why = str(event.get("cause"))
        if kind not in self._wanted or (kind == "checkpoint_failed" and why in _NO_FAILURES):
            return
        time_ns = whole_number(event.get("time_unix_ns"))
        if self._clock() - time_ns / 1e9 > (_STALE_END_S if kind in _ENDS else _STALE_S):
            return  # too old to wake anybody
        why_then = {"cause": cause(event), "reason": reason_text(event.get("reason"))}
        said = {"event": kind, "text": f"{self._about['run']}: {one_line(text)}", "step": step, **why_then}
        said["worker_id"] = known(event.get("worker_id"))
        notice = {**said, "time_unix_ns": time_ns, **self._about}
        if _key(notice) not in self._told:
            self._waiting.append(notice)

    def flush(self) -> None:
        """Deliver all that wait. A way that fails holds up no other. Raises: SinkFailed, after all others."""
        failed: dict[str, str] = {}
        again: list[Notice] = []
        while self._waiting and (not failed or len(failed) < len(self._ways)):
            notice, took = self._next(), False
            if notice is None:
                break
            for way, deliver in self._ways:
                key = f"{way} {_key(notice)}"
                if key in self._told or way in failed:
                    continue
                why = self._deliver(deliver, notice)
                if why in _REFUSED:
                    self._left_out[notice["event"]] += 1  # the next one says so
                elif why:
                    failed[way] = why
                    continue
                took = True
                self._told.append(key)
                self._remember()
            self._waiting.pop(0)
            if took:
                self._lately.append(self._clock())
            if failed:
                again.append(notice)
            else:
                self._told.append(_key(notice))
                self._remember()
        self._waiting = again + self._waiting
        for way, why in failed.items():
            raise SinkFailed(f"{way} did not take a notice: {why}")

    def _next(self) -> Notice | None:
        """The next notice; if there are too many, one that stands for the rest."""
        now_s = self._clock()
        if len(self._lately) == _HOURLY and now_s - self._lately[0] < _HOUR_S:
            self._waiting = self._leave_out(self._waiting)
            return self._waiting[0] if self._waiting else None
        newest, rest = self._waiting[-1], []
        if len(self._waiting) > _AT_ONCE:
            rest = self._leave_out(self._waiting[_AT_ONCE - 1 :])
            del self._waiting[_AT_ONCE - 1 :]
        if self._left_out:
            counted = ", ".join(f"{count} x {kind}" for kind, count in sorted(self._left_out.items()))
            self._left_out.clear()
            text = f"{self._about['run']}: and more, which are not told one by one: {counted}"
            self._waiting.append({**newest, "event": "more", "text": text})
        self._waiting += rest
        return self._waiting[0]

    def _leave_out(self, notices: list[Notice]) -> list[Notice]:
        """Count these instead of telling them, but for the ends of jobs, which are returned."""
        self._left_out.update(notice["event"] for notice in notices if notice["event"] not in _ENDS)
        return [notice for notice in notices if notice["event"] in _ENDS]

    def _deliver(self, deliver: Callable[[Notice], str], notice: Notice) -> str:
        """Deliver a notice, in several tries; returns "", or the last error."""
        why = ""
        for pause_s in _PAUSES_S:
            self._sleep(pause_s)
            why = deliver(notice)
            if not why or why in _REFUSED:
                break
        return why

    def _remember(self) -> None:
        write_atomically(self._file, json.dumps({"told": list(self._told)}), 1, make=True)

    def _run(self, words: list[str], notice: Notice) -> str:
        """Run the command with the notice on its standard input; returns "" on success, else the error."""
        env = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
        env |= {"EVERSTEP_EVENT": notice["event"], "EVERSTEP_TEXT": notice["text"], "EVERSTEP_RUN": notice["run"]}
        try:
            process = subprocess.Popen(
                bound_command(*words),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return f"{words[0]!r} cannot be run: {getattr(error, 'strerror', None) or type(error).__name__}"
        try:
            process.communicate(json.dumps(notice).encode() + b"\n", timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            return f"{words[0]!r} took longer than {self._timeout_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # and all processes that it has started
            process.wait()
        return f"{words[0]!r} ended with {process.returncode}" if process.returncode else ""

    def _post(self, url: str, notice: Notice) -> str:
        """Post the notice as JSON; `text` is the field that chats show. Returns "", or the error without the
        address."""
        headers = {"content-type": "application/json", "user-agent": "everstep"}
        said = {**notice, "text": notice["text"].translate(_PLAIN)}
        request = urllib.request.Request(url, json.dumps(said).encode(), headers, method="POST")
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=self._timeout_s) as answer:
                answer.read(1024)
        except urllib.error.HTTPError as error:
            return f"the server answered {error.code}"
        except Exception as error:  # any error text may hold the address
            reason = getattr(error, "reason", error)
            return f"the server cannot be reached: {type(reason).__name__}"
        return ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a notice goes to its address, or nowhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _key(notice: Notice) -> str:
    """Key that identifies a notice."""
    return f"{notice['time_unix_ns']} {notice['event']} {notice['worker_id']}"
