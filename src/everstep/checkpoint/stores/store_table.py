"""The kinds of stores there are, by the scheme of their URLs."""

from __future__ import annotations

from collections.abc import Callable

from everstep.base.errors import ConfigError
from everstep.checkpoint.object_store import ObjectOptions
from everstep.checkpoint.store import BlobStore, DirectoryStore
from everstep.checkpoint.stores.gs import open_gs
from everstep.checkpoint.stores.s3 import open_s3

STORES: dict[str, Callable[[str, ObjectOptions], BlobStore]] = {
    "file": lambda url, options: DirectoryStore(url.removeprefix("file://")),
    "s3": open_s3,
    "gs": open_gs,
}


def open_store(url: str, options: ObjectOptions | None = None) -> BlobStore:
    """The store at a path or URL. options: of an object store.

    Raises: ConfigError for a URL of an unknown kind.
    """
    scheme, found, _ = url.partition("://")
    if not found:
        return DirectoryStore(url)
    if scheme not in STORES:
        known = ", ".join(f"{name}://" for name in STORES)
        raise ConfigError(f"expected a directory or a URL with one of {known}, got {url!r}")
    return STORES[scheme](url, options or ObjectOptions())
