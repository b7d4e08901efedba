"""The rules of the house, as functions from source to complaints. They read the AST and import nothing."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
PACKAGE = "everstep"

LAYERS = {
    "base": 0,
    "cost": 1,
    "placement": 1,
    "order": 1,
    "protocol": 2,
    "exact": 3,
    "runtime": 3,
    "observe": 3,
    "parallel": 4,
    "checkpoint": 4,
    "data": 4,
    "script": 5,
    "train": 6,
    "sim": 7,
    "chaos": 7,
    "zoo": 7,
    "integrations": 7,
    "report": 8,
    "dashboard": 9,
    "sinks": 9,
    "cli": 10,
}
ROOMS = {"process": 0, "process_figures": 0, "versions": 0, "link": 1, "files": 2, "lead": 3, "host": 4}
"""Floors inside `runtime`, for rooms and for the files beside them; any other file there is above them all."""
PLAIN_KINDS = {"Any", "bool", "bytes", "dict", "float", "int", "list", "str", "tuple"}
PURE = ("cost", "placement", "order", "protocol")
IMPURE_MODULES = frozenset(
    {"torch", "numpy", "random", "secrets", "uuid", "time", "datetime", "sched"}
    | {"os", "io", "pathlib", "tempfile", "shutil", "logging", "urllib", "http"}
    | {"socket", "select", "selectors", "ssl", "signal", "subprocess", "multiprocessing"}
    | {"threading", "queue", "asyncio", "concurrent", "uvloop"}
)
IMPURE_CALLS = frozenset({"open", "print", "input", "breakpoint"})
PICKLES = frozenset({"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"})
PICKLING_ALLOWED = {
    "everstep.data.batch",  # samples, from a worker's own loader processes
    "everstep.data.loader_process",
    "everstep.data.sample_content",  # written to be hashed, and never read
    "everstep.checkpoint.interchange_formats",  # what others read and write; torch.load with weights_only
    "everstep.checkpoint.interchange_dcp",  # an index that knows few classes
}
PICKLING_CALLS = frozenset({"torch.load", "torch.save"})
ROOMS_WITHOUT_NAME = frozenset({"utils", "util", "tools", "components", "common", "helpers", "helper", "misc", "stuff"})
FILES_WITHOUT_NAME = frozenset(
    {"quarters", "places", "pier", "porch", "standing", "desk", "landing", "premises", "struck", "knocks"}
)
UNFINISHED = ("TODO", "FIXME", "XXX", "NotImplementedError")
MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 600
MAX_TEST_FILE_LINES = 900
LONG_METHOD_LINES = 20
LOOKING_INTO = frozenset({"startswith", "endswith", "partition", "rpartition", "split", "find", "index", "count"})
MATCHING = frozenset({"match", "search", "fullmatch", "findall", "finditer", "sub", "split"})
REASON_ALONE = frozenset({"Saved", "Profiled", "_answer"})  # what answers a command
REASONS_OF = {  # why a checkpoint was taken, as its manifest notes it
    "everstep.checkpoint.manifest",
    "everstep.checkpoint.manifest_writer",
    "everstep.cli.checkpoint_import",
    "everstep.cli.checkpoints",
}
NAMES = re.compile(r"[\w.:]+")
CALLED_BY_OTHERS = frozenset(  # by enum, ctypes, pickle, torch, io, asyncio, uvicorn, yaml, click, rich, urllib, otel
    {"_missing_", "_fields_", "find_class", "persistent_id", "persistent_load", "load_bytes", "encoding", "writable"}
    | {
        "redirect_request",
        "connection_made",
        "data_received",
        "connection_lost",
        "handle_events",
        "on_response_complete",
        "construct_mapping",
        "flatten_mapping",
        "render",
    }
    | {"list_commands", "get_command", "resolve_command", "format_commands"}
    | {"generate_trace_id", "generate_span_id", "on_end"}
    | {"create_module"}  # by importlib; the rest by transformers.Trainer
    | {"_build_accelerator_args", "is_local_process_zero", "prediction_step"}
    | {"evaluation_loop", "_save_checkpoint"}
)
READ_AS_THEY_ARE = frozenset(  # the kernel's files, our own, and the user's data
    {"everstep.runtime.process", "everstep.runtime.host.collector", "everstep.report.style", "everstep.dashboard.app"}
    | {"everstep.data.token_stream", "everstep.cli.plan_inputs"}
)
PUBLIC = frozenset(  # what users name, and nothing here does
    {"barrier"}
    | {"sanity_checking", "loggers", "progress_bar_callback", "lightning_module", "callback_metrics"}
    | {"current_epoch", "is_global_zero", "estimated_stepping_batches", "validate"}
    | {f"ResNet{depth}{kind}" for depth in (34, 50, 101, 152) for kind in ("Digits", "Folder")}
)
DRIVING = (
    "everstep.train.",
    "everstep.script.",
    "everstep.protocol.driver.",
    "everstep.protocol.coordinator.",
    "everstep.sim.",
)
DRIVING += ("everstep.protocol.step_machine", "everstep.protocol.stepping.", "everstep.runtime.job")
DRIVING += ("everstep.runtime.host.host_agent",)
NOT_CROWDED = (*DRIVING, "everstep.parallel.group", "everstep.runtime.link.control_client")
NOT_CROWDED += tuple(f"everstep.report.{name}" for name in ("facts", "course", "crew", "job_condition"))
CROWDED = frozenset(  # one subject each, in more than 20 methods
    {"everstep.base.plan", "everstep.checkpoint.checkpointer", "everstep.runtime.host.host_workers"}
    | {f"everstep.exact.{name}" for name in ("accumulate", "buffers", "rank_sums", "settings", "shard_sums", "state")}
    | {f"everstep.parallel.{name}" for name in ("shared_memory", "socket_mesh", "streaming")}
    | {"everstep.report.history", "everstep.report.incidents", "everstep.zoo.huggingface"}
    | {"everstep.integrations.huggingface", "everstep.integrations.lightning"}  # the methods of others' classes
)
MAX_ATTRIBUTES = 15
MAX_METHODS = 20
TORCH_ATTRIBUTES = frozenset({"grad", "data", "forward"})  # of tensors and modules, which torch has assigned to


@dataclass(frozen=True)
class Source:
    """One module: dotted name, where it is, text and tree."""

    module: str
    path: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The package below `everstep`, "" for the root's own modules."""
        parts = self.module.split(".")
        return parts[1] if len(parts) > 2 or (len(parts) == 2 and parts[1] in LAYERS) else ""

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree's."""
        return list(ast.walk(self.tree))


def source_of(module: str, text: str, path: str = "") -> Source:
    """A module from its text."""
    return Source(module, path or f"{module.replace('.', '/')}.py", text, ast.parse(text))


@cache
def all_sources(root: Path = SRC) -> list[Source]:
    """Every module of the package."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(source_of(module, path.read_text(), str(path.relative_to(root.parent))))
    return found


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that is imported, wherever in the file."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                own = source.module.split(".")[: -node.level]
                base = ".".join([*own, base]) if base else ".".join(own)
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def wrong_directions(source: Source) -> Iterator[str]:
    """Imports that do not go down; packages of one layer that import each other (`observe` excepted)."""
    room = source.room
    if not room:
        return
    if room not in LAYERS:
        yield f"{source.path}: package {room!r} has no layer"
        return
    for line, name in imports(source):
        parts = name.split(".")
        if parts[0] != PACKAGE or len(parts) < 2 or parts[1] not in LAYERS or parts[1] == room:
            continue
        other = parts[1]
        down = LAYERS[other] < LAYERS[room] or (other == "observe" and LAYERS[room] >= LAYERS["observe"])
        if not down:
            yield f"{source.path}:{line}: {room} (L{LAYERS[room]}) imports {name} (L{LAYERS[other]})"
        elif room == "sim" and LAYERS[other] > 2:
            yield f"{source.path}:{line}: sim imports L0 to L2 alone, not {name}"


def wrong_rooms(source: Source) -> Iterator[str]:
    """Imports from one room of `runtime` into a room above it."""
    own = _floor(source.module)
    for line, name in imports(source):
        other = _floor(name)
        if own is not None and other is not None and other > own:
            yield f"{source.path}:{line}: {source.module} imports {name}, which is above it"


def _floor(module: str) -> int | None:
    """The floor of a module of `runtime`; None for what is none."""
    parts = module.split(".")
    return ROOMS.get(parts[2], len(ROOMS)) if parts[:2] == [PACKAGE, "runtime"] and len(parts) > 2 else None


def impurities(source: Source) -> Iterator[str]:
    """In pure packages: torch, clocks, randomness, I/O, threads. In base: anything but the standard library."""
    if source.room == "base":
        for line, name in imports(source):
            top = name.split(".")[0]
            if top != PACKAGE and top not in sys.stdlib_module_names:
                yield f"{source.path}:{line}: base is standard library only, not {top}"
    if source.room not in PURE:
        return
    for line, name in imports(source):
        if name.split(".")[0] in IMPURE_MODULES:
            yield f"{source.path}:{line}: {source.room} is pure, it may not import {name}"
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            yield f"{source.path}:{node.lineno}: {source.room} is pure, it may not call {node.func.id}()"


def late_decoders(source: Source) -> Iterator[str]:
    """Classes that msgspec looks at when a function runs: with 0.22, two threads that do so at once end the process."""
    for node in source.nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        named = ast.unparse(node.func)
        kinds = [k.value for k in node.keywords if k.arg == "type"]
        own = {n.id for kind in kinds for n in ast.walk(kind) if isinstance(n, ast.Name)} - PLAIN_KINDS
        converts = named == "msgspec.convert" and not source.module.endswith(".protocol.converter")
        if converts or (named in ("msgspec.json.decode", "msgspec.msgpack.decode") and own):
            yield f"{source.path}:{node.lineno}: make a decoder, or a `converter`, when the module is imported"


def long_functions(source: Source) -> Iterator[str]:
    """Functions of 70 lines or more."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines >= MAX_FUNCTION_LINES:
                yield f"{source.path}:{node.lineno}: {node.name} has {lines} lines, limit {MAX_FUNCTION_LINES - 1}"


def long_file(source: Source) -> Iterator[str]:
    """Files of more than 600 lines."""
    lines = source.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{source.path}: {lines} lines, {MAX_FILE_LINES} are allowed"


def missing_docstrings(source: Source) -> Iterator[str]:
    """Modules, public classes and public functions without one; and public methods of 20 lines or more."""
    if not ast.get_docstring(source.tree) and source.text.strip():
        yield f"{source.path}: the module has no docstring"
    for node in source.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                yield f"{source.path}:{node.lineno}: {node.name} has no docstring"
            if isinstance(node, ast.ClassDef):
                yield from _undocumented_methods(source, node)


def _undocumented_methods(source: Source, owner: ast.ClassDef) -> Iterator[str]:
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines >= LONG_METHOD_LINES and not ast.get_docstring(node):
                yield f"{source.path}:{node.lineno}: {owner.name}.{node.name} has {lines} lines and no docstring"


def asserts(source: Source) -> Iterator[str]:
    """`assert` vanishes under -O."""
    for node in source.nodes:
        if isinstance(node, ast.Assert):
            yield f"{source.path}:{node.lineno}: use check() from everstep.base.errors instead of assert"


def pickles(source: Source) -> Iterator[str]:
    """Nothing is pickled, neither on disk nor on the wire."""
    if source.module in PICKLING_ALLOWED:
        return
    for line, name in imports(source):
        if name.split(".")[0] in PICKLES:
            yield f"{source.path}:{line}: imports {name}"
    for node in source.nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PICKLING_CALLS:
            yield f"{source.path}:{node.lineno}: calls {ast.unparse(node.func)}"


def unguarded(source: Source) -> Iterator[str]:
    """Files are read within bounds, and drawn on the terminal through one door."""
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        method = isinstance(node.func, ast.Attribute)
        if method and name in ("read_text", "read_bytes") and source.module not in READ_AS_THEY_ARE:
            yield f"{source.path}:{node.lineno}: {name}; use everstep.base.given, the file may be anything"
        if name == "Console" and source.module != "everstep.cli.terminal":
            yield f"{source.path}:{node.lineno}: Console; use everstep.cli.terminal.console, which shows text as text"


WRITES_ELSEWHERE = {
    "everstep.base.below": "the one way to files below a run directory",
    "everstep.checkpoint.store": "blobs, by descriptors of the folders on their way",
    "everstep.checkpoint.keys": "a key, where a user says",
    "everstep.checkpoint.interchange_formats": "exports, where a user says",
    "everstep.checkpoint.tensor_file": "those exports, and drafts that `drafted` made",
    "everstep.cli.report": "a page, where a user says",
    "everstep.data.token_stream": "a cache of tokens beside a data set",
    "everstep.parallel.cell_memory": "memory that the head of this worker has made, by its descriptor",
    "everstep.report.traces": "a draft that `drafted` made",
    "everstep.train.profiling": "a draft that `drafted` made",
    "everstep.train.final": "a draft that `drafted` made",
    "everstep.runtime.files.claim_files": "a draft that `drafted` made",
    "everstep.dashboard.guard": "a draft that `drafted` made",
    "everstep.train.rehearsal": "links to checkpoints of its own, in a folder of its own",
    "everstep.script.stretches": "links to checkpoints of its own, in a folder of its own",
    "everstep.runtime.host.packet_faults": "a device",
    "everstep.data.loader_process": "a file that its parent has open, by its descriptor",
}
"""Modules in which files are opened for writing in other ways than `everstep.base.below`, and why."""
WRITERS = frozenset({"write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "mkfifo", "mknod", "tofile"})
LIBRARY_WRITERS = frozenset({"save_file", "FileHandler", "RotatingFileHandler", "savez", "savez_compressed", "memmap"})
"""However they were imported."""
WRITING_CALLS = frozenset(
    {"os.truncate", "os.symlink", "os.mkfifo", "os.mknod", "os.creat", "shutil.copy", "shutil.copy2", "shutil.move"}
    | {"shutil.copyfile", "shutil.copytree", "shutil.copyfileobj", "sqlite3.connect", "tempfile.mkstemp"}
    | {"shutil.unpack_archive", "shutil.make_archive", "os.link", "torch.save", "np.save", "numpy.save"}
)
OPENS = frozenset({"open", "io.open", "gzip.open", "bz2.open", "lzma.open", "codecs.open"})


def opened_elsewhere(source: Source) -> Iterator[str]:
    """Files are opened for writing in one place, which follows no link below a run directory."""
    if source.module in WRITES_ELSEWHERE:
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and _opens_to_write(node, ast.unparse(node.func)):
            yield f"{source.path}:{node.lineno}: {ast.unparse(node.func)}; use everstep.base.below to write a file"


def _opens_to_write(node: ast.Call, name: str) -> bool:
    method = isinstance(node.func, ast.Attribute)
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    last = name.rpartition(".")[2]
    if name in WRITING_CALLS or last in LIBRARY_WRITERS or (method and last in WRITERS):
        return True
    if name == "os.open":
        flags = ast.unparse(node.args[1] if len(node.args) > 1 else given.get("flags", ast.Constant(0)))
        reads = "O_RDONLY" in flags and not re.search("O_(CREAT|APPEND|TRUNC)", flags)
        return not reads and ast.unparse(node.args[0]) != "os.devnull"
    if name in OPENS or (method and name.endswith(".open") and name not in OPENS):
        place = 0 if method and name not in OPENS else 1
        mode = node.args[place] if len(node.args) > place else given.get("mode", ast.Constant("r"))
        if not (isinstance(mode, ast.Constant) and isinstance(mode.value, str)):
            return name in OPENS
        of_a_descriptor = name == "open" and ast.unparse(node.args[0]) in DESCRIPTORS
        return bool(set(mode.value) & set("wax+")) and set(mode.value) <= set("rwaxbt+") and not of_a_descriptor
    return False


DESCRIPTORS = frozenset({"1", "fd"})


HELD = frozenset({"signal.SIGSTOP", "OUTLIVES_WORKERS"})


def own_processes(source: Source) -> Iterator[str]:
    """Processes of our own are started by one function, which keeps the working directory off their path, and no child
    runs Python between fork and exec, with its parent's locks and signal handlers."""
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and source.module != "everstep.runtime.process":
            if ast.unparse(node) == "sys.executable":
                yield f"{source.path}:{node.lineno}: sys.executable; use everstep.runtime.process.own_command"
        elif isinstance(node, ast.keyword) and node.arg == "preexec_fn":
            yield f"{source.path}:{node.lineno}: preexec_fn; use everstep.runtime.host.bound"


def held(source: Source) -> Iterator[str]:
    """Who stops a process, or leaves one behind that is to undo something, does it where letting go is seen to."""
    if source.module in ("everstep.runtime.host.undoing", "everstep.runtime.process"):
        return
    for node in source.nodes:
        if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in HELD:
            yield f"{source.path}:{node.lineno}: {ast.unparse(node)}; use everstep.runtime.host.undoing"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "-STOP" in node.value:
            yield f"{source.path}:{node.lineno}: {node.value!r}; use everstep.runtime.host.undoing"


def limited_waits(source: Source) -> Iterator[str]:
    """`select` fails for descriptors from 1024 up, which processes with many connections have."""
    for line, name in imports(source):
        if name == "select.select":
            yield f"{source.path}:{line}: select; use everstep.base.readable"
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "select.select":
            yield f"{source.path}:{node.lineno}: select.select; use everstep.base.readable"


def rooms_without_name(modules: Iterable[str]) -> Iterator[str]:
    """A room is named for what lives there."""
    for module in modules:
        for part in module.split("."):
            if part in ROOMS_WITHOUT_NAME:
                yield f"{module}: {part!r} says nothing about what lives there"


def files_without_name(modules: Iterable[str]) -> Iterator[str]:
    """Files called by a picture instead of their content, and files of one name in two rooms (of `cli` none, nor of
    `integrations`: there files are called like their commands and packages)."""
    places: dict[str, list[str]] = {}
    known = set(modules)
    for module in sorted(known - {module.rpartition(".")[0] for module in known}):
        name = module.rpartition(".")[2]
        if set(name.split("_")) & FILES_WITHOUT_NAME:
            yield f"{module}: say what lies there"
        if not module.startswith((f"{PACKAGE}.cli.", f"{PACKAGE}.integrations.")) and module.count(".") > 1:
            places.setdefault(name, []).append(module)
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"{name}: {', '.join(sorted(found))} have one name"


def names_of_pictures(source: Source) -> Iterator[str]:
    """Functions, classes, arguments and attributes called by a picture instead of what they do or hold."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            name = node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        else:
            name = node.arg if isinstance(node, ast.arg) else ""
        if name.strip("_").lower() in FILES_WITHOUT_NAME - {"places"}:
            yield f"{source.path}:{node.lineno}: {name!r} is a picture; say what it holds"  # type: ignore[attr-defined]


def unfinished(source: Source) -> Iterator[str]:
    """Promises instead of work."""
    for number, line in enumerate(source.text.splitlines(), 1):
        for word in UNFINISHED:
            if word in line:
                yield f"{source.path}:{number}: {word}"


def dead_modules(sources: Mapping[str, Source], entries: Iterable[str]) -> Iterator[str]:
    """Modules that nothing imports, names as a string ("module", "module:attribute", f"package.{...}") or lists."""
    alive = {*entries, *(f"everstep.integrations.{name}" for name in ("accelerate", "lightning"))}  # for scripts
    for source in sources.values():
        names = {name for _, name in imports(source)}
        words = {node.value for node in source.nodes if _is_text(node)}
        names |= {word.partition(":")[0] for word in words}
        for node in source.nodes:
            if isinstance(node, ast.JoinedStr) and node.values and _is_text(node.values[0]):
                names |= {node.values[0].value + word for word in words}  # type: ignore[attr-defined]
        alive |= {name for name in names if name != source.module}
    for module in sorted(sources):
        is_package = any(other.startswith(f"{module}.") for other in sources)
        if module not in alive and not is_package and not module.endswith(".__main__"):
            yield f"{module}: nothing imports it"


def unused_names(sources: Mapping[str, Source]) -> Iterator[tuple[str, str]]:
    """(name, complaint) for functions, classes, methods, constants and fields that no file mentions, their own body
    aside. A name counts wherever it stands, so two of one name hide each other; what is overridden or asked for by
    others' code is in `CALLED_BY_OTHERS`."""
    mentions = Counter(word for source in sources.values() for word in _mentions(source.tree))
    for source in sources.values():
        for owner in (source.tree, *(node for node in source.nodes if isinstance(node, ast.ClassDef))):
            for node in owner.body:
                for name in _defined(node):
                    inside = sum(word == name for word in _mentions(node)) if hasattr(node, "body") else 0
                    if mentions[name] <= inside and not name.startswith("__") and not _is_command(node):
                        yield name, f"{source.path}:{node.lineno}: {name} is used nowhere"


def shared_names(sources: Iterable[Source]) -> Iterator[str]:
    """Public types and aliases of one name in several files: one name has one meaning."""
    places: dict[str, list[str]] = {}
    for source in sources:
        if source.room == "integrations":  # its names are those of other libraries
            continue
        for node in source.tree.body:
            for name in _defined(node):
                if name[0].isupper() and not name.isupper():
                    places.setdefault(name, []).append(f"{source.path}:{node.lineno}")
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"{name} is {len(found)} things: {', '.join(found)}"


def _is_command(node: ast.stmt) -> bool:
    """A command of the command line is made known by its decorator."""
    return any(re.search(r"\.(command|group)\(", ast.unparse(d)) for d in getattr(node, "decorator_list", []))


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _mentions(tree: ast.AST) -> Iterator[str]:
    """Names that are read, attributes that are read, and words of strings that look like names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif _is_text(node) and NAMES.fullmatch(node.value):  # type: ignore[attr-defined]
            yield from re.split("[.:]", node.value)  # type: ignore[attr-defined]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_reason(node: ast.AST) -> bool:
    """`reason`, `x.reason`, `x["reason"]`, `x.get("reason")`, or one of these made into text."""
    if isinstance(node, ast.Name):
        return node.id == "reason"
    if isinstance(node, ast.Attribute):
        return node.attr == "reason"
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "reason"
    if isinstance(node, ast.BoolOp):
        return any(map(_is_reason, node.values))
    if not isinstance(node, ast.Call):
        return False
    get = isinstance(node.func, ast.Attribute) and node.func.attr == "get"
    named = bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == "reason"
    wrapped = isinstance(node.func, ast.Name) and node.func.id in ("str", "one_line")
    return (get and named) or (wrapped and any(map(_is_reason, node.args)))


def parsed_reasons(source: Source) -> Iterator[str]:
    """A reason is a sentence for people: what is decided by looking into one belongs to the cause."""
    for node in source.nodes:
        found = False
        if isinstance(node, ast.Compare):
            for op, left, right in zip(node.ops, [node.left, *node.comparators], node.comparators, strict=False):
                found |= isinstance(op, ast.In | ast.NotIn) and _is_reason(right)
                words = isinstance(left, ast.Constant | ast.JoinedStr) or isinstance(
                    right, ast.Constant | ast.JoinedStr
                )
                found |= isinstance(op, ast.Eq | ast.NotEq) and words and (_is_reason(left) or _is_reason(right))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            words_alone = node.func.attr == "split" and not node.args  # tidies white space up
            found = node.func.attr in LOOKING_INTO and _is_reason(node.func.value) and not words_alone
            found |= node.func.attr in MATCHING and any(map(_is_reason, node.args))
        if found:
            yield f"{source.path}:{node.lineno}: a decision by the words of a reason; give it a cause"  # type: ignore[attr-defined]


def causeless(source: Source) -> Iterator[str]:
    """Whoever gives a reason gives a cause beside it: in calls, and in dictionaries that become events or entries."""
    for node in source.nodes:
        if isinstance(node, ast.Call):
            names = {keyword.arg for keyword in node.keywords}
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        elif isinstance(node, ast.Dict):
            names = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            called = ""
        else:
            continue
        if (
            "reason" in names
            and "cause" not in names
            and called not in REASON_ALONE
            and source.module not in REASONS_OF
        ):
            yield f"{source.path}:{node.lineno}: a reason without its cause"


# ---- the rooms where a worker is driven, a job and a host


def crowded_types(source: Source) -> Iterator[str]:
    """Classes with more methods, or in some rooms more attributes, than a reader can keep in mind."""
    for node in source.nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        own = {a.attr for method in methods for a in _written(ast.walk(method)) if _is_self(a.value)}
        for what, found, limit, holds in (
            ("attributes", len(fields | own), MAX_ATTRIBUTES, source.module.startswith(NOT_CROWDED)),
            ("methods", len(methods), MAX_METHODS, source.module not in CROWDED),
        ):
            if found > limit and holds:
                yield f"{source.path}:{node.lineno}: {node.name} has {found} {what}, {limit} are allowed"


def writes_into_others(source: Source) -> Iterator[str]:
    """Assignments to an attribute of another object: it is told, and does it itself.

    What is left: torch's own ways, `ctx` of an autograd function, and settings of imported modules.
    """
    if not source.module.startswith(DRIVING):
        return
    modules = {a.asname or a.name.split(".")[0] for n in source.nodes if isinstance(n, ast.Import) for a in n.names}
    for target in _written(source.nodes):
        root = ast.unparse(target.value).split(".")[0]
        if not _is_self(target.value) and target.attr not in TORCH_ATTRIBUTES and root not in {"ctx", *modules}:
            yield f"{source.path}:{target.lineno}: {ast.unparse(target)} belongs to another object"
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            yield f"{source.path}:{node.lineno}: {ast.unparse(node)}"


def _written(nodes: Iterable[ast.AST]) -> Iterator[ast.Attribute]:
    """Attributes that are assigned to or deleted, in whatever kind of statement."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


# ---- the whole


def cycles(sources: Mapping[str, Source]) -> Iterator[str]:
    """Files that import each other, around however many corners; imports for type checking count."""
    graph = {
        name: sorted({found for _, n in imports(source) if (found := _module_of(n, sources)) and found != name})
        for name, source in sources.items()
    }
    done: set[str] = set()
    for start in sorted(graph):
        yield from _cycles_from(start, graph, [], done)


def _cycles_from(at: str, graph: Mapping[str, list[str]], path: list[str], done: set[str]) -> Iterator[str]:
    if at in path:
        yield " -> ".join([*path[path.index(at) :], at])
    elif at not in done:
        for to in graph.get(at, []):
            yield from _cycles_from(to, graph, [*path, at], done)
        done.add(at)


def _module_of(name: str, sources: Mapping[str, Source]) -> str | None:
    """The module that an imported name is, or is in."""
    if name in sources:
        return name
    owner = name.rpartition(".")[0]
    return owner if owner in sources and owner.count(".") > 1 else None
