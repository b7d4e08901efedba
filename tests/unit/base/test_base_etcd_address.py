"""Addresses of an etcd, as people type them."""

from __future__ import annotations

import pytest

from everstep.base.config import load_config
from everstep.base.errors import ConfigError
from everstep.base.etcd_address import EtcdAddress


def test_members_and_prefix_are_read() -> None:
    found = EtcdAddress.parse("--join", "etcd://10.0.0.1,node-2:23790,[::1]:1/jobs/mine/")
    assert found == EtcdAddress(("10.0.0.1:2379", "node-2:23790", "[::1]:1"), "/jobs/mine")
    assert EtcdAddress.parse("--join", str(found)) == found
    secured = EtcdAddress.parse("--join", "etcds://e1/jobs")
    assert secured == EtcdAddress(("e1:2379",), "/jobs", tls=True)
    assert EtcdAddress.parse("--join", str(secured)) == secured


@pytest.mark.parametrize(
    "text",
    [
        *("", "etcd://", "10.0.0.1:2379/jobs", "etcd://10.0.0.1", "etcd://10.0.0.1/", "etcd:///jobs"),
        *(
            "etcd://a:0/jobs",
            "etcd://a:70000/jobs",
            "etcd://a,,b/jobs",
            "etcd://a b/jobs",
            "etcd://a/jobs/../x\n",
            "etcdss://a/jobs",
        ),
    ],
)
def test_what_is_no_address_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="--join: expected members of etcd and a prefix like etcd://") as caught:
        EtcdAddress.parse("--join", text)
    assert "\n" not in str(caught.value)


def test_the_config_refuses_what_is_none() -> None:
    with pytest.raises(ConfigError, match=r"control\.etcd"):
        load_config([("--set", {"control": {"etcd": "10.0.0.1:2379"}})])
    with pytest.raises(ConfigError, match=r"control\.lease_s"):
        load_config([("--set", {"control": {"lease_s": 0}})])
