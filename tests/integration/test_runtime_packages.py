"""A fork server imports the packages of a script once, and begins anew without those that no fork may share."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from everstep.runtime.host.fork_server_client import EarlyForkServer, ForkEnded

MODULES = {
    "clean_package": "what = 1",
    "threaded_package": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
    "opening_package": "import os\nkept = os.open('/dev/null', os.O_RDONLY)",
    "random_package": "import random\nrandom.random()",
    "leaving_package": "raise SystemExit('not here')",
    "package_probe": "import os, sys\ndef answer(name): return [name in sys.modules, os.getppid()]",
}


@pytest.mark.parametrize(
    ("names", "there"),
    [
        (["clean_package:what"], True),
        (["clean_package:nothing_of_it"], True),
        (["leaving_package:", "clean_package:"], True),
        (["clean_package:", "threaded_package:"], False),
        (["opening_package:", "clean_package:"], False),
        (["random_package:", "clean_package:"], False),
    ],
)
def test_packages_are_imported_before_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], there: bool
) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with contextlib.closing(EarlyForkServer(1, ("json",))) as server:
        server.start()
        server.import_packages(names)
        known, pid = server.call("package_probe:answer", "clean_package")
        assert known is there
        assert server.call("package_probe:answer", "clean_package")[1] == pid


def test_a_server_that_is_started_again_knows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with contextlib.closing(EarlyForkServer(1, ())) as server:
        server.import_packages(["clean_package:"])
        server.start()
        assert server.call("package_probe:answer", "clean_package") is not None
        assert server.call("package_probe:answer", "clean_package")[0]


def test_a_package_whose_import_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless_package.py").write_text("import threading\nthreading.Event().wait()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with contextlib.closing(EarlyForkServer(1, ("json",))) as server:
        server.import_packages(["endless_package:"])
        with pytest.raises(ForkEnded, match="imports took all the time"):
            server.call("json:loads", "1", time.monotonic())
