"""As much of an etcd as a job asks of one, in this process; who has it can write there what they like."""

from __future__ import annotations

import base64
import threading
from typing import Any, NamedTuple

from everstep.base.etcd_address import EtcdAddress
from everstep.runtime.lead.etcd import Etcd
from everstep.runtime.lead.etcd_gateway import Pair, Range, Reply, _Head, _Outcome


class Value(NamedTuple):
    value: str
    created: int
    changed: int
    lease: str


class EtcdInMemory:
    """rows: by key."""

    def __init__(self) -> None:
        self.rows: dict[str, Value] = {}
        self._revision, self._leases = 0, 1000
        self._lock = threading.Lock()

    def client(self, token: bytes, **more: Any) -> Etcd:
        """One that asks this."""
        etcd = Etcd(EtcdAddress.parse("a test", "etcd://10.0.0.1/jobs/x"), token, 1.0, **more)
        etcd._keys.post = self.post  # type: ignore[method-assign,assignment]
        return etcd

    def put(self, key: str, value: str, lease: str = "0") -> None:
        """As anybody may who can write there."""
        with self._lock:
            self._revision += 1
            self._put(key, value, lease)

    def drop(self, key: str) -> None:
        """Remove it, as anybody may."""
        with self._lock:
            self._revision += 1
            del self.rows[key]

    def _put(self, key: str, value: str, lease: str) -> None:
        created = self.rows[key].created if key in self.rows else self._revision
        self.rows[key] = Value(value, created, self._revision, lease)

    def all(self) -> dict[str, Value]:
        """What somebody who reads along keeps."""
        return dict(self.rows)

    def post(self, what: str, asked: dict[str, Any]) -> Reply:
        """In the place of the gateway."""
        with self._lock:
            self._revision += what in ("kv/txn", "lease/revoke")
            return self._reply(what, asked)

    def _reply(self, what: str, asked: dict[str, Any]) -> Reply:
        reply = Reply()
        if what == "lease/grant":
            self._leases += 1
            reply.ID = str(self._leases)
        elif what == "lease/keepalive":
            held = any(row.lease == asked["ID"] for row in self.rows.values())
            reply.result = {"TTL": "30"} if held else {}
        elif what == "lease/revoke":
            for key in [key for key, row in self.rows.items() if row.lease == asked["ID"]]:
                del self.rows[key]
        elif what == "kv/range":
            found = self._range(asked)
            reply.kvs, reply.more = found.kvs, found.more
        else:
            reply.succeeded = all(self._holds(one) for one in asked.get("compare", ()))
            for one in asked.get("success" if reply.succeeded else "failure", ()):
                reply.responses.append(self._do(one))
        reply.header = _Head(str(self._revision))
        return reply

    def _do(self, one: dict[str, Any]) -> _Outcome:
        if put := one.get("request_put"):
            self._put(_text(put["key"]), put["value"], put["lease"])
        elif gone := one.get("request_delete_range"):
            for pair in self._range(gone).kvs:
                del self.rows[_text(pair.key)]
        return _Outcome(self._range(one["request_range"]) if "request_range" in one else None)

    def _range(self, asked: dict[str, Any]) -> Range:
        first, end = _text(asked["key"]), _text(asked.get("range_end", ""))
        keys = sorted(key for key in self.rows if (first <= key < end if end else key == first))
        most = int(asked.get("limit", "0")) or len(keys)
        return Range([self._pair(key) for key in keys[:most]], len(keys) > most)

    def _pair(self, key: str) -> Pair:
        row = self.rows[key]
        return Pair(_name(key), row.value, str(row.created), str(row.changed), row.lease)

    def _holds(self, one: dict[str, Any]) -> bool:
        row = self.rows.get(_text(one["key"]))
        if one["target"] == "CREATE":
            return (row.created if row else 0) == int(one["create_revision"])
        return (row.changed if row else 0) == int(one["mod_revision"])


def _name(key: str) -> str:
    return base64.b64encode(key.encode()).decode()


def _text(key: str) -> str:
    return base64.b64decode(key).decode()
