"""Places of findings: where an object is made, and where the leader's word is used."""

from __future__ import annotations

from pathlib import Path

from everstep.script.name_origins import Places
from everstep.script.restarts import read_in_code


def test_a_finding_has_the_line_where_its_object_is_made_or_the_leader_is_asked(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import everstep\nrun = everstep.join(a, b, c, lanes=2)\nwait = 0\nfor step in run:\n    wait += 1\n"
    )
    places = Places(str(script))
    counted = places.of(read_in_code("wait", "carried", str(script), 5))
    assert (counted.file, counted.line, counted.changed) == ("train.py", 3, 5)
    asked = places.of(read_in_code("run.is_main", "leader", str(script), 4))
    assert (asked.file, asked.line) == ("train.py", 4) and "do the same on all workers" in str(asked)
