"""Amazon S3, and the many servers that speak its protocol: `s3://bucket/prefix`."""

from __future__ import annotations

from typing import Any

from everstep.checkpoint.object_store import ObjectOptions, ObjectStore, Service, environment


def _connect(stores: Any, bucket: str, endpoint: str | None, options: ObjectOptions, common: dict[str, Any]) -> Any:
    region = options.region or environment("AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1"
    where: dict[str, Any] = {"region": region, "unsigned_payload": options.unsigned_payload}
    if endpoint:
        where |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
    return stores.S3Store(bucket, **where, **common)


SERVICE = Service(
    "s3",
    "AWS",
    "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN)",
    ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    _connect,
)


def open_s3(url: str, options: ObjectOptions | None = None) -> ObjectStore:
    """The store at `s3://bucket/prefix`. Raises: ConfigError."""
    return ObjectStore(SERVICE, url, options)
