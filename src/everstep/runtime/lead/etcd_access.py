"""Credentials of this host for etcd: the certificates that it believes and shows, and its user.

Hosts with one file layout find the files by the config, others by their environment, which goes first. A user's name
and password stand in the environment alone. They are taken out of it, and only the coordinator's process is given them.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

from everstep.base.config_keys import ControlConfig
from everstep.base.errors import ConfigError
from everstep.base.etcd_address import OVER_TLS, EtcdAddress
from everstep.runtime.link.tls import read_pem, show

USER, PASSWORD = SECRETS = ("EVERSTEP_ETCD_USER", "EVERSTEP_ETCD_PASSWORD")
_FILES = {"ca": "EVERSTEP_ETCD_CA", "cert": "EVERSTEP_ETCD_CERT", "key": "EVERSTEP_ETCD_KEY"}
_MOST_SECRET_CHARS = 4096


@dataclass(frozen=True)
class EtcdAccess:
    """paths: of the files "ca", "cert" and "key", as far as there are such; names: the key or variable that names each
    of them, for messages. user, password: "" for none."""

    paths: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    password: str = field(default="", repr=False)

    def context(self) -> ssl.SSLContext:
        """TLS context for connections to members, by the present files. Raises: ConfigError if one is malformed."""
        found = {name: read_pem(self.names[name], path) for name, path in self.paths.items()}
        try:
            context = ssl.create_default_context(cadata=found.get("ca"))
            if not found.get("ca", "-").strip():
                raise ValueError
        except (ssl.SSLError, ValueError):
            where = f"{self.names['ca']}: expected certificates in PEM form, found none in {self.paths['ca']}"
            raise ConfigError(where) from None
        if "cert" in found:
            try:
                show(context, found["cert"], found["key"])
            except (ssl.SSLError, ValueError) as error:
                why = (getattr(error, "reason", None) or "no certificate").lower().replace("_", " ")
                raise ConfigError(
                    f"{self.names['cert']}: expected a certificate in {self.paths['cert']}, and its key, without a "
                    f"password, in {self.paths['key']}, found something else ({why})"
                ) from None
        return context

    def stamp(self) -> tuple[object, ...]:
        """Text that changes when a file is renewed. Raises: OSError if one is not there."""
        found = [os.stat(path) for path in self.paths.values()]
        return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)

    def warning(self) -> str:
        """Warning about careless credentials, in one line; "" for none."""
        path = self.paths.get("key", "")
        if path and os.stat(path).st_mode & stat.S_IROTH:
            return f"{self.names['key']}: any user of this host can read the key in {path}: chmod o-r {path}"
        return ""


NO_ACCESS = EtcdAccess()


def taken_secrets(environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """User and password from the environment; they are removed there, so that no other process inherits them."""
    return {name: environment.pop(name) for name in SECRETS if name in environment}


def file_variables(control: ControlConfig) -> dict[str, str]:
    """The files of the config as variables, for a process that has not read the config yet."""
    return {variable: path for name, variable in _FILES.items() if (path := getattr(control, f"etcd_{name}"))}


def find_access(address: EtcdAddress, control: ControlConfig, environment: Mapping[str, str]) -> EtcdAccess:
    """This host's credentials for an etcd. environment: of this host, secrets included.

    Raises: ConfigError if something is missing, cannot be read, or would have no effect.
    """
    paths, names = dict[str, str](), dict[str, str]()
    by_config = {"ca": control.etcd_ca, "cert": control.etcd_cert, "key": control.etcd_key}
    for name, variable in _FILES.items():
        said = environment.get(variable) or by_config[name]
        if said:
            paths[name] = said
            names[name] = f"${variable}" if environment.get(variable) else f"control.etcd_{name}"
    user, password = (environment.get(name, "") for name in SECRETS)
    given = [*names.values(), *(f"${name}" for name in SECRETS if environment.get(name))]
    if given and not address.tls:
        why = "which would send it in the clear" if user or password else "which knows no TLS"
        raise ConfigError(f"{given[-1]}: expected an address like {OVER_TLS}... with it, got {address}, {why}")
    for one, other in (("cert", "key"), ("key", "cert")):
        if one in paths and other not in paths:
            raise ConfigError(
                f"{names[one]}: expected control.etcd_{other}, or ${_FILES[other]}, with it, got none: a certificate "
                "needs its key"
            )
    for one, value, other in ((USER, user, password), (PASSWORD, password, user)):
        if value and not other:
            raise ConfigError(f"${one}: expected ${PASSWORD if one == USER else USER} with it, got none")
        if len(value) > _MOST_SECRET_CHARS or not value.isprintable():
            raise ConfigError(f"${one}: expected up to {_MOST_SECRET_CHARS} printable characters, got something else")
    access = EtcdAccess(paths, names, user, password)
    if address.tls:
        access.context()
    return access
