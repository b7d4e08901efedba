"""Test files in several processes: `pytest --forks 3`.

One process imports and collects everything; its forks take file after file. With xdist each process would import and
collect all of it. Nothing that is imported may have started threads.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import warnings
from collections.abc import Iterator
from itertools import pairwise
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest

from everstep.runtime.process import die_with_parent

PATIENCE_S = 60.0
"""For a fork that was interrupted: it ends what its fixtures have started."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="number of processes among which files are divided")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count, option = session.config.getoption("--forks"), session.config.option
    if not count or option.collectonly or session.testsfailed:
        return None
    files: dict[str, list[pytest.Item]] = {}
    for item in session.items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    Forks(session, list(files.values()), count).run()
    return True


class Forks:
    """The processes, and what they tell."""

    def __init__(self, session: pytest.Session, files: list[list[pytest.Item]], count: int) -> None:
        self._session = session
        self._hook = session.config.hook
        self._begun: dict[int, str] = {}
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"what was imported has started {len(threads) - 1} threads, which no fork has"
        folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        left, numbers = os.pipe()
        os.write(numbers, b"".join(number.to_bytes(2) for number in range(len(files))))
        os.close(numbers)
        self._ways: dict[Connection, int] = {}
        parent = os.getpid()
        for number in range(count):
            ours, theirs = Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                die_with_parent(parent)
                _be_fork(session, files, left, theirs, folder / f"fork{number}")
            theirs.close()
            self._ways[ours] = pid
        os.close(left)

    def run(self) -> None:
        """Until all have ended."""
        ends = {os.pidfd_open(pid): way for way, pid in self._ways.items()}
        try:
            while self._ways:
                ready = wait([*self._ways, *ends])
                for way in [one for one in ready if isinstance(one, Connection)]:
                    self._hear(way)
                for end in [one for one in ready if isinstance(one, int)]:
                    self._gone(ends.pop(end))
                    os.close(end)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)
        finally:
            for pid in self._ways.values():
                os.kill(pid, signal.SIGINT)
            for end in ends:
                wait([end], PATIENCE_S)
            for pid in self._ways.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _hear(self, way: Connection) -> bool:
        """False: nothing will come any more."""
        try:
            kind, said = way.recv()
        except EOFError:
            return False
        pid = self._ways[way]
        if kind == "report":
            self._hook.pytest_runtest_logreport(
                report=self._hook.pytest_report_from_serializable(config=self._session.config, data=said)
            )
        elif kind == "warning":
            self._hook.pytest_warning_recorded.call_historic(kwargs=said)
        else:
            nodeid, location = said
            self._begun[pid] = nodeid if kind == "begins" else ""
            which = self._hook.pytest_runtest_logstart if kind == "begins" else self._hook.pytest_runtest_logfinish
            which(nodeid=nodeid, location=location)
        return True

    def _gone(self, way: Connection) -> None:
        while way.poll() and self._hear(way):
            pass
        pid = self._ways.pop(way)
        code, nodeid = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), self._begun.get(pid, "")
        if code or nodeid:
            words = f"the process that ran this test ended with {code}"
            report = pytest.TestReport(nodeid or f"fork {pid}", ("", None, ""), {}, "failed", words, "call")
            self._hook.pytest_runtest_logreport(report=report)


def _be_fork(session: pytest.Session, files: list[list[pytest.Item]], left: int, way: Connection, folder: Any) -> None:
    """Take files until none is left. Never returns."""
    code, config = 1, session.config
    try:
        random.seed()
        os.environ["PYTEST_XDIST_WORKER"] = folder.name
        folder.mkdir()
        config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are those of all forks
        capture.start_global_capturing()
        capture.suspend_global_capture()
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(Teller(config, way))
        # The next one is known before the last one of a file ends: what they share is kept.
        for item, following in pairwise(_taken(files, left)):
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        code = 0
    except KeyboardInterrupt:
        session._setupstate.teardown_exact(None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _taken(files: list[list[pytest.Item]], left: int) -> Iterator[pytest.Item | None]:
    while number := os.read(left, 2):
        yield from files[int.from_bytes(number)]
    yield None


class Teller:
    """Tells the parent what is to be shown."""

    def __init__(self, config: pytest.Config, way: Connection) -> None:
        self._config = config
        self._way = way

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._way.send(("begins", (nodeid, location)))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._way.send(("ends", (nodeid, location)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._way.send(("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report)))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        one = warning_message
        plain = warnings.WarningMessage(str(one.message), one.category, one.filename, one.lineno)
        where = {"when": when, "nodeid": nodeid, "location": location}
        self._way.send(("warning", {"warning_message": plain, **where}))
