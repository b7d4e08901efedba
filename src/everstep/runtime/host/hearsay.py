"""A host's search for the job's head by way of other hosts' agents, or of the shared directory.

For a host that reaches neither the head that it knew nor etcd, but reaches hosts that have found the next head.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from everstep.base.errors import EverstepError
from everstep.runtime.files.agent_files import AgentFiles
from everstep.runtime.host.agent_link import AgentLink, Secrets
from everstep.runtime.lead.finding import Finder, Where, among
from everstep.runtime.link.address import read_address
from everstep.runtime.link.tls import Tls

_ASKED = 2
"""Agents asked at once, so that one which is gone as well costs no time."""


class Hearsay:
    """Keeps `path`, which processes of this host alone follow, up to date while the agent misses the head.

    shared: the job's own file with it, None if this host does not see that. An address counts if a coordinator proves
    the job's token there.
    """

    def __init__(
        self, path: Path, link: AgentLink, files: AgentFiles, secrets: Secrets, shared: Path | None = None
    ) -> None:
        self._path, self._shared, self._files = path, shared, files
        self._token, self._tls = secrets.token, Tls.of(secrets.shown)
        self._pool = ThreadPoolExecutor(_ASKED, thread_name_prefix="hearsay")
        self._finder = Finder(path, self._look, link.misses_head, link.client.follow)

    def close(self) -> None:
        self._finder.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> Where | None:
        known = read_address(self._path)
        others = self._files.agents_elsewhere(known.host)
        heard = self._pool.map(self._ask, random.sample(others, min(_ASKED, len(others))))
        for told in (self._in_directory(), *heard):
            if told is None or told == (known.host, known.port):
                continue
            found = among([told], self._token, self._tls)
            if found is not None:
                return {**found, "tls": known.tls, "ca": known.ca}
        return None

    def _in_directory(self) -> tuple[str, int] | None:
        if self._shared is None:
            return None
        try:
            found = read_address(self._shared)
        except (OSError, EverstepError):
            return None
        return found.host, found.port

    def _ask(self, address: str) -> tuple[str, int] | None:
        try:
            return self._files.ask_for_head(address)
        except (EverstepError, OSError):
            return None
