"""Environment variables of workers, as keys of the config."""

from __future__ import annotations

import pytest

from everstep.base.config import load_config, to_dict
from everstep.base.errors import ConfigError


def test_variables_are_text_and_come_in_layers() -> None:
    layers = [("a.yaml", {"env": {"NCCL_IB_DISABLE": 1, "A": "x=y"}}), ("--set", {"env.A": "2"})]
    config = load_config(layers)
    assert config.env == {"NCCL_IB_DISABLE": "1", "A": "2"}
    assert load_config([("job.json", to_dict(config))]) == config


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("env.A B", "1", "expected the name of an environment variable"),
        ("env.", "1", "unknown key"),
        ("env.EVERSTEP_TOKEN", "ab", "not secret"),
        ("env.EVERSTEP_ETCD_PASSWORD", "ab", "not secret"),
        ("env.A", None, "expected text or a number"),
        ("env.A", [1], "expected text or a number"),
        ("env.A", "a\0b", "expected text or a number"),
        ("env", "A=1", "expected keys below it"),
    ],
)
def test_what_cannot_be_one(name: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as refused:
        load_config([("--set", {name: value})])
    assert "\n" not in str(refused.value)
