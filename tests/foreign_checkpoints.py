"""Checkpoints as somebody prepares them who means harm: every digest is right, and what they say is not ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint_saving import make_state, save
from everstep.checkpoint.names import manifest_name
from everstep.checkpoint.pointers import seal
from everstep.exact.digest import digest_bytes
from everstep.exact.image import FORMAT, sealed

Body = dict[str, Any]
ESCAPE = "../../../uvloop.py"
PART = "step-0000000001/part-s0-w0-g1.safetensors"


def body_of(folder: Path, step: int = 1) -> Body:
    """What a manifest says."""
    body: Body = json.loads((folder / manifest_name(step)).read_text())["body"]
    return body


def text_of(body: Body, version: int = FORMAT) -> bytes:
    """The manifest that says this, with digests that are right."""
    state = body.get("state")
    if isinstance(state, dict):
        body = {**body, "state": sealed({key: value for key, value in state.items() if key != "digest"})}
    return seal("checkpoint", body, version)


def signed(body: bytes) -> bytes:
    """The manifest whose body is this text, be it what it may."""
    digest = digest_bytes(b"checkpoint %d\n" % FORMAT + body)
    return b'{"everstep_checkpoint":%d,"digest":"%s","body":\n%s}\n' % (FORMAT, digest.encode(), body)


def prepare(folder: Path, change: Callable[[Body], None], step: int = 1) -> None:
    """A checkpoint of one file, whose manifest says something else."""
    save(folder, make_state(step, {"weight": (50, 40), "bias": (9,)}), step)
    body = body_of(folder, step)
    change(body)
    (folder / manifest_name(step)).write_bytes(text_of(body))


def renamed(name: Any) -> Callable[[Body], None]:
    """It lists its only file under this name."""

    def change(body: Body) -> None:
        body["files"][0][0] = name

    return change


def escaping(folder: Path, name: str = ESCAPE) -> None:
    """As `prepare`; the file that it lists lies where the name leads, with the bytes that the manifest promises."""
    prepare(folder, renamed(name))
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    (folder / PART).rename(target)


def idle(body: Body) -> None:
    """A further file is listed, which holds no block."""
    body["files"].append([PART.replace("-w0-", "-w1-"), *body["files"][0][1:]])


def tree_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
