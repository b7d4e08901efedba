"""Which code this process has imported: the user's own source files by content, installed packages by version.

A file is the user's if `reachable.of_user` says so: in any folder but Python's own, site-packages and Everstep's. So
are packages that are installed as editable, also where a link in site-packages leads to them. Compiled modules are not
looked at.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
from contextlib import suppress
from importlib import metadata
from types import ModuleType
from typing import Any

from everstep.base.given import read_given
from everstep.protocol.identity import MOST_FILES, MOST_PACKAGES, Code
from everstep.script.first_imports import SHARED_PACKAGES
from everstep.script.reachable import of_user

_OWN = __name__.partition(".")[0]
_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


FilesRead = dict[str, tuple[Any, str]]
"""By module: the spec that it was imported with (a reload uses another), and the digest of its file at that time."""


def code_here(read: FilesRead | None = None) -> Code:
    """All code that is imported so far. read: files known before are not read again: if one has been edited since,
    this process still runs the old content."""
    read = {} if read is None else read
    files: dict[str, str] = {}
    packages: dict[str, str] = {}
    for name, module in sorted(sys.modules.items()):
        plain = type(module) is ModuleType  # to ask those with a __getattr__ takes long
        path = vars(module).get("__file__") if plain else getattr(module, "__file__", None)
        top = name.partition(".")[0]
        if not isinstance(path, str) or top in (_OWN, "__mp_main__"):
            continue
        path = _without_links(path)
        if "site-packages" in path or "dist-packages" in path:
            if top == name and len(packages) < MOST_PACKAGES:
                packages |= {top[:100]: version} if (version := _version(top)) else {}
        elif path.endswith(".py") and not path.startswith(_STANDARD) and len(files) < MOST_FILES and of_user(path):
            with suppress(OSError, ValueError):
                files[_file_of(name, path)] = _digest(name, path, read)
    return Code(files, packages)


def _digest(name: str, path: str, read: FilesRead) -> str:
    spec = getattr(sys.modules[name], "__spec__", None)
    known = read.get(name)
    if known is None or known[0] is not spec:
        known = read[name] = spec, hashlib.sha256(read_given(path, links=True)).hexdigest()[:16]
    return known[1]


def _without_links(path: str) -> str:
    """Where a package really is that lies in site-packages; its files alone may be links (to a cache)."""
    folder, _, file = path.rpartition("/")
    return f"{_real(folder)}/{file}" if "-packages" in path else path


@functools.cache
def _real(folder: str) -> str:
    above, _, name = folder.rpartition("/")
    return os.path.realpath(folder) if not above or os.path.islink(folder) else f"{_real(above)}/{name}"


def _file_of(name: str, path: str) -> str:
    """Name of a module's file, wherever its folder is."""
    if name == "__main__":
        return os.path.basename(path)[:200]
    return f"{name.replace('.', '/')}{'/__init__' * path.endswith('__init__.py')}.py"[-200:]


@functools.cache
def _version(name: str) -> str:
    """Version of the installed package that is imported by this name; "" if it has none."""
    said = vars(sys.modules[name]).get("__version__")  # nothing of it is run
    with suppress(metadata.PackageNotFoundError):
        if not isinstance(said, str):
            said = metadata.version(name)
        elif name in SHARED_PACKAGES and said != (installed := metadata.version(name)):
            said = f"{said}, beside {installed} on the disk"
    return str(said)[:100] if isinstance(said, str) else ""


class LateImports:
    """Imports after the first report."""

    def __init__(self) -> None:
        self._read: FilesRead = {}
        self._modules = 0
        self._told = Code()

    def all(self) -> Code:
        """To be told of everything, now."""
        self._modules, self._told = len(sys.modules), code_here(self._read)
        return self._told

    def more(self) -> Code | None:
        """Imports since the last report; None if there are none. To ask costs next to nothing."""
        if len(sys.modules) == self._modules:
            return None
        before = self._told
        more = self.all().beyond(before)
        return more if more.files or more.packages else None
