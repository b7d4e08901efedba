"""Each rule finds what it is for. Without these, a rule that finds nothing would look like clean source."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import tidy_rules as rules
from tidy_raising import untrue_raises
from tidy_rules import Source, source_of

Rule = Callable[[Source], Iterator[str]]
DOC = '"""Doc."""\n'
FIELDS = "class A:\n" + "".join(f"    x{i}: int\n" for i in range(15))
METHODS = "class A:\n" + "".join(f"    def f{i}(self): pass\n" for i in range(20))
LONG = "def f():\n" + "    x = 1\n" * 69

BAD: list[tuple[Rule, str, str]] = [
    (rules.wrong_directions, "everstep.base.x", "from everstep.cli.main import main"),
    (rules.wrong_directions, "everstep.order.x", "import everstep.placement.tree"),
    (rules.wrong_directions, "everstep.protocol.x", "from everstep.observe.events import EventLog"),
    (rules.wrong_directions, "everstep.exact.x", "def f():\n    from ..runtime import board"),
    (rules.wrong_directions, "everstep.sim.x", "from everstep.exact import digest"),
    (rules.wrong_directions, "everstep.nowhere.x", "import os"),
    (rules.wrong_rooms, "everstep.runtime.link.x", "from everstep.runtime.lead.etcd import Etcd"),
    (rules.wrong_rooms, "everstep.runtime.lead.x", "from everstep.runtime.host import board"),
    (rules.wrong_rooms, "everstep.runtime.process", "import everstep.runtime.link.wire"),
    (rules.wrong_rooms, "everstep.runtime.host.x", "from everstep.runtime.job import Job"),
    (rules.impurities, "everstep.placement.x", "import torch"),
    (rules.impurities, "everstep.protocol.x", "from time import monotonic"),
    (rules.impurities, "everstep.order.x", "def f():\n    return open('x')"),
    (rules.impurities, "everstep.base.x", "import msgspec"),
    (rules.long_functions, "everstep.base.x", LONG),
    (rules.long_file, "everstep.base.x", "x = 1\n" * 601),
    (rules.missing_docstrings, "everstep.base.x", "x = 1"),
    (rules.missing_docstrings, "everstep.base.x", DOC + "def f():\n    pass"),
    (rules.missing_docstrings, "everstep.base.x", DOC + "class A:\n    pass"),
    (
        rules.missing_docstrings,
        "everstep.base.x",
        DOC + f"class A:\n    {DOC}    def f(self):\n" + "        x = 1\n" * 19,
    ),
    (rules.asserts, "everstep.base.x", "assert True"),
    (rules.late_decoders, "everstep.exact.x", "msgspec.convert(x, list[int])"),
    (rules.late_decoders, "everstep.exact.x", "msgspec.json.decode(x, type=list[Own])"),
    (rules.pickles, "everstep.base.x", "import pickle"),
    (rules.pickles, "everstep.exact.x", "torch.load('x')"),
    (rules.unguarded, "everstep.cli.x", "text = (run_dir / 'job.json').read_text()"),
    (rules.unguarded, "everstep.cli.x", "shown = Console(stderr=True)"),
    (rules.opened_elsewhere, "everstep.cli.x", "open(run_dir / 'job.json', 'w')"),
    (rules.opened_elsewhere, "everstep.cli.x", "with path.open(mode='ab') as file: pass"),
    (rules.opened_elsewhere, "everstep.cli.x", "gzip.open(path, given)"),
    (rules.opened_elsewhere, "everstep.cli.x", "os.open(path, os.O_WRONLY | os.O_CREAT)"),
    (rules.opened_elsewhere, "everstep.cli.x", "os.open(path, os.O_RDONLY | os.O_CREAT)"),
    (rules.opened_elsewhere, "everstep.cli.x", "os.open(path, flags)"),
    (rules.opened_elsewhere, "everstep.cli.x", "(run_dir / 'lock').touch()"),
    (rules.opened_elsewhere, "everstep.cli.x", "path.write_text('x')"),
    (rules.opened_elsewhere, "everstep.cli.x", "shutil.copy(path, run_dir)"),
    (rules.opened_elsewhere, "everstep.cli.x", "save_file(tensors, run_dir / 'model.safetensors')"),
    (rules.opened_elsewhere, "everstep.cli.x", "safetensors.torch.save_file(tensors, path)"),
    (rules.opened_elsewhere, "everstep.cli.x", "np.save(path, array)"),
    (rules.opened_elsewhere, "everstep.cli.x", "torch.save(state, path)"),
    (rules.opened_elsewhere, "everstep.cli.x", "logging.FileHandler(path)"),
    (rules.held, "everstep.chaos.x", "os.kill(pid, signal.SIGSTOP)"),
    (rules.limited_waits, "everstep.data.x", "import select\nselect.select([fd], [], [], 0)"),
    (rules.limited_waits, "everstep.data.x", "from select import select"),
    (rules.held, "everstep.chaos.x", "run(f'kill -STOP {pid}')"),
    (rules.held, "everstep.runtime.x", "Popen([OUTLIVES_WORKERS, '-c', script])"),
    (rules.own_processes, "everstep.cli.x", "import sys\ncommand = [sys.executable, '-m', 'everstep']"),
    (rules.own_processes, "everstep.cli.x", "Popen(command, preexec_fn=lambda: die_with_parent(1))"),
    (rules.unfinished, "everstep.base.x", "raise NotImplementedError"),
    (rules.parsed_reasons, "everstep.report.x", "KILLED.match(one_line(event.get('reason')))"),
    (rules.parsed_reasons, "everstep.report.x", "re.search('killed by', reason)"),
    (rules.parsed_reasons, "everstep.report.x", "'leaves as asked' in reason"),
    (rules.parsed_reasons, "everstep.cli.x", "event.get('reason') != 'exit code 0'"),
    (rules.parsed_reasons, "everstep.cli.x", "scenario.fails not in found.reason"),
    (rules.parsed_reasons, "everstep.sim.x", "fields['reason'].startswith('drained')"),
    (rules.parsed_reasons, "everstep.sim.x", "str(event['reason'] or '').rpartition(': ')"),
    (rules.causeless, "everstep.train.x", "self.emit('warning', reason=f'no {x}')"),
    (rules.causeless, "everstep.checkpoint.x", "fields = {'step': 1, 'reason': text}"),
    (rules.crowded_types, "everstep.train.x", FIELDS + "    def f(self):\n        self.y, *self.z = 1, 2"),
    (rules.crowded_types, "everstep.protocol.driver.x", FIELDS + "    def f(self):\n        self.y += 1"),
    (rules.crowded_types, "everstep.train.x", METHODS + "    @property\n    def g(self): pass"),
    (rules.crowded_types, "everstep.sim.x", METHODS + "    def g(self): pass"),
    (rules.crowded_types, "everstep.cli.x", METHODS + "    def g(self): pass"),
    (rules.names_of_pictures, "everstep.cli.x", "def _porch(): pass"),
    (rules.names_of_pictures, "everstep.cli.x", "class A:\n    def f(self):\n        self._standing = 1"),
    (rules.names_of_pictures, "everstep.cli.x", "class A:\n    struck: int = 0"),
    (rules.writes_into_others, "everstep.train.x", "link.config = merged"),
    (rules.writes_into_others, "everstep.train.x", "self.a = task.b = 1"),
    (rules.writes_into_others, "everstep.train.x", "a, (b, *link.c) = 1, (2, 3)"),
    (rules.writes_into_others, "everstep.train.x", "self.session.step += 1"),
    (rules.writes_into_others, "everstep.train.x", "for feed.offer in offers: pass"),
    (rules.writes_into_others, "everstep.train.x", "del feed.offer"),
    (rules.writes_into_others, "everstep.sim.x", "process.crash_after_effects = 3"),
    (rules.writes_into_others, "everstep.train.x", "from everstep.train import join\njoin.called = True"),
    (rules.writes_into_others, "everstep.protocol.driver.x", "setattr(feed, 'offer', None)"),
    (rules.writes_into_others, "everstep.protocol.coordinator.x", "job.agreement.plan = plan"),
]

GOOD: list[tuple[Rule, str, str]] = [
    (rules.opened_elsewhere, "everstep.base.below", "os.open(path, os.O_WRONLY | os.O_CREAT)"),
    (rules.opened_elsewhere, "everstep.cli.x", "open(path)\npath.open('rb')\nos.open(path, os.O_RDONLY)"),
    (rules.opened_elsewhere, "everstep.cli.x", "open(fd, 'wb')\nos.open(os.devnull, os.O_RDWR)"),
    (rules.opened_elsewhere, "everstep.cli.x", "Image.open(given)\nwebbrowser.open(url)\nwrite_atomically(path, 'x')"),
    (rules.unguarded, "everstep.cli.terminal", "shown = Console(file=raw(stream))"),
    (rules.unguarded, "everstep.runtime.process", "said = Path('/proc/self/cgroup').read_text()"),
    (rules.wrong_directions, "everstep.cli.x", "from everstep.base.errors import check"),
    (rules.wrong_directions, "everstep.runtime.x", "from everstep.observe.events import EventLog"),
    (rules.wrong_directions, "everstep.sim.x", "from everstep.protocol import messages"),
    (rules.wrong_directions, "everstep.exact.x", "from . import layout"),
    (rules.wrong_rooms, "everstep.runtime.host.x", "from everstep.runtime.link import wire\nimport torch"),
    (rules.wrong_rooms, "everstep.runtime.job", "from everstep.runtime.host import board"),
    (rules.impurities, "everstep.protocol.x", "import msgspec"),
    (rules.impurities, "everstep.runtime.x", "import time"),
    (rules.late_decoders, "everstep.exact.x", "msgspec.json.decode(x, type=dict[str, int])"),
    (rules.late_decoders, "everstep.protocol.converter", "msgspec.convert(x, list[int])"),
    (rules.long_functions, "everstep.base.x", LONG.removesuffix("    x = 1\n")),
    (rules.long_file, "everstep.base.x", "x = 1\n" * 600),
    (rules.missing_docstrings, "everstep.base.x", DOC + "def _f():\n    pass"),
    (rules.missing_docstrings, "everstep.base", ""),
    (rules.pickles, "everstep.exact.x", "state.load('x')"),
    (
        rules.parsed_reasons,
        "everstep.report.x",
        "if why.reason and reason not in told:\n    print(' '.join(reason.split()))",
    ),
    (rules.causeless, "everstep.train.x", "self.emit('warning', cause=Cause.DISK, reason='full')"),
    (rules.causeless, "everstep.train.x", "Saved(ok=False, reason='checkpoints are off')"),
    (rules.crowded_types, "everstep.train.x", FIELDS + "    def f(self):\n        self.x0 = other.y = self.z.y = 1"),
    (rules.crowded_types, "everstep.train.x", METHODS),
    (rules.crowded_types, "everstep.cli.x", FIELDS + "    y: int"),
    (rules.crowded_types, "everstep.base.plan", METHODS + "    def g(self): pass"),
    (rules.names_of_pictures, "everstep.cli.x", "def outstanding(): pass\nplaces = 1\nprint(a.standing)"),
    (rules.writes_into_others, "everstep.train.x", "self.x = x\nself.x += 1\nfound[link.me] = link.me"),
    (rules.writes_into_others, "everstep.train.x", "parameter.grad = None\nself.model.forward = f\nctx.holder = 1"),
    (rules.writes_into_others, "everstep.train.x", "import torch\ntorch.backends.cudnn.benchmark = False"),
    (rules.writes_into_others, "everstep.cli.x", "link.config = merged"),
]


@pytest.mark.parametrize(("rule", "module", "text"), BAD)
def test_finds_what_it_is_for(rule: Rule, module: str, text: str) -> None:
    assert len(list(rule(source_of(module, text)))) >= 1


@pytest.mark.parametrize(("rule", "module", "text"), GOOD)
def test_lets_the_rest_alone(rule: Rule, module: str, text: str) -> None:
    assert list(rule(source_of(module, text))) == []


def test_dead_modules() -> None:
    texts = {
        "everstep": "",
        "everstep.a": "import everstep.b",
        "everstep.b": "RUN = 'everstep.c:main'",
        "everstep.c": "import everstep.c",
        "everstep.d": "'everstep.d'",
        "everstep.e": "",
        "everstep.f": "NAMES = ['e']\nwhere = f'everstep.{name}'",
    }
    sources = {name: source_of(name, text) for name, text in texts.items()}
    assert list(rules.dead_modules(sources, ["everstep.a", "everstep.f"])) == ["everstep.d: nothing imports it"]


def test_unused_names() -> None:
    texts = {
        "everstep.a": "A = 1\nB: int = A\ndef f():\n    f()\n"
        "class C:\n    x: int\n    def g(self): return self.y\n    y = 2",
        "everstep.b": "from everstep.a import f\n@cli.command()\ndef run(): pass\nMAIN = 'everstep.b:start'\n"
        "def start(): print(MAIN)\ndef __getattr__(name): pass\n@property\ndef h(): pass",
    }
    sources = {name: source_of(name, text) for name, text in texts.items()}
    assert [name for name, _ in rules.unused_names(sources)] == ["B", "f", "C", "x", "g", "h"]


RAISING = """class Gone(ValueError): ...
class Answer: ...
def h():
    raise Gone
def g(): pass
TABLE = {"h": h}
class Other:
    def breaks(self): h()
    def stays(self): pass
def f():
    'Do. Raises: NAME if it is gone; OSError.'
    BODY"""


@pytest.mark.parametrize(
    "body",
    [
        "raise Gone",
        "h()",
        "TABLE['h']()",
        "Other().breaks()",
        "try: h()\n    except Gone: raise",
        "try: pass\n    except OSError: h()",
    ],
)
def test_what_is_raised(body: str) -> None:
    text = RAISING.replace("NAME", "Gone").replace("BODY", body)
    assert not list(untrue_raises([source_of("everstep.base.x", text)]))


@pytest.mark.parametrize(
    ("name", "body", "complaint"),
    [
        ("Answer", "raise Gone", "no exception"),
        ("Gone", "pass", "nothing that it calls raises"),
        ("Gone", "try: g()\n    except Gone: pass", "nothing that it calls raises"),
        ("Gone", "try: h()\n    except ValueError: pass", "nothing that it calls raises"),
        ("Gone", "with suppress(Gone): h()", "nothing that it calls raises"),
        ("Gone", "return isinstance(g(), Gone)", "nothing that it calls raises"),
        ("Gone", "Other().stays()", "nothing that it calls raises"),
    ],
)
def test_what_is_not_raised(name: str, body: str, complaint: str) -> None:
    text = RAISING.replace("NAME", name).replace("BODY", body)
    (found,) = untrue_raises([source_of("everstep.base.x", text)])
    assert complaint in found


def test_an_own_method_is_not_that_of_another_class() -> None:
    text = (
        RAISING.replace("NAME", "KeyError").replace("BODY", "pass")
        + """
class Heir(Other):
    def stays(self):
        'Do. Raises: Gone.'
        self.breaks()
    def breaks(self): pass
class Asked(Protocol):
    def breaks(self):
        'Do. Raises: Gone.'"""
    )
    found = list(untrue_raises([source_of("everstep.base.x", text)]))
    assert [one.partition(": ")[2].partition(" ")[0] for one in found] == ["stays"]


def test_shared_names() -> None:
    texts = {
        "everstep.a": "class Ox: pass\nBee = int\nCAT = 1\n_Dog = str",
        "everstep.b": "class Bee: pass\n_Dog = str",
    }
    sources = [source_of(name, text) for name, text in texts.items()]
    assert [problem.partition(" ")[0] for problem in rules.shared_names(sources)] == ["Bee"]


def test_files_without_name() -> None:
    found = list(
        rules.files_without_name(["everstep.a.x.job", "everstep.a.y.job", "everstep.a.old_desk", "everstep.cli.job"])
    )
    assert found == [
        "everstep.a.old_desk: say what lies there",
        "job: everstep.a.x.job, everstep.a.y.job have one name",
    ]


def test_rooms_without_name() -> None:
    assert len(list(rules.rooms_without_name(["everstep.base.utils", "everstep.order.cursor"]))) == 1


def test_cycles() -> None:
    texts = {
        "everstep": "",
        "everstep.a": "",
        "everstep.a.w": "from everstep.a.x import f",
        "everstep.a.x": "if TYPE_CHECKING:\n    from everstep.a.y import Y",
        "everstep.a.y": "def f():\n    from ..a import z",
        "everstep.a.z": "from everstep.a.x import X\nfrom everstep.a.v import V",
        "everstep.a.v": "import torch",
    }
    sources = {name: source_of(name, text) for name, text in texts.items()}
    assert list(rules.cycles(sources)) == ["everstep.a.x -> everstep.a.y -> everstep.a.z -> everstep.a.x"]
