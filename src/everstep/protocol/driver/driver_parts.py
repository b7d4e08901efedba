"""The parts of a worker's driver, put together. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.placement.probes import ProbeRule
from everstep.protocol.driver.application import Application
from everstep.protocol.driver.comparing import Comparing, Names
from everstep.protocol.driver.joint_feeds import Followers
from everstep.protocol.driver.nonfinite import NonfiniteRule
from everstep.protocol.driver.operations import Records
from everstep.protocol.driver.outbox import Gathers, Outbox
from everstep.protocol.driver.probing import Probing
from everstep.protocol.driver.records import StepOutcome, conclude
from everstep.protocol.driver.saver import Keeper, Saver, SavingRules
from everstep.protocol.driver.settler import Settler
from everstep.protocol.driver.stepper import Joiner, Stepper
from everstep.protocol.step_machine import StepMachine


@dataclass(frozen=True)
class DriverConfig:
    """Settings of a driver.

    lanes: of the global batch. rewindable: the application can go on from an earlier step; else this worker
    restarts. verify_every, begins_after, repeats, names, votes: as for `Comparing`. saving: of checkpoints. probes:
    of lanes. nonfinite: the rule for steps that are not finite.
    """

    lanes: int
    rewindable: bool = True
    verify_every: int = 0
    begins_after: int = 0
    saving: SavingRules = field(default_factory=SavingRules)
    repeats: bool = True
    names: Names = lambda stage: ()
    probes: ProbeRule = field(default_factory=ProbeRule)
    nonfinite: NonfiniteRule = field(default_factory=NonfiniteRule)
    votes: bool = True

    def outcome(self, number: int, records: Records) -> StepOutcome:
        """Outcome of a step by its records, the same at every worker."""
        return conclude(number, self.lanes, records, self.nonfinite)


class DriverParts:
    """The parts around the step machine; each is given the parts that it needs."""

    def __init__(self, config: DriverConfig, machine: StepMachine) -> None:
        self.machine = machine
        self.out = out = Outbox(machine.me)
        self.gathers = gathers = Gathers()
        every, after = config.verify_every, config.begins_after
        self.comparing = comparing = Comparing(
            every, after, repeats=config.repeats, names=config.names, votes=config.votes
        )
        self.probing = probing = Probing(config.probes, after)
        self.stepper = stepper = Stepper(machine, out, gathers, config.outcome, comparing, probing)
        self.keeper = keeper = Keeper(machine, out, self.proven)
        self.settler = settler = Settler(machine, out, gathers, keeper, config.rewindable, comparing, probing)
        self.saver = saver = Saver(machine, out, gathers, config.saving)
        ends = saver, stepper.last, config.rewindable, settler.bring_together
        self.followers = followers = Followers()
        self.application = Application(machine, out, *ends, followers)
        self.joiner = Joiner(out, stepper, gathers)

    def proven(self, number: int) -> int:
        """The newest step, up to `number`, whose state and lanes the workers have compared and found alike."""
        return self.probing.proven(self.comparing.proven(number))
