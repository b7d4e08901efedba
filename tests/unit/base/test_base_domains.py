"""Labels of failure domains: what is taken, what is found, and what is refused in one line."""

from __future__ import annotations

import pytest

from everstep.base.domains import found_domains, ordered, parse_domains
from everstep.base.errors import ConfigError


def test_labels_are_taken_whatever_their_order_and_kept_the_widest_first() -> None:
    labels = parse_domains("nvlink=u7, rack=r1", "--domain")
    assert labels == {"nvlink": "u7", "rack": "r1"}
    assert ordered(labels, "h3", "0") == (("rack", "r1"), ("nvlink", "u7"), ("host", "h3"), ("gpu", "0"))
    assert ordered({}, "h3") == (("host", "h3"),)


@pytest.mark.parametrize(
    "text",
    ["", "rack", "rack=", "=r1", "shelf=1", "host=h1", "rack=r 1", "rack=-", "rack=r1,,", f"rack={'r' * 64}", "rack=é"],
)
def test_anything_else_is_one_line_that_says_what_was_expected(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_domains(text, "--domain")
    words = str(refused.value)
    assert words.startswith("--domain: expected labels like rack=r1,nvlink=u7 of region, zone") and "\n" not in words


def test_a_label_that_is_said_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="--domain: expected each label once, got rack twice"):
        parse_domains("rack=r1,rack=r2", "--domain")


def test_what_is_given_goes_before_the_environment_and_that_before_slurm() -> None:
    slurm = {"SLURM_TOPOLOGY_ADDR": "s0.s4.node7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    assert found_domains(None, {}) == {}
    assert found_domains(None, slurm) == {"switch": "s4"}
    assert found_domains(None, slurm | {"EVERSTEP_DOMAIN": "rack=r1"}) == {"switch": "s4", "rack": "r1"}
    both = slurm | {"EVERSTEP_DOMAIN": "rack=r1,switch=s9"}
    assert found_domains("rack=r2", both) == {"switch": "s9", "rack": "r2"}
    with pytest.raises(ConfigError, match=r"\$EVERSTEP_DOMAIN: expected labels"):
        found_domains(None, {"EVERSTEP_DOMAIN": "r1"})


@pytest.mark.parametrize(
    ("address", "pattern", "labels"),
    [
        ("b3.node7", "block.node", {"nvlink": "b3"}),
        ("node7", "node", {}),
        ("s[0-1].s4.node7", "switch.switch.node", {"switch": "s4"}),
        ("s[0-1].node7", "switch.node", {}),
        ("s0", "switch.switch.node", {"switch": "s0"}),
        ("", "switch.node", {}),
        ("s0.n1", "", {}),
    ],
)
def test_what_slurm_says_of_its_network(address: str, pattern: str, labels: dict[str, str]) -> None:
    assert found_domains(None, {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}) == labels
