"""An etcd with certificates and passwords: who is let in, who is not and hears why, and jobs that have it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

import pytest

from certificates import own_ca
from etcd_members import EtcdMembers, etcd_there
from everstep.base.config_keys import ControlConfig
from everstep.base.errors import ConfigError, EverstepError, NoHead
from everstep.base.etcd_address import EtcdAddress
from everstep.cli.main import run_command
from everstep.protocol.lease.requests import Append, Appended, Campaign, HolderSeen, Load, Loaded, Look
from everstep.runtime.lead.etcd import Etcd
from everstep.runtime.lead.etcd_access import EtcdAccess, find_access
from everstep.runtime.lead.etcd_gateway import Gateway
from job_harness import Jobs, healed

TOKEN = b"t" * 32
USER, PASSWORD = "trainer", "a p@ss:wörd"
AS_USER = {"EVERSTEP_ETCD_USER": USER, "EVERSTEP_ETCD_PASSWORD": PASSWORD}
WHERE = {"pid": 1, "host": "10.0.0.1", "port": 1, "tls": "off", "ca": ""}
NUMERICS = {"steps": 12}


class Secured(EtcdMembers):
    """Members that want certificates, and a user who may write under /jobs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1",), ca_seed=b"c" * 32)
        self.wait()
        address = EtcdAddress.parse("a test", self.url())
        self.root = Gateway(address, 5.0, find_access(address, ControlConfig(), self.files()))
        for user, password in (("root", "of all"), (USER, PASSWORD)):
            self.root.post("auth/user/add", {"name": user, "password": password})
        self.root.post("auth/role/add", {"name": "jobs"})
        what = {"permType": "READWRITE", "key": "L2pvYnMv", "range_end": "L2pvYnMw"}  # /jobs/ to /jobs0
        self.root.post("auth/role/grant", {"name": "jobs", "perm": what})
        self.root.post("auth/user/grant", {"user": "root", "role": "root"})
        self.root.post("auth/user/grant", {"user": USER, "role": "jobs"})
        self.root.post("auth/enable", {})
        known = find_access(address, ControlConfig(), {**self.files(), **_named("root", "of all")})
        self.root = Gateway(address, 5.0, known)

    def access(self, said: Mapping[str, str] | None = None, **changes: str) -> EtcdAccess:
        """As the environment of a host says it. changes: other files."""
        paths = {**self.files(), **{f"EVERSTEP_ETCD_{kind.upper()}": path for kind, path in changes.items()}}
        environment = {name: path for name, path in paths.items() if path} | dict(AS_USER if said is None else said)
        return find_access(EtcdAddress.parse("a test", self.url()), ControlConfig(), environment)


def _named(user: str, password: str) -> dict[str, str]:
    return {"EVERSTEP_ETCD_USER": user, "EVERSTEP_ETCD_PASSWORD": password}


@pytest.fixture(scope="module")
def members() -> Iterator[Secured]:
    etcd_there()
    found = Secured()
    yield found
    found.close()


def client(members: Secured, prefix: str, access: EtcdAccess | None = None) -> Etcd:
    address = EtcdAddress.parse("a test", members.url(prefix))
    return Etcd(address, TOKEN, 5.0, access=access or members.access())


def test_a_user_whose_token_has_ended_gets_another_one(members: Secured) -> None:
    etcd = client(members, "/jobs/tokens")
    assert etcd.ask(Campaign("one", WHERE, 30)) == Appended()
    seen = etcd.ask(Look())
    assert isinstance(seen, HolderSeen) and seen.holder is not None
    for number in range(1, 4):
        members.root.post("auth/user/changepw", {"name": USER, "password": PASSWORD})  # ends all tokens of the user
        assert etcd.ask(Append(seen.holder.term, number, [{"n": number}])) == Appended()
    members.root.post("auth/user/changepw", {"name": USER, "password": PASSWORD})
    assert etcd.ask(Load()) == Loaded([{"n": 1}, {"n": 2}, {"n": 3}], 4)
    etcd.resign(seen.holder.lease)


def test_who_is_not_let_in_hears_why(members: Secured, tmp_path: Path) -> None:
    foreign = own_ca("127.0.0.1", seed=b"f" * 32, name="")
    named = own_ca("127.0.0.1", seed=b"c" * 32, name="somebody")
    for who, made in (("foreign", foreign), ("named", named)):
        for kind, text in (("ca", made.ca), ("cert", made.cert), ("key", made.key)):
            (tmp_path / f"{who}.{kind}").write_text(text)
    theirs = {who: {kind: str(tmp_path / f"{who}.{kind}") for kind in ("cert", "key")} for who in ("foreign", "named")}

    def refusal(access: EtcdAccess, url: str = "") -> tuple[type[EverstepError], str]:
        etcd = Etcd(EtcdAddress.parse("a test", url or members.url("/jobs/refused")), TOKEN, 5.0, access=access)
        with contextlib.closing(etcd), pytest.raises(EverstepError) as caught:
            etcd.announced()
        assert "\n" not in str(caught.value) and PASSWORD not in str(caught.value)
        return type(caught.value), str(caught.value)

    elsewhere = members.url("/other")
    by_name = members.url("/jobs/refused").replace("127.0.0.1", "localhost")
    plain = members.url("/jobs/refused").replace("etcds", "etcd")
    wrong, nobody = _named(USER, "wrong"), dict[str, str]()
    unbelieved = "its certificate is not trusted here"
    for found, expected in [
        (
            refusal(members.access(ca=str(tmp_path / "foreign.ca"))),
            (NoHead, f"{unbelieved} (certificate signature failure)"),
        ),
        (refusal(members.access(ca="")), (NoHead, unbelieved)),
        (refusal(members.access(), by_name), (NoHead, "Hostname mismatch")),
        (refusal(members.access(**theirs["foreign"])), (NoHead, ": it ")),
        (refusal(members.access(cert="", key="")), (NoHead, "a certificate")),
        (refusal(EtcdAccess(), plain), (NoHead, "is it etcds:// there?")),
        (refusal(members.access(**theirs["named"])), (ConfigError, "show it one without a common name")),
        (refusal(members.access(wrong)), (ConfigError, f"does not let the user {USER!r} in: is $EVERSTEP_ETCD_PASS")),
        (refusal(members.access(nobody)), (ConfigError, "requires a user, got none: set $EVERSTEP_ETCD_USER")),
        (refusal(members.access(), elsewhere), (ConfigError, f"let the user {USER!r} read and write under /other/")),
    ]:
        assert found[0] is expected[0] and expected[1] in found[1], (found, expected)


def test_files_that_are_renewed_are_read_again(members: Secured, tmp_path: Path) -> None:
    before, after = own_ca("127.0.0.1", days=-1, seed=b"c" * 32, name=""), own_ca("127.0.0.1", seed=b"c" * 32, name="")
    paths = {kind: tmp_path / kind for kind in ("cert", "key")}
    for kind, path in paths.items():
        path.write_text(getattr(before, kind))
    etcd = client(members, "/jobs/renewed", members.access(**{kind: str(path) for kind, path in paths.items()}))
    with pytest.raises(NoHead):
        etcd.announced()
    for kind, path in paths.items():
        path.with_suffix(".new").write_text(getattr(after, kind))
        path.with_suffix(".new").replace(path)
    with contextlib.suppress(NoHead):  # it fails with what it has, and then looks at the files
        etcd.announced()
    assert etcd.announced() is None


@pytest.mark.longer
def test_a_job_has_it_and_keeps_its_secrets(members: Secured, jobs: Jobs, tmp_path: Path) -> None:
    """Its coordinator is lost: the next one is let in, too; workers, agents and files know no password."""
    job = jobs.start(
        "Text",
        workers=2,
        numerics=NUMERICS,
        settings={"control.etcd": members.url("/jobs/one"), "control.etcd_ca": members.file("client", "ca")},
        pace=[healed(1)],
        lane_s=0.2,
        environment={**AS_USER, **{k: v for k, v in members.files().items() if not k.endswith("_CA")}},
    )
    job.wait_for("step_committed", lambda e: e["step"] >= 2)
    pid = json.loads((job.run_dir / "coordinator.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    job.wait_for("coordinator_restarted")
    members.root.post("auth/user/changepw", {"name": USER, "password": PASSWORD})  # ends the coordinator's token
    worker = job.pid_of(1)
    assert PASSWORD.encode() not in Path(f"/proc/{worker}/environ").read_bytes()
    os.kill(worker, signal.SIGKILL)
    (tmp_path / "foreign").write_text(own_ca("127.0.0.1", seed=b"f" * 32).ca)
    lease = {"control.etcd": members.url("/jobs/two"), "control.etcd_ca": tmp_path / "foreign"}
    refused = jobs.start("Text", workers=1, numerics=NUMERICS, settings=lease)
    jobs.check(job, "Text", NUMERICS)
    written = (*job.run_dir.rglob("*"), *job.run_dir.parent.glob(f"{job.run_dir.name}.*"))
    assert not [path for path in written if path.is_file() and PASSWORD.encode() in path.read_bytes()]
    assert refused.end() == 4
    refused.wait_for_words(f"{members.addresses[0]}: its certificate is not trusted here")


@pytest.mark.parametrize(
    ("command", "foreign", "password", "code", "expected"),
    [
        (["agent"], True, PASSWORD, 4, "its certificate is not trusted here"),
        (["agent"], False, "wrong", 2, "is $EVERSTEP_ETCD_PASSWORD right?"),
        (["agent", "--standby"], False, "wrong", 2, "is $EVERSTEP_ETCD_PASSWORD right?"),
        (["doctor"], True, PASSWORD, 1, "its certificate is not trusted here"),
        (["doctor"], False, PASSWORD, 1, "no job has begun under etcds://"),
    ],
)
def test_commands_say_in_one_line_why_they_are_not_let_in(
    command: list[str],
    foreign: bool,
    password: str,
    code: int,
    expected: str,
    members: Secured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "foreign").write_text(own_ca("127.0.0.1", seed=b"f" * 32).ca)
    said = {**members.files(), **_named(USER, password), "EVERSTEP_TOKEN": sha256(b"ab").hexdigest()}
    for name, value in {**said, **({"EVERSTEP_ETCD_CA": str(tmp_path / "foreign")} if foreign else {})}.items():
        monkeypatch.setenv(name, value)
    assert run_command([*command, "--join", members.url("/jobs/none")]) == code
    found = capsys.readouterr()
    lines = (found.out if command == ["doctor"] else found.err).splitlines()
    assert len(lines) == 1 and expected in lines[0] and password not in lines[0], lines
    assert "EVERSTEP_ETCD_PASSWORD" not in os.environ
