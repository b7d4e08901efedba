"""`everstep sim`: simulated faults, seed by seed; exit 1 at the first broken promise, with its replay command."""

from __future__ import annotations

import click

from everstep.base.errors import ConfigError
from everstep.sim.scenario import SeedKind, run_many, run_one, run_shrunk


@click.command()
@click.option("--seed", type=int, help="Simulate this seed alone.")
@click.option("--trace", is_flag=True, help="With --seed: print everything that happens.")
@click.option("--shrink", type=int, metavar="SEED", help="Find the shortest schedule with which this seed still fails.")
@click.option(
    "--seeds", metavar="N|A:B", default="300", show_default=True, help="Number of seeds; or A:B, from A to B - 1."
)
@click.option("--start", type=int, default=0, show_default=True, help="First seed, with a number of seeds.")
@click.option("--forever", is_flag=True, help="Run until a seed fails or you interrupt.")
@click.option("--split", is_flag=True, help="Simulate models in several stages.")
@click.option(
    "--leased", is_flag=True, help="Simulate two coordinators, one lease, and a store that answers late or never."
)
@click.option(
    "--operated", is_flag=True, help="Simulate jobs of any kind that users drain, query and configure at random."
)
@click.option("--sharded", is_flag=True, help="Simulate members that divide the optimizer's state among them.")
@click.option("--keep-going", is_flag=True, help="Do not stop at the first failure.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end; implies --keep-going.")
def command(
    seed: int | None,
    trace: bool,
    shrink: int | None,
    seeds: str,
    start: int,
    forever: bool,
    split: bool,
    leased: bool,
    operated: bool,
    sharded: bool,
    keep_going: bool,
    as_json: bool,
) -> int:
    """Train under simulated faults: the real coordinator and workers, on a simulated clock, network and processes.

    A seed that fails replays exactly."""
    for name, value in (("--start", start), ("--seed", seed or 0), ("--shrink", shrink or 0)):
        if value < 0:
            raise ConfigError(f"{name}: expected a whole number, at least 0, got {value}: choose another")
    kinds: dict[SeedKind, bool] = {"split": split, "leased": leased, "operated": operated, "sharded": sharded}
    if sum(kinds.values()) > 1:
        raise ConfigError(
            "expected at most one of --split, --leased, --operated, --sharded: the last three split models, too"
        )
    given: list[SeedKind] = [kind for kind, wanted in kinds.items() if wanted]
    kind: SeedKind = given[0] if given else ""
    first, stop = _range(seeds, start)
    if shrink is not None:
        if seed is not None or trace or as_json:
            raise ConfigError("--shrink takes one seed and prints its schedule: leave out --seed, --trace and --json")
        return run_shrunk(shrink, kind)
    if seed is not None:
        if as_json:
            raise ConfigError(f"--json sums up many seeds: give --seeds {seed}:{seed + 1} instead of --seed {seed}")
        return run_one(seed, kind, trace)
    if trace:
        raise ConfigError("--trace prints one seed's events: name it with --seed")
    return run_many(first, None if forever else stop, kind, keep_going or as_json, as_json)


def _range(seeds: str, start: int) -> tuple[int, int]:
    """The first seed, and the one after the last."""
    first, colon, last = seeds.partition(":")
    if not (first.isdecimal() and (last.isdecimal() or not colon)):
        raise ConfigError(f"--seeds: expected a number of seeds, or A:B, got {seeds!r}: such as 300, or 1000:2000")
    if colon and start:
        raise ConfigError(f"--seeds {seeds} names the first seed itself: leave out --start {start}")
    begin, stop = (int(first), int(last)) if colon else (start, start + int(first))
    if stop <= begin:
        raise ConfigError(f"--seeds: expected at least one seed, got {seeds!r}: choose more")
    return begin, stop
