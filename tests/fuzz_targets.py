"""Every parser of what comes from a file or a wire, with samples of what it takes, for tests that change these.

A parser gives a value or raises what its documentation says, soon; what it gives, encoded again, is taken again as the
same.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import ssl
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from everstep.base.config import load_config, to_dict
from everstep.base.config_keys import TlsConfig
from everstep.base.domains import parse_domains
from everstep.base.errors import EverstepError
from everstep.base.etcd_address import EtcdAddress
from everstep.base.foreign import derived_ports, first_host, foreign_launcher
from everstep.base.given import parse_json
from everstep.base.plan import Member, Plan, Seat
from everstep.chaos.fault_account import account
from everstep.chaos.spec import parse as parse_chaos
from everstep.chaos.spec import parse_now
from everstep.checkpoint.manifest import decode as decode_manifest
from everstep.checkpoint.names import manifest_name
from everstep.checkpoint.part import PartReport, decode_report, encode_report
from everstep.checkpoint.pointers import attach, detach, seal, unseal_one_of
from everstep.cli.config_file import read_config_file
from everstep.cli.job import read_job
from everstep.cli.run_dir import read_digest
from everstep.cli.verify import read_weights
from everstep.exact.digest import digest_bytes
from everstep.observe.events import Lines, format_event, parse_events
from everstep.observe.told import ToldFile
from everstep.order.ledger import LaneUse, LedgerRow, decode_rows, encode_row
from everstep.protocol import messages
from everstep.protocol.driver import records
from everstep.protocol.step_types import Record
from everstep.protocol.telling import heard, told
from everstep.report.excerpt import around
from everstep.report.facts import facts_of
from everstep.report.history import History
from everstep.report.notes import read_notes
from everstep.report.pulled import hosts_apart
from everstep.report.tail import object_of
from everstep.report.words import sentence
from everstep.runtime.files.host_directory import domains_there, others
from everstep.runtime.files.standby_files import DirectoryCopy
from everstep.runtime.lead.etcd_gateway import NoReply, read_reply
from everstep.runtime.lead.journal import format_entry
from everstep.runtime.lead.journal import parse as parse_journal
from everstep.runtime.lead.journal_and_lease import checked_where
from everstep.runtime.link import wire
from everstep.runtime.link.address import read_address
from everstep.runtime.link.handshake import TAG_BYTES, Caller, Ends, Greeter, Seals, keys_of, role_token
from everstep.runtime.link.head_facts import heard_of
from everstep.runtime.link.tls import Tls, shown_by
from everstep.sinks.publication import read_cursor
from everstep.train.launcher_store import exchange

MOST_SECONDS = 5.0
"""Of processor time, for one input: many times what any takes."""


@dataclass(frozen=True)
class FuzzTarget:
    """A parser. samples: what it takes. refuses: what it may raise. again: a value as bytes. mend: makes digests right
    once more that a change of the bytes has broken."""

    name: str
    samples: Sequence[bytes]
    parse: Callable[[bytes], Any]
    refuses: tuple[type[Exception], ...] = (EverstepError,)
    again: Callable[[Any], bytes] | None = None
    mend: Callable[[bytes], bytes] = lambda data: data


def try_one(target: FuzzTarget, data: bytes) -> bool:
    """Whether the parser takes it; raises if it does what it must not."""
    begun_s = time.process_time()
    try:
        found = target.parse(data)
    except target.refuses as error:
        if "\n" in str(error):
            raise AssertionError(f"several lines: {error}") from error
        return False
    finally:
        took_s = time.process_time() - begun_s
        if took_s > MOST_SECONDS:
            raise AssertionError(f"{target.name} took {took_s:.1f} s for {len(data)} bytes")
    if target.again is not None:
        data = target.again(found)
        if target.again(target.parse(data)) != data:
            raise AssertionError(f"{target.name} takes its own {data[:200]!r} for something else")
    return True


# ---- inputs


_PIECES = (
    *(b"9" * 5000, b"1e999", b"-1", b"18446744073709551616", b"NaN", b"null", b"[]", b"{}", b'""', b"\xff\xfe"),
    *(b"[" * 2000, b"{" * 500, b'{"a":' * 2000, b"\x00", b"\n", b'"\\ud800"', b"../../x", b"\x1b[2J", b"\xe2\x80\xae"),
    *(b"\xc1", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 2000, b"\xcf" + b"\xff" * 8),
)


def changed(samples: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """A sample, changed in a few places: bits, pieces cut out, doubled or put in, huge numbers, the end cut off."""
    at = st.integers(0, 1 << 16)
    change = st.tuples(st.sampled_from("fdtirn"), at, at, st.sampled_from(_PIECES) | st.binary(max_size=8))
    many = st.tuples(st.sampled_from(list(samples)), st.lists(change, max_size=6))
    return many.map(lambda drawn: _change(*drawn)) | st.binary(max_size=200)


def _change(data: bytes, changes: Sequence[tuple[str, int, int, bytes]]) -> bytes:
    for how, first, length, piece in changes:
        at = first % (len(data) + 1)
        end = min(len(data), at + length % 64)
        if how == "f" and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << length % 8)]) + data[at + 1 :]
        elif how == "d":
            data = data[:at] + data[end:]
        elif how == "t":
            data = data[:at]
        elif how == "i":
            data = data[:at] + piece + data[at:]
        elif how == "r":
            data = data[:at] + data[at:end] * 2 + data[end:]
        elif how == "n":
            numbers = list(re.finditer(rb"\d+", data))
            if numbers:
                found = numbers[first % len(numbers)]
                data = data[: found.start()] + piece + data[found.end() :]
    return data


# ---- targets


def _in_file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    """A parser of a file, as one of bytes."""

    def parse(data: bytes) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            return read(path)

    return parse


class _Trusting(Seals):
    """Of somebody who knows the token: any frame is believed to be the next one."""

    def __init__(self) -> None:
        super().__init__("worker", "w", False, bytes(32), bytes(32))

    def check(self, tag: bytes | memoryview, *parts: bytes | memoryview) -> None:
        pass


def _greeted(data: bytes) -> bytes:
    return Greeter(keys_of(b"t" * 32, frozenset({"worker"})), "127.0.0.1:1").feed(data)


def _answered() -> bytes:
    caller = Caller(role_token(b"t" * 32, "worker", "w"), "worker", "w", Ends("127.0.0.1:2", "127.0.0.1:1"))
    return caller.answer(Greeter(keys_of(b"t" * 32, frozenset({"worker"})), "127.0.0.1:1").greeting)


_ABOUT = messages.CommandReply(
    request=1, ok=True, error="", result={"time_unix_ns": 5, "versions": {"torch": "2"}, "mtu": 1500, "padding": ""}
)


@functools.cache
def _tls() -> Tls:
    shown = shown_by(TlsConfig("on"), b"t" * 32, "127.0.0.1")
    if shown is None:
        raise AssertionError("nothing is shown")
    return Tls(shown)


def _client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def _secured(data: bytes) -> bytes:
    pipe = _tls().pipe()
    return b"".join(pipe.feed(data[at : at + 99]) for at in range(0, len(data), 99))


_LAUNCHER = b"SLURM_STEP_ID=0\nSLURM_PROCID=3\nSLURM_STEP_NUM_TASKS=8\nSLURM_LOCALID=1\nSLURM_NODEID=1\n"
_LAUNCHER += b"SLURM_STEP_TASKS_PER_NODE=2(x3),1(x2)\nMASTER_ADDR=a\nMASTER_PORT=5\nSLURM_STEP_NODELIST=n[07-09,12],m3"


def _launcher(data: bytes) -> None:
    environ = dict(line.partition("=")[::2] for line in data.decode("latin-1").splitlines())
    foreign = foreign_launcher(environ)
    if foreign is not None:
        foreign.check()
        derived_ports(foreign.key + first_host(environ.get("SLURM_STEP_NODELIST", "")))


class _Store:
    """A launcher's, in which somebody has written."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def set(self, key: str, value: str) -> None:
        pass

    def get(self, key: str) -> bytes:
        return self._data


def _framed(body: bytes) -> bytes:
    return wire.frame(body, deflate=True) + bytes(TAG_BYTES)


def _frames(data: bytes) -> list[bytes]:
    reader = wire.FrameReader(_Trusting())
    return [body for at in range(0, len(data), 7) for body in reader.feed(data[at : at + 7])]


def _shown_events(data: bytes) -> list[dict[str, Any]]:
    lines = Lines()
    found = list(parse_events(b"".join(lines.whole(data[at : at + 50]) for at in range(0, len(data), 50))))
    for incident in facts_of(found).incidents.all:
        incident.line()
    account(found).to_dict()
    for event in found:
        sentence(event)
    return found


def _history(run_dir: Path) -> str:
    history = History(run_dir)
    history.load()
    history.seconds(False)
    history.headline(False)
    history.headline(True, {})
    return history.state(False)


def _resealed(data: bytes) -> bytes:
    """A sealed file whose digest fits its body, be that what it may."""
    head, _, body = data.partition(b"\n")
    found = re.match(rb'\{"everstep_([a-z]{1,20})":(\d{1,9})', head)
    if found is None:
        return data
    plain, signature = detach(head + b"\n" + body)
    body = plain.partition(b"\n")[2].removesuffix(b"}\n")
    digest = digest_bytes(b"%s %s\n" % (found[1], found[2]) + body)
    text = b'{"everstep_%s":%s,"digest":"%s","body":\n%s}\n' % (found[1], found[2], digest.encode(), body)
    return text if signature is None else attach(text, signature)


def _rechecked(data: bytes) -> bytes:
    """Journal lines whose checksums fit."""
    bodies = [line.partition(b" ")[2] for line in data.split(b"\n")[:-1]]
    return b"".join(b"%08x %s\n" % (zlib.crc32(body), body) for body in bodies)


def _manifest_samples() -> list[bytes]:
    from checkpoint_saving import make_state, save

    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), make_state(1, {"weight": (50, 40), "bias": (9,)}), 1, metrics={"accuracy": 0.5})
        text = (Path(folder) / manifest_name(1)).read_bytes()
    return [text, attach(text, {"key": "ab" * 32, "files": ["cd" * 32], "value": "ef" * 64})]


def _message_samples() -> list[bytes]:
    said = [
        messages.Command(request=1, name="scale", args={"workers": 2, "more": [None, True, 1.5, "x"]}),
        messages.CommandReply(request=1, ok=True, error="", result={"step": 3, "list": [[1], {"a": b"x"}]}),
    ]
    return [messages.encode(message) for message in said]


_EVENTS = b"".join(
    format_event(kind, 10**18, {"step": 3, "generation": 2, "worker_id": 1, "incarnation": 0, "reason": "why", **more})
    for kind, more in {
        "job_started": {"workers": 2, "step": 0},
        "generation_started": {"workers": [0, 1], "lanes": {"0": [0, 1]}, "stages": [[0], [1]]},
        "step_committed": {"loss": 0.5, "samples": 64},
        "worker_evicted": {"cause": "killed"},
        "recovery_completed": {"duration_s": 0.5, "phases_s": {"notice": 0.1, "redo": 0.2}},
        "checkpoint_completed": {"tier": "disk", "duration_s": 1.0, "size_bytes": 100, "stall_s": 0.1, "skipped": 0},
        "evaluated": {"metrics": {"accuracy": 0.5}},
        "job_completed": {"state": "completed", "exit_code": 0},
    }.items()
)
_YAML = (
    b"lanes: 8\nsteps: 12\nloader: {workers: 2}\ncheckpoint:\n  disk: &d {keep_last: 3}\n  object: *d\nclip_norm: 1.5\n"
)
_CHAOS = (
    *(b"kill:target=worker:2,at=30; stop:target=worker:1,at=50,for=5; kill:target=coordinator,at=60",),
    *(b"random:p=0.02,seed=7,after_step=30", b"kill:target=leader:0,at=70,phase=agree"),
)
_ROWS = b"".join(encode_row(LedgerRow(s, 1, (LaneUse(0, 1, 8, 1 << 63), LaneUse(1, 0, 8, 0)))) for s in (1, 2))
_JOURNAL = format_entry({"kind": "plan", "plan": {"generation": 1}}) + format_entry({"kind": "ticket", "ticket": 3})
_HEADER = json.dumps({"__metadata__": {"a": "b"}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
_JOB = {"task": "t", "argv": ["a"], "config": {"lanes": 8, "loader": {"workers": 1}}, "dataset_size": 128}
_JOB |= {
    "explicit": ["lanes"],
    "versions": {"torch": "2"},
    "created_unix_ns": 10**18,
    "begins_after": 3,
    "unit_ms": [1.5],
}


_ETCD_WHERE = {"pid": 1, "host": "10.0.0.1", "port": 2, "tls": "off", "ca": ""}
_ETCD_PAIR = {"key": "L2E=", "value": "YQ==", "create_revision": "3", "mod_revision": "4", "lease": "5"}
_ETCD_REPLY = {
    "header": {"revision": "7"},
    "kvs": [_ETCD_PAIR],
    "succeeded": True,
    "responses": [{"response_range": {"kvs": [_ETCD_PAIR]}}],
    "result": {"TTL": "2"},
    "token": "abc.7",
    "error": {"message": "etcdserver: permission denied"},
}


_HOSTS = b"""{"a":{"agent_id":"a","apart":true,"disk":"x","address":"h:1"},
"b":{"agent_id":"b","apart":false,"disk":"y","address":"i:2","domains":{"rack":"r1"}}}"""


def _hosts(path: Path) -> object:
    return others(path.parent, "b"), hosts_apart(path.parent), domains_there(path.parent)


def _etcd_address(data: bytes) -> EtcdAddress:
    return EtcdAddress.parse("a test", data.decode("latin-1"))


def _etcd_where(data: bytes) -> dict[str, Any]:
    return checked_where(dict(parse_json(data.decode("latin-1"))))


def _plan_samples() -> list[bytes]:
    members = [Member(i, 0, f"host-{i // 2}", 100 + i, f"10.0.0.{i}:{7000 + i}", f"s{i}") for i in range(4)]
    seats = tuple(Seat(i, 0, "active", (i,)) for i in range(4))
    plan = Plan(1, "begun", tuple(members), seats, 4)
    after = replace(plan, generation=2, members=plan.members[1:], seats=plan.seats[1:])
    return [messages.encode(told(plan, None)), messages.encode(told(after, plan))]


def _told_plan(data: bytes) -> None:
    message = messages.decode(data)
    if isinstance(message, messages.PlanTold):
        heard(message, None)


def targets() -> list[FuzzTarget]:
    """All of them."""
    as_json: Callable[[Any], bytes] = lambda found: json.dumps(found, sort_keys=True).encode()  # noqa: E731
    manifests = _manifest_samples()
    record = records.encode(Record(prepared=1, payload=b"abc"))
    report = encode_report(PartReport(1, 1, 0, 0, ((0, 4),)))
    return [
        FuzzTarget("json", [as_json(_JOB), b'{"a":{"b":[1,2,null]}}'], parse_json, (ValueError,), as_json),
        FuzzTarget("etcd-address", [b"etcd://10.0.0.1,[::1]:2379/jobs/mine", b"etcds://e1/j"], _etcd_address),
        FuzzTarget("etcd-reply", [as_json(_ETCD_REPLY)], lambda data: read_reply(data, "a member"), (NoReply,)),
        FuzzTarget("etcd-where", [as_json(_ETCD_WHERE)], _etcd_where, (EverstepError, ValueError, TypeError)),
        FuzzTarget("frames", [_framed(b"abc") * 3, _framed(bytes(20_000))], _frames),
        FuzzTarget("handshake", [bytes(60), _answered()], _greeted),
        FuzzTarget("token", [b"ab" * 32], lambda data: wire.token_of(data.decode("latin-1"), "x")),
        FuzzTarget("messages", _message_samples(), messages.decode, again=messages.encode),
        FuzzTarget("plans", _plan_samples(), _told_plan),
        FuzzTarget("about", [messages.encode(_ABOUT)], lambda data: heard_of(messages.decode(data), 1, 2)),
        FuzzTarget("record", [record], records.decode_record, again=records.encode),
        FuzzTarget("report", [report], decode_report, again=encode_report),
        FuzzTarget("manifest", manifests, lambda data: decode_manifest(data, "m"), mend=_resealed,
                   again=lambda found: found.encode()),
        FuzzTarget("sealed", [seal("pins", {"pins": {"a": 3}}), *manifests],
                   lambda data: unseal_one_of("pins", data, "m", (1,)), mend=_resealed,
                   again=lambda found: seal("pins", found[1])),
        FuzzTarget("events", [_EVENTS], _shown_events, (), lambda found: b"".join(as_json(e) + b"\n" for e in found)),
        FuzzTarget("lines", _EVENTS.splitlines(), object_of, ()),
        FuzzTarget("history", [_EVENTS], _in_file("run/events.jsonl", lambda path: _history(path.parent)), ()),
        FuzzTarget("metrics", [b'{"time_unix_ns":1,"worker_id":0,"row":{"step":3,"phase":"load","samples":8}}\n'],
                   _in_file("metrics/host.jsonl", lambda path: _history(path.parents[1])), ()),
        FuzzTarget("config", [_YAML], _in_file("c.yaml", lambda path: load_config([("c", read_config_file(path))])),
                   again=lambda found: json.dumps(to_dict(found)).encode()),
        FuzzTarget("chaos", _CHAOS, lambda data: parse_chaos(data.decode("utf-8", "surrogateescape")),
                   again=lambda found: "; ".join(map(str, found)).encode()),
        FuzzTarget("domains", [b"rack=r1,nvlink=u7"], lambda data: parse_domains(data.decode("latin-1"), "x"),
                   again=lambda found: ",".join(f"{kind}={name}" for kind, name in found.items()).encode()),
        FuzzTarget("chaos now", _CHAOS[2:], lambda data: parse_now(data.decode("latin-1"))),
        FuzzTarget("ledger", [_ROWS], decode_rows, (), lambda found: b"".join(map(encode_row, found))),
        FuzzTarget("journal", [_JOURNAL], lambda data: parse_journal(data)[0], (), mend=_rechecked),
        FuzzTarget("job", [as_json(_JOB)], _in_file("job.json", lambda path: read_job(path.parent)),
                   again=lambda found: json.dumps(found.to_dict()).encode()),
        FuzzTarget("digest", [b'{"version":1,"step":3,"model":"ab","state":"cd"}'],
                   _in_file("final/digest.json", lambda path: read_digest(path.parents[1]))),
        FuzzTarget("tls", [_client_hello()], _secured),
        FuzzTarget("launcher", [_LAUNCHER], _launcher),
        FuzzTarget("meeting", [b"10.0.0.1:4000"], lambda data: exchange(_Store(data), 0, "localhost")),
        FuzzTarget("address", [b'{"pid":3,"host":"127.0.0.1","port":80}'], _in_file("coordinator.json", read_address)),
        FuzzTarget("hosts", [_HOSTS],
                   _in_file("hosts.json", _hosts), ()),
        FuzzTarget("replica", [b'{"place":"ab","complete":true,"versions":{"events.jsonl":"7","job.json":"8-2-9"}}'],
                   _in_file("replica.json", lambda path: DirectoryCopy(path.parent).versions), ()),
        FuzzTarget("told", [_EVENTS, b'{"kind":"step_committed","step":3,"came_from":"0123456789abcdef:9"}\n'],
                   _in_file("events.jsonl", lambda path: ToldFile(path).look()), ()),
        FuzzTarget("published", [b'{"begun_ns":1,"lines":3,"sampled_s":1.5,"sampled_step":1,"memory":{"a":"b"}}'],
                   _in_file("published.json", lambda path: read_cursor(path.parent)), ()),
        FuzzTarget("notes", [b'{"tags":["a","b"],"note":"as it was"}'],
                   _in_file("notes.json", lambda path: read_notes(path.parent)), ()),
        FuzzTarget("excerpt", [b'{"time_unix_ns":5,"kind":"warning","step":1}\n{"time_unix_ns":7,"kind":"x"}\n'],
                   _in_file("events.jsonl", lambda path: around(path.parent, 6)), ()),
        FuzzTarget("weights", [struct.pack("<Q", len(_HEADER)) + _HEADER + bytes(8)],
                   _in_file("m.safetensors", lambda path: list(read_weights(path)))),
        *_conversations(),
    ]  # fmt: skip


def _conversations() -> list[FuzzTarget]:
    import fuzz_conversations as said

    gather = records.encode(records.GatherPayload(b"abc", 5))
    return [
        FuzzTarget("holding", [said.holding()], records.decode_holding, again=records.encode_holding),
        FuzzTarget("agree", [said.agree()], said.concluded, said.REFUSED),
        FuzzTarget("gather", [gather], said.gathered),
        FuzzTarget("offer", [said.offer()], said.offered),
        FuzzTarget("feed", [said.fed()], lambda data: said.followed(data, _Trusting())),
        FuzzTarget("small state", [said.small_state()], said.unpacked),
        FuzzTarget("blocks", said.heads(), said.blocks),
        FuzzTarget("dashboard", said.REQUESTS, said.page_server(), ()),
        FuzzTarget("object store", said.ANSWERS, said.store_client()),
    ]
