"""Checkpoints of others, used only if signed: they are checked in a copy that nobody else can change.

Apart because all commands that take checkpoints from elsewhere have `--require-signature`, with one meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from everstep.base.errors import ConfigError
from everstep.base.leaving import temporary_folder
from everstep.checkpoint.names import manifest_name
from everstep.checkpoint.store import BlobStore, DirectoryStore

if TYPE_CHECKING:
    from everstep.checkpoint.reader import Checkpoint
    from everstep.checkpoint.transfer import Transferred

OnBytes = Callable[[int, int], None]
"""Told how many bytes of how many are done."""

require_signature = click.option(
    "--require-signature", "key_file", metavar="KEY", help="Accept only checkpoints signed with this key (PEM file)."
)
"""KEY holds a public key, or the private one."""
not_before = click.option(
    "--not-before",
    metavar="STEP",
    type=click.IntRange(1),
    help="Refuse a checkpoint older than this step, signed or not.",
)
"""A signature says who wrote a checkpoint, not that it is the newest: a writer of the store may put back an old one."""


def transfer_signed(
    source: BlobStore, target: BlobStore, step: int, key: str | None, progress: OnBytes = lambda done, total: None
) -> Transferred:
    """Copy a checkpoint. With a key it must be signed by it; each byte of the copy is checked.

    Raises: ConfigError if it is not signed with the key; the target then gets no such checkpoint. BlobMissing,
    CheckpointCorrupt, StoreError.
    """
    from everstep.checkpoint.signing import check_signature  # these import torch, and commands import this
    from everstep.checkpoint.transfer import transfer

    if key is None:
        return transfer(source, target, step, progress=progress)
    check_signature(source, step, key, with_files=False)
    done = transfer(source, target, step, progress=progress)
    try:
        check_signature(target, step, key)
    except ConfigError:
        target.delete(manifest_name(step))
        raise
    return done


@contextmanager
def vouched(found: Checkpoint, store: BlobStore, key: str | None, folder: Path | None = None) -> Iterator[Checkpoint]:
    """The checkpoint itself; with a key, a private checked copy in this folder (default: the one for temporary files).

    Raises: as `transfer_signed`.
    """
    from everstep.checkpoint.reader import open_checkpoint

    if key is None:
        yield found
        return
    with temporary_folder(".everstep-signed-", folder) as scratch:
        own = DirectoryStore(scratch)
        transfer_signed(store, own, found.step, key)
        yield open_checkpoint(own, found.step)
