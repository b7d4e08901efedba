"""Google Cloud Storage: `gs://bucket/prefix`."""

from __future__ import annotations

from typing import Any

from everstep.base.errors import ConfigError
from everstep.checkpoint.object_store import ObjectOptions, ObjectStore, Service


def _connect(stores: Any, bucket: str, endpoint: str | None, options: ObjectOptions, common: dict[str, Any]) -> Any:
    if options.region:
        raise ConfigError(
            f"expected no region for gs://{bucket}, whose bucket has one, got {options.region!r}: drop it"
        )
    return stores.GCSStore(bucket, **({"base_url": endpoint} if endpoint else {}), **common)


SERVICE = Service(
    "gs", "Google Cloud", "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT", ("GOOGLE_BASE_URL",), _connect
)


def open_gs(url: str, options: ObjectOptions | None = None) -> ObjectStore:
    """The store at `gs://bucket/prefix`. Raises: ConfigError."""
    return ObjectStore(SERVICE, url, options)
