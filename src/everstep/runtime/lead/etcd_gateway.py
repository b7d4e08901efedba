"""Requests to the members of an etcd, over the JSON gateway that each of them has, on kept connections.

Apart from the requests' contents (`etcd`): here are the choice of the member, TLS, and a user's token, which ends now
and then. Source: etcd.io/docs, "gRPC gateway" and "Authentication"; texts of errors: etcd, api/v3rpc/rpctypes/error.go.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
from typing import Any

import msgspec

from everstep.base.errors import ConfigError
from everstep.base.etcd_address import EtcdAddress
from everstep.runtime.lead.etcd_access import NO_ACCESS, PASSWORD, USER, EtcdAccess

_MOST_BYTES = 64 << 20
_LOG_IN_S = 2.0  # members take a tenth of a second of a processor to compare a password
_NO_USER, _NO_USERS = "etcdserver: user name is empty", "etcdserver: authentication is not enabled"
_AGAIN = (_NO_USER, "etcdserver: invalid auth token", "etcdserver: revision of auth store is old")
"""Errors after which a member would serve the same request with a new token. The request has had no effect."""
_NAMED = "CommonName of client"
_TOO_LARGE, _LARGER = "etcdserver: request is too large", "message larger than max"


class Pair(msgspec.Struct):
    """A key and its value; texts in base64, numbers as texts."""

    key: str = ""
    value: str = ""
    create_revision: str = "0"
    mod_revision: str = "0"
    lease: str = "0"


class Range(msgspec.Struct):
    """Pairs of one range."""

    kvs: list[Pair] = []
    more: bool = False


class _Outcome(msgspec.Struct):
    response_range: Range | None = None


class _Head(msgspec.Struct):
    revision: str = "0"


class Reply(msgspec.Struct):
    """Reply to any request; absent fields have their defaults."""

    header: _Head = msgspec.field(default_factory=_Head)
    kvs: list[Pair] = []
    more: bool = False
    succeeded: bool = False
    responses: list[_Outcome] = []
    ID: str = "0"
    TTL: str = "0"
    result: dict[str, Any] = {}
    etcdserver: str = ""
    token: str = ""
    error: Any = None


class NoReply(Exception):
    """A member has not answered, or not as a member of etcd with a leader does. why: trouble other than silence."""

    def __init__(self, text: str, why: str = "") -> None:
        super().__init__(text)
        self.why = why


class Unwelcome(NoReply):
    """etcd does not let this host do that, at any member."""


class TooLarge(NoReply):
    """The request is too large for a member, and has had no effect."""


class _Stale(NoReply):
    """The request needs a new token."""


class Gateway:
    """Asks the members of one etcd. Thread-safe. timeout_s: for one request to one of them.

    Raises: ConfigError if httpx is not installed.
    """

    def __init__(self, address: EtcdAddress, timeout_s: float, access: EtcdAccess = NO_ACCESS) -> None:
        try:
            import httpx
        except ImportError:
            raise ConfigError("etcd needs httpx: pip install 'everstep[etcd]'") from None
        self.address = address
        self._access = access
        self._timeout_s = timeout_s
        self._errors = (httpx.HTTPError, httpx.InvalidURL)
        self._refused = httpx.ConnectError
        self._slow = httpx.TimeoutException
        self._new = httpx.Client
        self._limits = httpx.Limits(max_connections=8, max_keepalive_connections=8, keepalive_expiry=60.0)
        self._stamp: object = None
        self._http = self._client()
        self._turn = 0
        self._token = ""
        self._unwelcome = ""
        self._lock, self._entry = threading.Lock(), threading.Lock()

    def _client(self) -> Any:
        """Client with the certificates that are in the files now."""
        context: ssl.SSLContext | bool = True
        if self.address.tls:
            with contextlib.suppress(OSError):
                self._stamp = self._access.stamp()
            context = self._access.context()
        return self._new(timeout=self._timeout_s, limits=self._limits, trust_env=False, verify=context)

    def close(self) -> None:
        self._http.close()

    def post(self, what: str, asked: dict[str, Any]) -> Reply:
        """Send a request to one member; to the next if nobody listens there, or after a failure. Raises: NoReply."""
        failed: list[str] = []
        for _ in self.address.members:
            with self._lock:
                member = self.address.members[self._turn % len(self.address.members)]
            try:
                found = self._welcomed(member, f"/v3/{what}", asked)
                self._unwelcome = ""
                return found
            except Unwelcome as error:
                self._unwelcome = str(error)
                raise
            except TooLarge:
                raise
            except NoReply as error:
                failed.append(str(error))
                with self._lock:
                    self._turn += 1
                if not isinstance(error.__cause__, self._refused):
                    break  # it may have taken effect: the caller decides about a repetition
        raise NoReply("; ".join(failed))

    def trouble(self) -> str:
        """Trouble with etcd, in one line for people."""
        silent: dict[str, list[str]] = {}
        for member in self.address.members:
            try:
                if self._read("GET", member, "/version", None).etcdserver:  # the health request would ask the leader
                    continue
                raise NoReply("", "it does not speak as etcd does")
            except NoReply as error:
                silent.setdefault(error.why, []).append(member)
        count, lost = len(self.address.members), sum(map(len, silent.values()))
        if self._unwelcome and not silent:
            return self._unwelcome
        if not silent:
            return f"etcd at {','.join(self.address.members)} has no leader: check that its members reach each other"
        words = f"etcd without a quorum: {lost} of {count} members do not answer"
        what = "; ".join(", ".join(members) + (f": {why}" if why else "") for why, members in silent.items())
        how = "start them, or name others in control.etcd"
        if any(silent):
            how = "look at control.etcd, .etcd_ca, .etcd_cert and .etcd_key, or the variables in their place"
        return f"{words} ({what}): {how}"

    # ---- the user

    def _welcomed(self, member: str, path: str, asked: Any) -> Reply:
        """Post as the user, if there is one; an ended token is renewed."""
        token = self._token
        try:
            return self._read("POST", member, path, asked, token)
        except _Stale:
            token = self._log_in(member, token)
        try:
            return self._read("POST", member, path, asked, token)
        except _Stale as error:
            if not self._access.user:
                raise Unwelcome(f"etcd at {member} requires a user, got none: set ${USER} and ${PASSWORD}") from None
            raise NoReply(str(error), str(error)) from None

    def _log_in(self, member: str, ended: str) -> str:
        """Token of the user; "" if there is no user, or etcd knows none. ended: the token that is no longer valid."""
        if not self._access.user:
            return ""
        with self._entry:
            if self._token != ended:
                return self._token  # another thread has renewed it
            asked = {"name": self._access.user, "password": self._access.password}
            self._token = self._read("POST", member, "/v3/auth/authenticate", asked, timeout_s=_LOG_IN_S).token
            return self._token

    # ---- one member

    def _read(self, method: str, member: str, path: str, asked: Any, token: str = "", timeout_s: float = 0.0) -> Reply:
        url = f"{'https' if self.address.tls else 'http'}://{member}{path}"
        headers = {"Authorization": token} if token else {}
        data, limit_s = bytearray(), max(timeout_s, self._timeout_s)
        try:
            with self._http.stream(method, url, json=asked, headers=headers, timeout=limit_s) as response:
                for chunk in response.iter_bytes():
                    data += chunk
                    if len(data) > _MOST_BYTES:
                        raise NoReply(f"{member} sends more than {_MOST_BYTES} bytes")
        except self._errors as error:
            why = self._why(error)
            self._renew()
            raise NoReply(f"{member}: {why or str(error) or type(error).__name__}", why) from error
        reply = read_reply(bytes(data), member) if response.status_code == 200 else _error_in(bytes(data))
        return reply if reply.error is None else self._refusal(member, reply.error)

    def _refusal(self, member: str, error: Any) -> Reply:
        """Raises: NoReply, unless the error only says that no token is needed."""
        said = error.get("message") if isinstance(error, dict) else error
        text = " ".join(str(said)[:200].split())
        user = self._access.user
        if text == _NO_USERS:
            return Reply()
        if text in _AGAIN:
            raise _Stale(f"{member}: {text}")
        if text.startswith("etcdserver: authentication failed"):
            raise Unwelcome(f"etcd at {member} does not let the user {user!r} in: is ${PASSWORD} right?")
        if text == "etcdserver: permission denied":
            prefix = self.address.prefix
            raise Unwelcome(f"etcd at {member} does not let the user {user!r} read and write under {prefix}/: grant it")
        if text == _TOO_LARGE or _LARGER in text:
            raise TooLarge(f"{member}: {text}")
        if text.startswith(_NAMED):
            raise Unwelcome(
                f"etcd at {member} has users, and takes no certificate that names one at its JSON gateway: "
                "show it one without a common name (control.etcd_cert)"
            )
        raise NoReply(f"{member}: {text}", "" if text.startswith("etcdserver: ") else text)

    def _why(self, error: BaseException) -> str:
        """Trouble with a member other than silence, in words; "" if it is only silent."""
        shows, cut = "cert" in self._access.paths, False
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return f"its certificate is not trusted here ({cause.verify_message.rstrip('.')})"
            if isinstance(cause, ssl.SSLError):
                code = (cause.reason or "").lower().replace("_", " ")
                if "alert" in code:
                    what = (
                        "refuses the certificate of this host"
                        if shows
                        else "wants a certificate of this host, and got none"
                    )
                    return f"it {what} ({code.partition('alert ')[2]})"
                return f"it does not speak TLS as expected ({code}): is it etcd:// there?"
            cut = cut or isinstance(cause, (ConnectionResetError, BrokenPipeError))
            cause = cause.__cause__ or cause.__context__
        if isinstance(error, (self._refused, self._slow)) and not cut:
            return ""
        if not self.address.tls:
            return "it ends the connection: is it etcds:// there?"
        return f"it ends the connection: {'is it etcd:// there?' if shows else 'does it want a certificate?'}"

    def _renew(self) -> None:
        """Make a new client after a failure: the certificate may have ended, and been renewed in its file."""
        if self._access.paths and self.address.tls:
            with contextlib.suppress(OSError, ConfigError):
                if self._access.stamp() != self._stamp:
                    self._http = self._client()  # the old client is closed after its last request


_reply = msgspec.json.Decoder(Reply)  # made here, as it is used by several threads


def read_reply(data: bytes, member: str) -> Reply:
    """Decode a member's reply. Raises: NoReply if it is not one of etcd's."""
    try:
        return _reply.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        text = f"{member} does not speak as etcd does"
        raise NoReply(text, "it does not speak as etcd does") from None


def _error_in(data: bytes) -> Reply:
    """Error text of a refusal, in etcd's form or HTTP's."""
    with contextlib.suppress(NoReply):
        reply = read_reply(data, "")
        if reply.error is not None:
            return reply
    return Reply(error=data[:200].decode(errors="replace").strip() or "an error without a message")
