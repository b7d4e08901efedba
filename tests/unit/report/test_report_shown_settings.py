"""Settings that others may see, and those that may be secrets."""

from __future__ import annotations

import pytest

from everstep.report.shown_settings import HIDDEN, shown_settings


@pytest.mark.parametrize(
    ("group", "name", "value", "hidden"),
    [
        ("env", "HF_TOKEN", "x", True),
        ("env", "AWS_SECRET_ACCESS_KEY", "x", True),
        ("env", "db_password", "x", True),
        ("env", "KEY", "x", True),
        ("env", "PGPASSWORD", "x", True),
        ("env", "MYSQL_PWD", "x", True),
        ("env", "WANDB_APIKEY", "x", True),
        ("env", "HUB_TOKENS", "x", True),
        ("env", "HF_TOKEN", "", False),
        ("env", "TOKENIZERS_PARALLELISM", "false", False),
        ("env", "XAUTHORITY", "/home/me/.Xauthority", False),
        ("env", "MONKEY", "x", False),
        ("env", "HTTPS_PROXY", "http://me:hush@proxy:3128", True),
        ("env", "BROKER", "redis://:hush@host/0", True),
        ("env", "HTTPS_PROXY", "http://proxy:3128", False),
        ("env", "MIRROR", "http://host:80/a@b", False),
        ("notify", "command", "mail.sh me@here", True),
        ("network", "etcd", ["https://me:hush@one:2379"], True),
        ("network", "token", "x", False),  # only variables go by their names
    ],
)
def test_what_is_hidden(group: str, name: str, value: object, hidden: bool) -> None:
    assert shown_settings({group: {name: value}, "seed": 0}) == {group: {name: HIDDEN if hidden else value}, "seed": 0}
