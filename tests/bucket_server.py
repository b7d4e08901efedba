"""A stand-in for Google Cloud Storage: the part of its XML API that a client of objects uses, in memory.

Source: https://cloud.google.com/storage/docs/xml-api/overview. It asks for a bearer token, and honours ranges,
`x-goog-if-generation-match: 0`, copies, multipart uploads and listings by prefix, a few names at a time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

TOKEN = "token-of-the-tests"
_PAGE = 3
_WHEN = "Mon, 02 Jan 2023 03:04:05 GMT"


@dataclass
class _Blob:
    data: bytes
    attributes: dict[str, str]

    @property
    def etag(self) -> str:
        return f'"{md5(self.data).hexdigest()}"'


@dataclass
class BucketServer:
    """One bucket, called `bucket`. objects: by key. uploads: parts by number, of multipart uploads that are open."""

    bucket: str = "everstep-test"
    objects: dict[str, _Blob] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> BucketServer:
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    store: BucketServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        headers.setdefault("Content_Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).removeprefix("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "AuthenticationRequired")
        elif bucket != self.store.bucket:
            self._refuse(404, "NoSuchBucket")
        else:
            with self.store.lock:
                getattr(self, f"_{self.command.lower()}")(key, query, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _get(self, key: str, query: dict[str, str], body: bytes) -> None:
        if not key:
            self._list(query)
            return
        blob = self.store.objects.get(key)
        if blob is None:
            self._refuse(404, "NoSuchKey")
            return
        about = {"ETag": blob.etag, "Last_Modified": _WHEN, "x_goog_generation": "1"}
        about |= {f"x_goog_meta_{name.replace('-', '_')}": value for name, value in blob.attributes.items()}
        wanted = self.headers.get("Range")
        if wanted is None:
            self._answer(200, blob.data, **about)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last or len(blob.data) - 1), len(blob.data) - 1)
        if begin >= len(blob.data):
            self._refuse(416, "InvalidRange")
            return
        about["Content_Range"] = f"bytes {begin}-{end}/{len(blob.data)}"
        self._answer(206, blob.data[begin : end + 1], **about)

    _head = _get

    def _list(self, query: dict[str, str]) -> None:
        after = query.get("continuation-token", "")
        keys = sorted(k for k in self.store.objects if k.startswith(query.get("prefix", "")) and k > after)
        page, more = keys[:_PAGE], len(keys) > _PAGE
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.store.objects[key].data)}</Size>"
            f"<LastModified>2023-01-02T03:04:05.000Z</LastModified><ETag>{self.store.objects[key].etag}</ETag></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        text = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{rows}{token}</ListBucketResult>"
        self._answer(200, text.encode())

    def _put(self, key: str, query: dict[str, str], body: bytes) -> None:
        source = self.headers.get("x-goog-copy-source")
        if "uploadId" in query:
            self.store.uploads[query["uploadId"]][int(query["partNumber"])] = body
            self._answer(200, ETag=f'"{md5(body).hexdigest()}"')
        elif self.headers.get("x-goog-if-generation-match") == "0" and key in self.store.objects:
            self._refuse(412, "PreconditionFailed")
        elif source is not None:
            found = self.store.objects.get(unquote(source).partition("/")[2])
            if found is None:
                self._refuse(404, "NoSuchKey")
                return
            self.store.objects[key] = found
            self._answer(200, b"<CopyObjectResult/>")
        else:
            blob = self.store.objects[key] = _Blob(body, self._meta())
            self._answer(200, ETag=blob.etag, x_goog_generation="1")

    def _meta(self) -> dict[str, str]:
        start = "x-goog-meta-"
        return {n.lower().removeprefix(start): v for n, v in self.headers.items() if n.lower().startswith(start)}

    def _post(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploads" in query:
            upload = f"upload-{len(self.store.uploads)}"
            self.store.uploads[upload], self.store.attributes[upload] = {}, self._meta()
            text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            self._answer(200, text.encode())
            return
        parts = self.store.uploads.pop(query["uploadId"])
        data = b"".join(parts[number] for number in sorted(parts))
        blob = self.store.objects[key] = _Blob(data, self.store.attributes[query["uploadId"]])
        text = f"<CompleteMultipartUploadResult><ETag>{blob.etag}</ETag></CompleteMultipartUploadResult>"
        self._answer(200, text.encode(), x_goog_generation="1")

    def _delete(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploadId" in query:
            self.store.uploads.pop(query["uploadId"], None)
            self._answer(204)
        elif self.store.objects.pop(key, None) is None:
            self._refuse(404, "NoSuchKey")
        else:
            self._answer(204)
