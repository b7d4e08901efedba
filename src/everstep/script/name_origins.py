"""Places where a script makes the objects behind its names. Pure but for reading the script."""

from __future__ import annotations

import ast
import os
from dataclasses import replace

from everstep.base.given import read_given
from everstep.script.restarts import Finding


class Places:
    """Places where a script makes the objects behind its names: the first assignment, else the call of `join`."""

    def __init__(self, script: str) -> None:
        self._file = os.path.basename(script)
        self._lines: dict[str, int] = {}
        self._joined = 0
        try:
            tree = ast.parse(read_given(script, links=True))
        except (OSError, ValueError, SyntaxError):
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "join" and node.keywords:
                self._joined = self._joined or node.lineno
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                        name = ast.unparse(one)
                        self._lines[name] = min(node.lineno, self._lines.get(name, node.lineno))

    def of(self, finding: Finding) -> Finding:
        name = finding.object
        last = name.split(".")[-1]
        line = self._lines.get(name) or self._lines.get(f"self.{last}") or self._lines.get(name.split(".")[0])
        if finding.line and (not line or finding.kind == "leader"):  # the use of it is to blame, not the job
            return replace(finding, file=os.path.basename(finding.file))
        found = replace(finding, file=self._file, line=line or self._joined)
        changed = finding.line if os.path.basename(finding.file) == self._file and finding.line != found.line else 0
        return replace(found, changed=changed)
