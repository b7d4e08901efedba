"""Between the state of a whole job and those of its stages, by manifests alone: no tensor and no model here.

In every plane a unit's state lies in blocks of its own, in every topology. So a whole manifest is put together from
those of the stages (`merge`), and a stage's share is picked out of a whole one (`select`), without touching a block.
Digests of a job's state are functions of the whole manifest, so they are the same however the model was cut.

A stage's manifest has a key `stage`: `units` (the numbers of its units), `extents` (number of element blocks of the
grid that each of them takes up), `n_units` (of the whole model), `positions` (for each optimizer group, the places of
its parameters in the whole group).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from everstep.base.errors import check
from everstep.exact.digest import digest_bytes
from everstep.exact.image import (
    BLOCK_BYTES,
    FOREIGN,
    FORMAT,
    OUTSIDE,
    REST,
    STRIDES,
    VALUES,
    Plane,
    digested,
    entries_of,
    plane_at,
    planes_of,
    rows_digest,
    rows_of,
    runs_of,
    sealed,
    span_of,
)
from everstep.exact.layout import round_up

StateManifest = Mapping[str, Any]
_MODEL = "model/"
_SELECTED = -4


def state_digest(manifest: StateManifest, step: int) -> str:
    """Digest of everything in a whole manifest, and the step; equals `ModelState.state_digest` of the unsplit job."""
    rows = sorted((e[0], e[1], tuple(e[2]), digest) for e, digest in _entries(manifest))
    return rows_digest(rows, manifest["values"], step)


def model_digest(manifest: StateManifest) -> str:
    """Digest of parameters and persistent buffers: `ModelState.model_digest` of the unsplit job. 32 hex digits."""
    transient = set(manifest["transient"])
    rows = sorted(
        (e[0].removeprefix(_MODEL), f"torch.{e[1]}", tuple(e[2]), digest)
        for e, digest in _entries(manifest)
        if e[0].startswith(_MODEL) and e[0] not in transient
    )
    return digest_bytes(repr(rows).encode())


def same_state(a: StateManifest, b: StateManifest) -> bool:
    """Whether two whole manifests, even of different formats, are of states with equal names, types and bits."""
    try:
        if a["format"] == b["format"]:
            mine, theirs = ({**m, "digest": "", "values": digested(m["values"])} for m in (a, b))
            return mine == theirs
        return state_digest(a, 0) == state_digest(b, 0) and set(a["transient"]) == set(b["transient"])
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return False  # values that Everstep did not write


def merge(manifests: Sequence[StateManifest]) -> dict[str, Any]:
    """Manifest of the whole job from those of all its stages, one each: exactly that of the unsplit state.

    Raises: InvariantViolation naming an entry that two stages state differently, or a unit that none or two of them
    hold. CheckpointCorrupt if a manifest does not match its digest.
    """
    return merge_with_sources(manifests)[0]


def merge_with_sources(manifests: Sequence[StateManifest]) -> tuple[dict[str, Any], tuple[tuple[int, int], ...]]:
    """`merge`, and for each block of the whole: (index of a manifest that has it, its number there)."""
    for manifest in manifests:
        entries_of(manifest)
    if len(manifests) == 1 and "stage" not in manifests[0]:
        return dict(manifests[0]), tuple((0, i) for i in range(len(manifests[0]["blocks"])))
    check(all("stage" in m and m["format"] == FORMAT for m in manifests), "only manifests of stages are merged")
    begins = _begins(manifests)
    groups = [group for k, manifest in enumerate(manifests) for group in _groups(k, manifest, begins)]
    common = [_one_of(groups, label) for label in (OUTSIDE, VALUES)]
    chosen = sorted((g for g in groups if g.label >= 0), key=lambda g: (g.plane, g.label))
    chosen += [group for group in common if group is not None]
    entries: list[list[Any]] = []
    digests: list[str] = []
    blocks: list[tuple[int, int]] = []
    grids: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for group in chosen:
        shift = len(blocks) * BLOCK_BYTES - group.start
        entries += [[*e[:3], e[3] + shift, e[4]] for e in group.entries]
        digests += group.digests
        grids.setdefault((group.plane, group.itemsize), []).extend(
            (at, len(blocks) + i) for i, at in enumerate(group.grid)
        )
        blocks += [(group.owner, group.start // BLOCK_BYTES + i) for i in range(len(group.blocks))]
    _check_foreign(groups, {e[0]: (e[1], e[2], d) for e, d in zip(entries, digests, strict=True)})
    whole = {
        **{key: manifests[0][key] for key in ("format", "block_bytes")},
        "entries": entries,
        "digests": digests,
        "groups": [[group.label, len(group.entries)] for group in chosen],
        "planes": rows_of(_planes(grids)),
        "transient": sorted({name for m in manifests for name in m["transient"]}),
        "values": _merge_values(manifests),
        "blocks": [manifests[k]["blocks"][i] for k, i in blocks],
    }
    return sealed(whole), tuple(blocks)


def select(manifest: StateManifest, names: Collection[str]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A stage's share of a whole manifest: (manifest that its `ModelState.load` takes, sources of its blocks).

    names: `ModelState.names` of the stage. The second result gives, for each block of the selected manifest, its number
    in the whole one.
    """
    values = _select_values(manifest["values"], names)
    wanted = {_MODEL + name for name in names}.union(_tensors(list(values.values())))
    kept = [(e, d) for e, d in _entries(manifest) if e[0] in wanted]
    blocks = sorted({i for e, _ in kept for i in range(e[3] // BLOCK_BYTES, -(-(e[3] + e[4]) // BLOCK_BYTES)) if e[4]})
    place = {block: k for k, block in enumerate(blocks)}
    grids = {
        (plane.name, plane.itemsize): [(at, place[block]) for block, at in plane.grid().items() if block in place]
        for plane in planes_of(manifest)
    }
    entries = []
    end = 0
    for (name, dtype, shape, offset, nbytes), _ in kept:
        at = place[offset // BLOCK_BYTES] * BLOCK_BYTES + offset % BLOCK_BYTES if nbytes else end
        entries.append([name, dtype, shape, at, nbytes])
        end = at + nbytes
    body = {
        **{key: manifest[key] for key in ("format", "block_bytes")},
        "entries": entries,
        "digests": [d for _, d in kept],
        "groups": [[_SELECTED, len(entries)]],
        **({"planes": rows_of(_planes(grids))} if "planes" in manifest else {}),
        "transient": [name for name in manifest["transient"] if name in wanted],
        "values": values,
        **({"settings": manifest["settings"]} if "settings" in manifest else {}),
        "blocks": [manifest["blocks"][i] for i in blocks],
    }
    return sealed(body), tuple(blocks)


# ---- entries


@dataclass(frozen=True)
class _Group:
    """A run of entries of one manifest that has blocks of its own. start: byte at which the first block begins. grid:
    first element block of each of them in the whole job."""

    owner: int
    label: int
    plane: str
    itemsize: int
    start: int
    entries: list[list[Any]]
    digests: list[str]
    blocks: list[str]
    grid: list[int]

    def named(self) -> Iterator[tuple[Any, ...]]:
        """Name, type, shape and digest of each entry."""
        return ((*entry[:3], digest) for entry, digest in zip(self.entries, self.digests, strict=True))

    def facts(self) -> list[Any]:
        return [[[*e[:3], e[3] - self.start, e[4]] for e in self.entries], self.digests, self.blocks]


def _begins(manifests: Sequence[StateManifest]) -> dict[int, int]:
    """First element block of each unit in the whole job."""
    held = sorted(unit for m in manifests for unit in m["stage"]["units"])
    n_units = manifests[0]["stage"]["n_units"]
    check(held == list(range(n_units)), f"stages hold units {held}, together they must hold 0..{n_units - 1} once")
    extents = {u: n for m in manifests for u, n in zip(m["stage"]["units"], m["stage"]["extents"], strict=True)}
    starts = accumulate((extents[unit] for unit in range(n_units)), initial=0)
    return dict(zip(range(n_units), starts, strict=False))


def _groups(owner: int, manifest: StateManifest, begins: Mapping[int, int]) -> Iterator[_Group]:
    """Groups of a manifest. begins: first element block of the units in the whole job."""
    units, here = manifest["stage"]["units"], accumulate(manifest["stage"]["extents"], initial=0)
    shifts = {unit: begins[unit] - at for unit, at in zip(units, here, strict=False)}
    planes = planes_of(manifest)
    grids = {plane.name: plane.grid() for plane in planes}
    first = 0
    for label, count in manifest["groups"]:
        entries = manifest["entries"][first : first + count]
        end = max(e[3] + e[4] for e in entries)
        mine = range(entries[0][3] // BLOCK_BYTES, round_up(end, BLOCK_BYTES) // BLOCK_BYTES)
        plane = plane_at(planes, mine.start) if mine else None
        name, itemsize = (plane.name, plane.itemsize) if plane is not None else (REST, 1)
        grid = [grids[name][block] + shifts[label] for block in mine] if name != REST else [0] * len(mine)
        yield _Group(
            owner,
            label,
            name,
            itemsize,
            mine.start * BLOCK_BYTES,
            entries,
            manifest["digests"][first : first + count],
            manifest["blocks"][mine.start : mine.stop],
            grid,
        )
        first += count


def _planes(grids: Mapping[tuple[str, int], Sequence[tuple[int, int]]]) -> list[Plane]:
    """Planes with these (element block, block) pairs, by name and size of an element."""
    found = []
    for (name, itemsize), places in grids.items():
        if name == REST:
            places = [(k * span_of(itemsize), block) for k, (_, block) in enumerate(places)]
        if places:
            found.append(Plane(name, itemsize, runs_of(places, itemsize)))
    return found


def _one_of(groups: Sequence[_Group], label: int) -> _Group | None:
    """The group with this label, which all stages have alike; None if there is none."""
    found = [g for g in groups if g.label == label]
    for other in found[1:]:
        for mine, theirs in zip(found[0].named(), other.named(), strict=False):
            check(mine == theirs, f"stages differ in {mine[0]}")
        check(other.facts() == found[0].facts(), f"stages differ outside their units (group {label})")
    check(len(found) in (0, len({g.owner for g in groups})), f"not every stage has group {label}")
    return found[0] if found else None


def _check_foreign(groups: Sequence[_Group], owned: Mapping[str, tuple[Any, ...]]) -> None:
    for group in groups:
        for name, *rest in group.named() if group.label == FOREIGN else ():
            check(owned.get(name) == tuple(rest), f"stages differ in the tied {name}")


def _entries(manifest: StateManifest) -> Iterator[tuple[list[Any], str]]:
    return zip(manifest["entries"], manifest["digests"], strict=True)


# ---- values


def _merge_values(manifests: Sequence[StateManifest]) -> dict[str, Any]:
    values = [dict(m["values"]) for m in manifests]
    strides = {name: stride for value in values for name, stride in value.pop(STRIDES, ())}
    merged = dict(values[0])
    for other in values[1:]:
        check(set(other) == set(merged), f"stages hold values {sorted(merged)} and {sorted(other)}")
        for key in digested(merged):
            check(key in ("groups", "state") or other[key] == merged[key], f"stages differ in the state of {key}")
    if "groups" not in merged:
        return merged
    positions = [m["stage"]["positions"] for m in manifests]
    merged["groups"] = _merge_groups([v["groups"] for v in values], positions)
    states: dict[str, Any] = {}
    for value in values:
        for name, state in value["state"]["dict"]:
            check(states.setdefault(name, state) == state, f"stages differ in the optimizer's state of {name}")
    order = [name for group in merged["groups"] for name in group["dict"][0][1]]
    merged["state"] = {"dict": [[name, states[name]] for name in order if name in states]}
    return merged | ({STRIDES: [*map(list, sorted(strides.items()))]} if strides else {})


def _merge_groups(groups: Sequence[Sequence[Any]], positions: Sequence[Sequence[Sequence[int]]]) -> list[Any]:
    check(len({len(g) for g in groups}) == 1, "stages have different numbers of optimizer groups")
    merged = []
    for k, first in enumerate(groups[0]):
        members: dict[int, str] = {}
        for mine, places in zip(groups, positions, strict=True):
            (_, names), (_, scalars) = mine[k]["dict"]
            check(scalars == first["dict"][1][1], f"stages differ in the values of optimizer group {k}")
            for name, place in zip(names, places[k], strict=True):
                check(members.setdefault(place, name) == name, f"stages differ in parameter {place} of group {k}")
        check(sorted(members) == list(range(len(members))), f"optimizer group {k} lacks parameters")
        merged.append({"dict": [["params", [members[i] for i in range(len(members))]], first["dict"][1]]})
    return merged


def _select_values(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    chosen = dict(values)
    if "groups" in chosen:
        chosen["groups"] = [
            {"dict": [["params", [n for n in group["dict"][0][1] if n in names]], group["dict"][1]]}
            for group in values["groups"]
        ]
        chosen["state"] = {"dict": [row for row in values["state"]["dict"] if row[0] in names]}
    return chosen


def _tensors(node: Any) -> Iterator[str]:
    """Names of the tensors that encoded values refer to."""
    for tag, body in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if tag in ("tensor", "array"):
            yield body
        elif tag not in ("f", "bytes", "dtype", "device", "scalar"):
            yield from _tensors(body)
