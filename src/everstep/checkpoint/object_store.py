"""Checkpoint files in an object store, as a `BlobStore`, whatever the service (`stores`).

Apart from `store` because it alone needs the client (obstore, the extra `object`), and because everything that such a
store answers is turned here into one line that says what to do. Credentials come from the environment and stay there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

from everstep.base.cause import Cause
from everstep.base.errors import BlobExists, BlobMissing, ConfigError, StoreError, check
from everstep.checkpoint.names import is_plain
from everstep.checkpoint.store import BytesLike, room_for, words_of
from everstep.exact.image import spread

PART_BYTES = 8 << 20
"""Size of a part of a multipart upload, and of a range when a long read is split."""
_STREAMS = 4
_MAX_SINGLE_PUT_BYTES = 64 << 20
_HASH = "everstep-xxh3"
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})")

_ROLES = ("169.254.169.254", "metadata.google.internal")
"""Address asked for a machine's role if no keys are set."""
_CREDENTIALS = frozenset(
    {
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "TokenRefreshRequired",
        "InvalidToken",
        "AccessDenied",
        "RequestTimeTooSkewed",
        "AccountProblem",
        "AllAccessDisabled",
    }
)
_FULL = frozenset({"QuotaExceeded", "InsufficientStorage", "EntityTooLarge", "XMinioStorageFull"})


class ObjectStoreError(StoreError):
    """The object store was not reached, or answered with an error."""

    cause = Cause.STORE


class StoreRefused(ObjectStoreError):
    """The store refuses this until the bucket, the credentials or its free space change."""


@dataclass(frozen=True)
class ObjectOptions:
    """How to reach a store. None: as the service's environment variables say; times in seconds.

    Keys are only ever taken from the environment, or from the role of the machine where it has none.

    unsigned_payload: requests are signed, their bodies are not: signing takes 3.4 of 4.0 CPU seconds per GB (measured,
    SHA-256 without instructions for it), which training needs. Checkpoints bear hashes of their own.
    """

    endpoint: str | None = None
    region: str | None = None
    request_timeout_s: float = 60.0
    connect_timeout_s: float = 5.0
    retries: int = 3
    retry_timeout_s: float = 30.0
    unsigned_payload: bool = True


@dataclass(frozen=True)
class Service:
    """The peculiarities of one kind of object store.

    scheme: of its URLs. title: for people. keys: where credentials come from, for people. endpoint_from: environment
    variables that name a server other than the usual. connect: (obstore.store, bucket, endpoint, options, what all
    services take) -> the client's store.
    """

    scheme: str
    title: str
    keys: str
    endpoint_from: tuple[str, ...]
    connect: Callable[[Any, str, str | None, ObjectOptions, dict[str, Any]], Any]


class ObjectStore:
    """Names under `scheme://bucket/prefix`. Thread-safe."""

    def __init__(self, service: Service, url: str, options: ObjectOptions | None = None) -> None:
        """Raises: ConfigError if the URL is none of the service, or the client is not installed. Asks nothing yet."""
        self.url = url.rstrip("/")
        self._service = service
        self.bucket, self._prefix = _parse_url(url, service)
        options = options or ObjectOptions()
        self._endpoint = options.endpoint or environment(*service.endpoint_from)
        if self._endpoint and "@" in self._endpoint:
            raise ConfigError(f"expected no keys in an endpoint: set {service.keys}")
        self._obstore = _client()
        self._store = self._connect(options)

    def _connect(self, options: ObjectOptions) -> Any:
        common: dict[str, Any] = {
            "client_options": {
                "allow_http": bool(self._endpoint and self._endpoint.startswith("http://")),
                "timeout": timedelta(seconds=options.request_timeout_s),
                "connect_timeout": timedelta(seconds=options.connect_timeout_s),
            },
            "retry_config": {
                "max_retries": options.retries,
                "retry_timeout": timedelta(seconds=options.retry_timeout_s),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=5),
                    "base": 2,
                },
            },
        }
        with self._asking():
            return self._service.connect(self._obstore.store, self.bucket, self._endpoint, options, common)

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    # ---- reading

    def list(self, prefix: str = "") -> list[str]:
        """Names that begin with the prefix, sorted."""
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Name -> size in bytes of what begins with the prefix; one request per 1,000 names."""
        folder = prefix.rpartition("/")[0]
        if folder and not is_plain(folder):
            return {}
        where = self._key(folder) if folder else self._prefix
        top = f"{self._prefix}/" if self._prefix else ""
        with self._asking(prefix):
            found = {
                meta["path"].removeprefix(top): int(meta["size"])
                for chunk in self._obstore.list(self._store, where or None)
                for meta in chunk
                if meta["path"].startswith(top)
            }
        return {name: size for name, size in found.items() if name.startswith(prefix) and is_plain(name)}

    def ask(self) -> None:
        """Whether the bucket is there and may be read. Raises: StoreRefused, StoreError."""
        with self._asking():
            next(iter(self._obstore.list(self._store, self._prefix or None)), None)

    def size(self, name: str) -> int:
        """Raises: BlobMissing."""
        with self._asking(name):
            return int(self._obstore.head(self._store, self._key(name))["size"])

    def exists(self, name: str) -> bool:
        try:
            self.size(name)
        except BlobMissing:
            return False
        return True

    def fingerprint(self, name: str) -> tuple[int, str]:
        """Size in bytes and the hash (32 hex digits) that was stored with it, "" if none. Raises: BlobMissing."""
        with self._asking(name):
            answer = self._obstore.get(self._store, self._key(name), options={"head": True})
            return int(answer.meta["size"]), str(answer.attributes.get(_HASH, ""))

    def read(self, name: str, start: int = 0, length: int | None = None) -> memoryview:
        """Bytes of a name from `start`; long reads go by several ranges at once. May be shorter at the end.

        Raises: BlobMissing; StoreError.
        """
        if length is None:
            length = self.size(name) - start
        if length <= 0:
            return memoryview(b"")
        if length <= PART_BYTES:
            return memoryview(self._range(name, start, length))
        out = room_for(length, f"{self.url}/{name}")
        jobs = [(at, min(PART_BYTES, length - at)) for at in range(0, length, PART_BYTES)]

        def fetch(job: tuple[int, int]) -> int:
            data = self._range(name, start + job[0], job[1])
            out[job[0] : job[0] + len(data)] = data
            return len(data)

        got = sum(self._threads.map(fetch, jobs))
        return memoryview(out)[:got]

    def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> int:
        """As the protocol says. Raises: BlobMissing; StoreError."""
        return spread(memoryview(self.read(name, start, sum(map(len, views)))), views)

    def _range(self, name: str, start: int, length: int) -> bytes:
        with self._asking(name):
            try:
                return bytes(self._obstore.get_range(self._store, self._key(name), start=start, length=length))[:length]
            except Exception as error:
                if "InvalidRange" in str(error):
                    return b""
                raise

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(2 * _STREAMS, thread_name_prefix="object-read")

    # ---- writing

    def write(
        self, name: str, chunks: Iterable[BytesLike], size: int, if_absent: bool = False, digest: str | None = None
    ) -> None:
        """Store the bytes of the chunks under a name, all or nothing; in parts, several at once, if it is large.

        size: in bytes, of all chunks together. if_absent: exactly one of several writers wins (one request, so at most
        64 MiB: servers do not check conditions when a multipart upload is completed). digest: kept beside it, for
        `fingerprint`.

        Raises: BlobExists; StoreError.
        """
        single = if_absent or size <= PART_BYTES
        if if_absent:
            check(size <= _MAX_SINGLE_PUT_BYTES, f"{name} is too large ({size} bytes) to be written conditionally")
        pieces = _copies(name, chunks, size)
        data: Any = b"".join(pieces) if single else pieces
        with self._asking(name):
            self._obstore.put(
                self._store,
                self._key(name),
                data,
                attributes={_HASH: digest} if digest else None,
                mode="create" if if_absent else None,
                use_multipart=not single,
                chunk_size=PART_BYTES,
                max_concurrency=_STREAMS,
            )

    def delete(self, name: str) -> None:
        """Remove a name; one that is not there is no error."""
        with suppress(BlobMissing), self._asking(name):
            self._obstore.delete(self._store, self._key(name))

    def move(self, old: str, new: str) -> None:
        """Raises: BlobMissing, BlobExists. The server copies; a reader may see both for a moment."""
        if self.exists(new):
            raise BlobExists(f"cannot move {self.url}/{old}: {new} is there already")
        with self._asking(old):
            self._obstore.copy(self._store, self._key(old), self._key(new))
        self.delete(old)

    # ---- words

    @contextmanager
    def _asking(self, name: str = "") -> Iterator[None]:
        """Tell errors of the client in our words. name: of the object that is asked for."""
        try:
            yield
        except Exception as error:
            raise self._told(error, name) from None

    def _key(self, name: str) -> str:
        return "/".join([*([self._prefix] if self._prefix else []), *words_of(name)])

    def _told(self, error: Exception, name: str) -> Exception:
        """The error in one line: expected, came, what to do. The client has nothing but words to tell it by."""
        ours = isinstance(error, OSError) and error.errno is not None  # of the file that is being uploaded
        if ours or not isinstance(error, self._obstore.exceptions.BaseError | OSError | ValueError):
            return error
        said = str(error)
        code, status = (next(iter(known.findall(said)), "") for known in (_CODE, _STATUS))
        where = f"{self.url}/{name}" if name else self.url
        at = f" at {self._endpoint}" if self._endpoint else ""
        if isinstance(error, self._obstore.exceptions.AlreadyExistsError) or code == "PreconditionFailed":
            return BlobExists(f"{where} is there already")
        if code in ("NoSuchBucket", "InvalidBucketName"):
            return StoreRefused(f"there is no bucket {self.bucket!r}{at}: create it, or correct the URL", code)
        if code in _FULL or status == "507":
            text = f"cannot write {where}: the store is full ({code or status}): make room there"
            return StoreRefused(text, code or status)
        if code in _CREDENTIALS or status in ("401", "403"):
            who = at or f" of {self._service.title}"
            return StoreRefused(
                f"the store{who} refuses these credentials ({code or status}) for {where}: check "
                f"{self._service.keys} and whether they have expired",
                code or status,
            )
        if isinstance(error, FileNotFoundError) or code == "NoSuchKey" or status == "404":
            return BlobMissing(f"there is no {where}")
        trouble = _shortened(said, code, status, self._service.keys)
        return ObjectStoreError(f"cannot use {where}{at}: {trouble}", trouble)


def _parse_url(url: str, service: Service) -> tuple[str, str]:
    """Bucket and prefix (without slashes at its ends) of `scheme://bucket/prefix`.

    Raises: ConfigError.
    """
    scheme, separator, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme != service.scheme or not separator or not bucket or "?" in rest or "#" in rest:
        raise ConfigError(f"expected a URL such as {service.scheme}://bucket/prefix, got {url!r}")
    if "@" in bucket:
        raise ConfigError(f"expected no keys in a URL: set {service.keys} instead")
    return bucket, prefix.strip("/")


def _client() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise ConfigError(
            "object stores need the client obstore, which is not installed: pip install 'everstep[object]'"
        ) from None
    return obstore


def environment(*names: str) -> str | None:
    """The first of these environment variables that says anything."""
    return next((value for name in names if (value := os.environ.get(name))), None)


def _copies(name: str, chunks: Iterable[BytesLike], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of at most a part, copied, because the client holds on to them while it sends."""
    seen = 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        seen += len(view)
        for at in range(0, len(view), PART_BYTES):
            yield bytes(view[at : at + PART_BYTES])
    check(seen == size, f"{name}: expected {size} bytes, got {seen}")


def _shortened(text: str, code: str, status: str, keys: str) -> str:
    """The client's words, which are long, as a few."""
    if code or status:
        return f"it answered {' '.join(w for w in (status, code) if w)}"
    lower = text.lower()
    if any(host in text for host in _ROLES):
        return f"no credentials: set {keys}"
    for sign, words in (
        ("connectionrefused", "connection refused; is it running, and is the endpoint right?"),
        ("dns error", "its host name is not known; is the endpoint right?"),
        ("failed to lookup", "its host name is not known; is the endpoint right?"),
        ("timedout", "it did not answer in time"),
        ("timed out", "it did not answer in time"),
        ("timeout,", "it did not answer in time"),
        ("connectionreset", "the connection was cut"),
        ("incompletemessage", "the connection was cut"),
        ("unexpectedeof", "the connection was cut"),
        ("connect", "no connection; is it running, and is the endpoint right?"),
    ):
        if sign in lower:
            return words
    return " ".join(text.split("Debug source")[0].split())[:200]
