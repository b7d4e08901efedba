"""Makes one manifest from the reports of all parts: is the state whole, and where is each block of it.

Apart from the writing because it decides from the reports alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from everstep.base.cause import Why
from everstep.base.errors import StoreError, check
from everstep.checkpoint.manifest import Manifest, PartFile, compact
from everstep.checkpoint.part import CHECK_BYTES, NOT_HELD, NOT_KNOWN, PartReport, entries_within, split_digests
from everstep.exact.digest import digest_bytes
from everstep.exact.image import BLOCK_BYTES, Outline, StateEntry, block_count, manifest_of
from everstep.exact.topology import merge_with_sources

BlockPlace = tuple[PartFile, int]
"""A file, and the byte in it where a block begins."""


_EMPTY = digest_bytes(b"")
_NAMED = 3


@dataclass
class Assembly:
    """The parts of one checkpoint, as they arrive. writers: (stage, worker) of all that are waited for."""

    step: int
    generation: int
    stages: int
    writers: Collection[tuple[int, int]] = ()
    reports: dict[tuple[int, int], PartReport] = field(default_factory=dict)

    def add(self, report: PartReport) -> bool:
        """Takes a report in; whether it belongs here. One of another step or generation does not."""
        if (report.step, report.generation) != (self.step, self.generation) or not 0 <= report.stage < self.stages:
            return False
        self.reports[report.stage, report.worker_id] = report
        return True

    @property
    def failed(self) -> Why | None:
        """Why there will be no checkpoint, as far as a worker said so."""
        failed = (Why(r.cause, f"worker {r.worker_id}: {r.error}") for r in self.reports.values() if r.error)
        return next(failed, None)

    def missing(self) -> str:
        """Parts that have not arrived yet, in words; empty if all have."""
        for stage in range(self.stages):
            parts = self._parts(stage)
            if not any(p.entries is not None for p in parts):
                return f"the layout of stage {stage}"
            at = 0
            for first, last in sorted(run for part in parts for run in part.runs):
                if first > at:
                    return f"blocks {at} to {first - 1} of stage {stage}"
                at = max(at, last)
            n_blocks = _n_blocks(parts)
            if at < n_blocks:
                return f"blocks {at} to {n_blocks - 1} of stage {stage}"
        late = sorted(set(self.writers) - set(self.reports))
        return f"what worker {late[0][1]} holds of stage {late[0][0]}" if late else ""

    def differing(self) -> str:
        """How the states differ that workers of a stage hold, in words; empty if they are alike."""
        for stage in range(self.stages):
            parts = [p for p in self._parts(stage) if p.checks]
            said = {part.worker_id: (part.checks, part.facts) for part in parts}
            known = _together([checks for checks, _ in said.values()])
            if len({tuple(sorted(facts.items())) for _, facts in said.values()}) > 1 or not known:
                names = _differing(_first(self._parts(stage)).entries or (), list(said.values()))
                text = f", in the blocks of {', '.join(names[:_NAMED])}" if names else ""
                more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
                who = ", ".join(map(str, sorted(said)))
                return f"workers {who} hold different states of step {self.step}{text}{more}"
        return ""

    def files(self) -> list[str]:
        """The names of the files that were written for it."""
        return [report.file.name for report in self.reports.values() if report.file is not None]

    def sums(self) -> dict[str, str]:
        """The SHA-256 of these files, as their writers made them."""
        return {report.file.name: report.sha256 for report in self.reports.values() if report.file is not None}

    def stage_manifest(self, stage: int) -> dict[str, Any]:
        """Manifest of one stage, in the form that its own state would have."""
        parts = self._parts(stage)
        first = _first(parts)
        entries = first.entries or ()
        blocks = [""] * _n_blocks(parts)
        digests = [_EMPTY] * len(entries)
        for part in parts:
            numbers = [k for run in part.runs for k in range(*run)]
            for k, digest in zip(numbers, split_digests(part.digests), strict=True):
                blocks[k] = digest
            numbers = entries_within(entries, part.runs)
            for k, digest in zip(numbers, split_digests(part.entry_digests), strict=True):
                digests[k] = digest
        return manifest_of(entries, first.values, first.outline or Outline(), blocks, digests)

    def written(self, stage: int) -> dict[int, BlockPlace]:
        """Where the blocks are that were written for this checkpoint, by number in the stage's state."""
        places: dict[int, BlockPlace] = {}
        for part in self._parts(stage):
            if (file := part.file) is not None:
                numbers = [k for first, count in part.written for k in range(first, first + count)]
                check(len(numbers) == file.n_blocks, f"{file.name} has {file.n_blocks} blocks, not {len(numbers)}")
                places |= {k: (file, file.data_at + at * BLOCK_BYTES) for at, k in enumerate(numbers)}
        return places

    def _parts(self, stage: int) -> list[PartReport]:
        return [r for (s, _), r in sorted(self.reports.items()) if s == stage]


def assemble(assembly: Assembly, older: Callable[[int | None], Manifest | None], facts: Mapping[str, Any]) -> Manifest:
    """The manifest of a checkpoint of which nothing is missing.

    older: the manifest of an older checkpoint by step (None: the newest), None if it is gone. facts: the fields of
    `Manifest` that the parts do not know.

    Raises: StoreError if a block that was said to be in an older checkpoint is not.
    """
    stages = [assembly.stage_manifest(stage) for stage in range(assembly.stages)]
    whole, sources = merge_with_sources(stages)
    written = [assembly.written(stage) for stage in range(assembly.stages)]
    known = _Known(older, sorted({r.base for r in assembly.reports.values() if r.base is not None}, reverse=True))
    files: dict[PartFile, int] = {}
    places = []
    for index, (stage, local) in enumerate(sources):
        place = written[stage].get(local) or known.find(whole["blocks"][index])
        if place is None:
            raise StoreError(f"block {index} belongs to an older checkpoint, which has been deleted")
        places.append((files.setdefault(place[0], len(files)), place[1]))
    return Manifest(
        step=assembly.step,
        generation=assembly.generation,
        state=whole,
        files=tuple(files),
        runs=compact(places),
        base=known.step,
        depth=known.depth,
        written_bytes=sum(r.written_bytes for r in assembly.reports.values()),
        finite=all(r.finite for r in assembly.reports.values()),
        **facts,
    )


def _differing(entries: Sequence[StateEntry], said: Sequence[tuple[bytes, Mapping[str, str]]]) -> list[str]:
    """Which parts of a state are not alike in all that is said of it."""
    found = [name for name in said[0][1] if len({facts.get(name) for _, facts in said}) > 1]
    cut = [[checks[at : at + CHECK_BYTES] for at in range(0, len(checks), CHECK_BYTES)] for checks, _ in said]
    odd = {k for k, checks in enumerate(zip_longest(*cut)) if len({*checks} - {NOT_HELD}) > 1}
    return found + [e.name.removeprefix("model/") for e in entries if odd.intersection(e.blocks)]


def _together(said: Sequence[bytes]) -> bool:
    """Whether checks of the same state agree, where they are of blocks that are held."""
    if len(set(said)) <= 1:
        return True
    if len({len(checks) for checks in said}) > 1:
        return False
    ranges = range(0, len(said[0]), CHECK_BYTES)
    return all(len({checks[at : at + CHECK_BYTES] for checks in said} - {NOT_HELD}) <= 1 for at in ranges)


def unknown_entries(manifest: Manifest) -> list[int]:
    """Numbers of the entries whose digests no writer could make, since none held all of them."""
    return [k for k, digest in enumerate(manifest.state["digests"]) if digest == NOT_KNOWN]


class _Known:
    """Blocks of older checkpoints, by digest; they are looked into as far as needed, the newest first."""

    def __init__(self, older: Callable[[int | None], Manifest | None], steps: Sequence[int]) -> None:
        self._older = older
        self._steps: list[int | None] = [*steps, None]
        self._places: dict[str, tuple[BlockPlace, Manifest]] = {}
        self.step: int | None = None
        self.depth = 0

    def find(self, digest: str) -> BlockPlace | None:
        while digest not in self._places and self._steps:
            manifest = self._older(self._steps.pop(0))
            if manifest is not None:
                for index, known in enumerate(manifest.state["blocks"]):
                    self._places.setdefault(known, (manifest.place(index), manifest))
        if digest not in self._places:
            return None
        place, manifest = self._places[digest]
        self.step = manifest.step if self.step is None else max(self.step, manifest.step)
        self.depth = max(self.depth, manifest.depth + 1)
        return place


def _first(parts: Sequence[PartReport]) -> PartReport:
    """The one that says what the state consists of."""
    return next(p for p in parts if p.entries is not None)


def _n_blocks(parts: Sequence[PartReport]) -> int:
    return block_count(_first(parts).entries or ())
