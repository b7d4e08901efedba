"""Hosts that stand by: which directory they may go on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.base.errors import ConfigError
from everstep.cli import standby
from everstep.runtime.places import leave_word


def test_a_directory_of_the_same_name_on_another_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there is of another job, or a copy."""
    monkeypatch.setattr(standby, "_SHARED_S", 0.0)
    leave_word(tmp_path, None, "ab" * 16)
    standby._check_shared(tmp_path, "ab" * 16)
    for found in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="or join without --standby") as caught:
            standby._check_shared(found, "cd" * 16)
        assert "\n" not in str(caught.value) and str(found) in str(caught.value)
