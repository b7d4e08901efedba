"""What a host has to be let in by etcd: who says it, and what is refused before anything is asked."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from certificates import own_ca
from everstep.base.config import Config
from everstep.base.config_keys import ControlConfig
from everstep.base.errors import ConfigError
from everstep.base.etcd_address import EtcdAddress
from everstep.cli.main import run_command
from everstep.runtime.lead.etcd_access import SECRETS, find_access, taken_secrets
from everstep.runtime.lead.succession import Succession
from everstep.runtime.start import Start

SECURED, PLAIN = (EtcdAddress.parse("a test", f"{scheme}://127.0.0.1:1/jobs") for scheme in ("etcds", "etcd"))
CA, CERT, KEY = (f"EVERSTEP_ETCD_{kind}" for kind in ("CA", "CERT", "KEY"))
USER, PASSWORD = SECRETS
Files = dict[str, str]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Paths of a CA, a certificate and its key, and of what is none of them."""
    folder, made, other = tmp_path_factory.mktemp("etcd"), own_ca("127.0.0.1"), own_ca("127.0.0.1")
    texts = {"ca": made.ca, "cert": made.cert, "key": made.key, "other": other.key, "none": "nonsense", "empty": ""}
    for name, text in texts.items():
        (folder / name).touch(0o600)
        (folder / name).write_text(text)
    return {name: str(folder / name) for name in texts} | {"folder": str(folder)}


def test_the_environment_of_a_host_goes_before_the_config_of_all(files: Files) -> None:
    control = ControlConfig(etcd_ca=files["none"], etcd_cert=files["cert"], etcd_key=files["key"])
    found = find_access(SECURED, control, {CA: files["ca"], USER: "me", PASSWORD: "se cret"})
    assert found.paths == {name: files[name] for name in ("ca", "cert", "key")}
    assert found.names == {"ca": f"${CA}", "cert": "control.etcd_cert", "key": "control.etcd_key"}
    assert (found.user, found.password) == ("me", "se cret") and "se cret" not in repr(found)
    assert find_access(SECURED, ControlConfig(), {}).paths == {}, "the system's CAs"
    assert find_access(PLAIN, ControlConfig(), {}).context is not None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({CA: "/nowhere"}, rf"\${CA}: cannot read /nowhere: No such file"),
        ({CA: "{folder}"}, rf"\${CA}: cannot read .*: Is a directory"),
        ({CA: "{none}"}, rf"\${CA}: expected certificates in PEM form, found none in"),
        ({CA: "{empty}"}, rf"\${CA}: expected certificates in PEM form, found none in"),
        ({CERT: "{cert}"}, rf"\${CERT}: expected control.etcd_key, or \${KEY}, with it"),
        ({KEY: "{key}"}, rf"\${KEY}: expected control.etcd_cert, or \${CERT}, with it"),
        ({CERT: "{cert}", KEY: "{other}"}, rf"\${CERT}: expected a certificate in .*/cert, and its key.*mismatch"),
        ({CERT: "{none}", KEY: "{key}"}, rf"\${CERT}: expected a certificate in"),
        ({USER: "me"}, rf"\${USER}: expected \${PASSWORD} with it, got none"),
        ({PASSWORD: "secret"}, rf"\${PASSWORD}: expected \${USER} with it, got none"),
        ({USER: "me", PASSWORD: "secret\n"}, rf"\${PASSWORD}: expected up to 4096 printable characters"),
    ],
)
def test_bad_input(environment: dict[str, str], expected: str, files: Files) -> None:
    given = {name: text.format(**files) for name, text in environment.items()}
    with pytest.raises(ConfigError, match=expected) as caught:
        find_access(SECURED, ControlConfig(), given)
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)


def test_what_would_be_sent_in_the_clear_or_has_no_effect_is_refused(files: Files) -> None:
    with pytest.raises(ConfigError, match=rf"\${PASSWORD}: expected an address like etcds.*in the clear"):
        find_access(PLAIN, ControlConfig(), {USER: "me", PASSWORD: "secret"})
    with pytest.raises(ConfigError, match=r"control\.etcd_ca: expected an address like etcds.*knows no TLS"):
        find_access(PLAIN, ControlConfig(etcd_ca=files["ca"]), {})


def test_a_key_that_others_can_read_is_warned_of(files: Files) -> None:
    found = find_access(SECURED, ControlConfig(etcd_cert=files["cert"], etcd_key=files["key"]), {})
    assert found.warning() == ""
    Path(files["key"]).chmod(0o644)
    assert "control.etcd_key: any user of this host can read the key in" in found.warning()
    Path(files["key"]).chmod(0o600)


def test_secrets_are_taken_out_of_the_environment() -> None:
    environment = {USER: "me", PASSWORD: "secret", "HOME": "/"}
    secrets = taken_secrets(environment)
    assert (secrets, environment) == ({USER: "me", PASSWORD: "secret"}, {"HOME": "/"})
    begun = Start(Config(), secrets=secrets, succession=Succession(owner="one"))
    assert "secret" not in " ".join([*begun.succession.words(begun.address), repr(begun)])


@pytest.mark.parametrize("command", [["agent"], ["agent", "--standby"], ["doctor"]])
def test_commands_refuse_it_in_one_line(
    command: list[str], files: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: Callable[[str], tuple[int, str]] = lambda address: (  # noqa: E731
        run_command([*command, "--join", address]),
        capsys.readouterr().err,
    )
    for name, path in ((CA, files["ca"]), (CERT, files["cert"])):
        monkeypatch.setenv(name, path)
    for address, expected in [
        (str(SECURED), f"${CERT}: expected control.etcd_key, or ${KEY}, with it"),
        (str(PLAIN), f"${CERT}: expected an address like etcds://"),
        ("etcds://", "--join: expected members of etcd and a prefix"),
    ]:
        monkeypatch.setenv("EVERSTEP_TOKEN", sha256(b"ab").hexdigest())
        code, words = said(address)
        assert code == 2 and expected in words and words.count("\n") == 1, words


@pytest.mark.parametrize("command", ["agent", "doctor"])
def test_a_host_may_say_its_files_after_set(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVERSTEP_TOKEN", sha256(b"ab").hexdigest())
    assert run_command([command, "--join", str(SECURED), "--set", "control.etcd_ca=/nowhere"]) == 2
    assert "control.etcd_ca: cannot read /nowhere: No such file" in capsys.readouterr().err
