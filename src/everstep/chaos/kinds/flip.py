"""One bit of the worker's first parameter, as a damaged memory cell would flip it."""

from __future__ import annotations

from everstep.chaos.kinds.kind import FaultKind

KIND = FaultKind("flip", "one bit of its state changes", lambda blow: blow.flip())
