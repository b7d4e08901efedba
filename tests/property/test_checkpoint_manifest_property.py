"""Any text of a manifest is accepted as itself, or refused in one line; reading what it is of ends in no other way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.base.errors import CheckpointCorrupt, ConfigError
from everstep.checkpoint.interchange import read_weights
from everstep.checkpoint.manifest import decode
from everstep.checkpoint.names import manifest_name
from everstep.checkpoint.reader import open_checkpoint
from everstep.checkpoint.store import DirectoryStore
from exchange_cases import write_step
from foreign_checkpoints import Body, body_of, signed, text_of
from sampling import examples

SCALARS: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../../../uvloop.py", "/etc/passwd", "\udc00", 1 << 63, 1 << 70, -1, 0, 1, "0" * 32, "model/"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("checkpoint")
    write_step(DirectoryStore(path), 1)
    (path / "body.json").write_text(json.dumps(body_of(path)))
    yield path
    shutil.rmtree(path)


def containers(node: Any) -> list[Any]:
    """Every dict and list that is not empty, the outermost first."""
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [*([node] if inner else []), *(found for value in inner for found in containers(value))]


def change(node: Any, key: Any, other: Any, how: str, value: Any) -> None:
    """One change of a dict or list."""
    if how == "replace":
        node[key] = value
    elif how == "swap":
        node[key], node[other] = node[other], node[key]
    elif how == "copy":
        node[key] = node[other]
    elif how == "drop":
        del node[key]
    elif how == "more" and isinstance(node, list):
        node.append(node[key])
    elif how == "more":
        node["more"] = node[key]
    elif type(node[key]) is int:
        node[key] += 1 if how == "up" else -1


def mutate(body: Body, data: st.DataObject) -> Body:
    """One to three changes, those of the manifest's own rows as likely as those of the many below."""
    for _ in range(data.draw(st.integers(1, 3))):
        state = body.get("state")
        below = [body, *body.values(), *(state.values() if isinstance(state, dict) else ())]
        places = containers(data.draw(st.sampled_from(below)))
        if places:
            node = data.draw(st.sampled_from(places))
            keys = st.sampled_from(list(node) if isinstance(node, dict) else range(len(node)))
            how = data.draw(st.sampled_from(["replace", "swap", "copy", "drop", "more", "up", "down"]))
            change(node, data.draw(keys), data.draw(keys), how, data.draw(VALUES) if how == "replace" else None)
    return body


def plain(text: bytes) -> str:
    return json.dumps(json.loads(text)["body"], sort_keys=True)


@settings(max_examples=examples(150))
@given(data=st.data())
def test_any_manifest_is_accepted_as_itself_or_refused(folder: Path, data: st.DataObject) -> None:
    body = mutate(json.loads((folder / "body.json").read_text()), data)
    text = text_of(body) if data.draw(st.booleans()) else signed(json.dumps(body).encode())
    try:
        manifest = decode(text, "m")
    except (CheckpointCorrupt, ConfigError) as error:
        assert str(error).startswith("m ") and str(error).isprintable(), error
        return
    assert plain(manifest.encode()) == plain(text)
    (folder / manifest_name(1)).write_bytes(text)
    try:
        read_weights(open_checkpoint(DirectoryStore(folder), 1), optimizer=True)
    except (CheckpointCorrupt, ConfigError) as error:
        assert "\n" not in str(error)
