"""Hosts and ports as one text."""

from __future__ import annotations

import pytest

from everstep.base.config import load_config
from everstep.base.doors import at_port, canonical, host_of, is_loopback, split_at_port
from everstep.base.errors import ConfigError


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [
        ("10.0.0.1", 29400, "10.0.0.1:29400"),
        ("host-1.example", 0, "host-1.example:0"),
        ("fd00::1", 29400, "[fd00::1]:29400"),
        ("::", 1, "[::]:1"),
    ],
)
def test_a_host_and_a_port_are_one_text_and_two_again(host: str, port: int, text: str) -> None:
    assert at_port(host, port) == text
    assert split_at_port(text) == (host, port) and host_of(text) == host


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        ":5",
        "a",
        "a:",
        "a:x",
        "a:-1",
        "a:70000",
        "a:٣",
        "fd00::1:5",
        "[fd00::1]",
        "[]:5",
        "[x]:5",
        "[1.2.3.4]:5",
    ],
)
def test_what_is_no_host_with_a_port_is_told_apart(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        split_at_port(text)
    assert host_of(text) == ""


def test_an_address_has_one_form() -> None:
    assert split_at_port("[FD00:0:0::01]:5") == ("fd00::1", 5)
    assert [canonical(text) for text in ("[FD00::01]", "FD00::01", "10.0.0.1", "A", "[A]")] == [
        "fd00::1",
        "fd00::1",
        "10.0.0.1",
        "A",
        "[A]",
    ]
    assert is_loopback("[::1]") and is_loopback("::1") and not is_loopback("fd00::1")


@pytest.mark.parametrize("address", ["::1", "fd00::1", "fd12:3456:789a:1::1"])
def test_a_job_may_have_an_address_of_either_kind(address: str) -> None:
    assert load_config([("test", {"network.address": address})]).network.address == address


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"network.address": "::"},
            "expected one IPv4 address of this host that other processes can use, or such an IPv6",
        ),
        ({"network.address": "fe80::1"}, "give e.g. network.address=::1"),
        ({"network.address": "ff02::1"}, "got 'ff02::1'"),
        ({"network.address": "::ffff:a00:1"}, "give e.g. network.address=10.0.0.1"),
        ({"network.address": "fd00:0:0::1"}, "give e.g. network.address=fd00::1"),
        ({"network.address": "2a00:1450::1"}, "network.trusted=true"),
        ({"network.address": "fd00::1", "network.listen": "::"}, "every interface"),
        ({"network.address": "fd00::1", "network.listen": "10.0.0.1"}, "two IPv4 or two IPv6 addresses"),
    ],
)
def test_an_address_that_others_could_not_use_is_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config([("test", given)])
    assert words in str(refused.value) and "\n" not in str(refused.value)
