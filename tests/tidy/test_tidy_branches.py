"""Each branch that is listed as met by no seed is still in the source: `make branches` takes long, this does not."""

from __future__ import annotations

import ast
import json

from sim_branches import PROTOCOL, UNMET, _functions


def test_listed_branches_are_in_the_source() -> None:
    gone = []
    for file, function, line, to in (one["branch"] for one in json.loads(UNMET.read_text())):
        path = PROTOCOL / file
        text = path.read_text() if path.exists() else ""
        lines = {"", "return", *(line.strip() for line in text.splitlines())}
        known = {name for name, _, _ in _functions(ast.parse(text))}
        if function not in known or not {line, to} <= lines:
            gone.append((file, function, line, to))
    assert not gone, f"{UNMET.name} lists what is not there: find where it is now, or drop it: {gone}"
