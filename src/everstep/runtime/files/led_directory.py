"""The directory in which a coordinator would lead the job: whether it is still the job's, and complete."""

from __future__ import annotations

import os
import time
from pathlib import Path

from everstep.observe.events import say
from everstep.runtime.files.host_directory import leave_word, new_word, word_in, word_of
from everstep.runtime.files.standby_files import CopyLink, DirectoryCopy
from everstep.runtime.link.tls import Tls

MOVED = 5
"""Exit code of a coordinator whose directory is no longer the job's, because another host leads the job in its own."""


class LedDirectory:
    """The directory in which a coordinator would lead. word: the one by which it is known. It becomes stale, and never
    leads again, once another host leads in a directory of its own."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.word = word_of(run_dir)

    def saw(self, word: str) -> None:
        """A coordinator leads now, in the directory with this word; "" if it does not say."""
        if word and word not in (self.word, word_in(self._run_dir)):
            say(f"another host leads the job, in a directory of its own: {self._run_dir} is out of date")
            os._exit(MOVED)

    def may_lead(self) -> bool:
        """Whether this host may take the lease now."""
        return True

    def taken(self, checkpoints: str | None) -> str:
        """This host leads from now on. Returns words about files that it may lack. checkpoints: as `leave_word` has it.

        Raises: OSError.
        """
        return ""


class CopiedDirectory(LedDirectory):
    """A directory that the leading head fills until this host leads. lease_s: time that a lease outlives its holder."""

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
    """Directory that a coordinator would lead in. copying_host: as `Succession` has it. A copy in which the job was led
    before is the job's directory like any other. Raises: OSError."""
    if copying_host and not word_of(run_dir):
        return CopiedDirectory(run_dir, token, copying_host, tls, lease_s)
    return LedDirectory(run_dir)
