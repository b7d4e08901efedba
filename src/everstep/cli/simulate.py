"""`everstep sim`: simulated faults, seed by seed; exit 1 at the first that breaks a promise, with what replays it."""

from __future__ import annotations

import click

from everstep.base.errors import ConfigError
from everstep.sim.seeds import run


@click.command()
@click.option("--seed", type=int, help="Simulate this seed alone.")
@click.option("--trace", is_flag=True, help="With --seed: print everything that happens.")
@click.option("--seeds", type=int, default=300, show_default=True, help="How many seeds.")
@click.option("--start", type=int, default=0, show_default=True, help="The first seed.")
@click.option("--forever", is_flag=True, help="Go on until a seed fails or you interrupt.")
@click.option("--split", is_flag=True, help="Models in several stages.")
@click.option("--keep-going", is_flag=True, help="Do not stop at the first failure.")
def command(seed: int | None, trace: bool, seeds: int, start: int, forever: bool, split: bool, keep_going: bool) -> int:
    """Train under simulated faults: the coordinator and the workers of real jobs, with a clock, a network and processes
    that are not. What fails is replayed exactly by its seed."""
    for name, value, least in (("--seeds", seeds, 1), ("--start", start, 0), ("--seed", seed or 0, 0)):
        if value < least:
            raise ConfigError(f"{name}: expected a whole number, at least {least}, got {value}: choose another")
    if trace and seed is None:
        raise ConfigError("--trace prints one seed's events: name it with --seed")
    return run(seed, trace, seeds, start, forever, split, keep_going)
