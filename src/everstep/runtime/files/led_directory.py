"""The directory that a coordinator would lead the job in: whether it still is the job's, and complete."""

from __future__ import annotations

import os
import time
from pathlib import Path

from everstep.observe.events import say
from everstep.runtime.files.host_directory import leave_word, new_word, word_in
from everstep.runtime.files.standby_files import CopyLink, DirectoryCopy
from everstep.runtime.link.tls import Tls

MOVED = 5
"""Exit code of a coordinator whose directory is not the job's any more, as another host leads it in its own."""


class LedDirectory:
    """The directory that a coordinator would lead in. word: by which it is known. Whose it is not any more, as another
    host leads in one of its own, never leads again: it is stale."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.word = word_in(run_dir)

    def saw(self, word: str) -> None:
        """Somebody leads now, in the directory that this is the word of; "" if it is not said."""
        if word and word not in (self.word, word_in(self._run_dir)):
            say(
                f"another host leads the job, in a directory of its own: what is in {self._run_dir} is of before; "
                "everstep agent --join etcd://... --standby takes part again, and catches up"
            )
            os._exit(MOVED)

    def may_lead(self) -> bool:
        """Whether this host may take the lease now."""
        return True

    def taken(self, checkpoints: str | None) -> str:
        """This host leads from now on. Returns what its files may lack, in words. checkpoints: as `leave_word` has it.

        Raises: OSError."""
        return ""


class CopiedDirectory(LedDirectory):
    """A directory that is filled by whoever leads, until this host does. lease_s: so long a lease outlives a holder."""

    def __init__(self, run_dir: Path, token: bytes, host: str, tls: Tls | None, lease_s: float) -> None:
        super().__init__(run_dir)
        self._lease_s = lease_s
        self.word = new_word()
        self._link = CopyLink(run_dir, token, host, tls)
        self._led_s = time.monotonic()

    def saw(self, word: str) -> None:
        self._led_s = time.monotonic()

    def may_lead(self) -> bool:
        return self._link.state().may_lead(self._led_s, time.monotonic())

    def taken(self, checkpoints: str | None) -> str:
        self._link.close()
        words = self._link.state().words(self._led_s - self._lease_s)
        DirectoryCopy(self._run_dir).fall_back()
        leave_word(self._run_dir, checkpoints, self.word)
        return words


def led_directory(run_dir: Path, copying_host: str, token: bytes, tls: Tls | None, lease_s: float) -> LedDirectory:
    """copying_host: as `Succession` has it. One that has been led in is the job's directory like any other."""
    if copying_host and not word_in(run_dir):
        return CopiedDirectory(run_dir, token, copying_host, tls, lease_s)
    return LedDirectory(run_dir)
