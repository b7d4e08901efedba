"""What must not make a split job another one: an evaluation, and where the model is cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from split_run import SplitRun, config_of, run_split
from test_split_odd_models import VALUES, Odd, linear
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from everstep.base.errors import ConfigError
from everstep.exact.topology import select
from everstep.train.evaluation import Waves
from everstep.train.replica import StageReplica
from odd_optimizers import Whitened

TWO = ((0, 1), (1, 2))


def frozen_norm() -> nn.Module:
    model = nn.Sequential(linear(), nn.BatchNorm1d(4), nn.Dropout(0.3))
    model[1].eval()
    return model


class _Stages(dict[int, StageReplica]):
    count = 2


def evaluated(run: SplitRun) -> dict[str, float]:
    """An evaluation in waves, by the one worker of a run with all stages."""
    task, stages = run.task, _Stages(run.workers[0])
    plan = SimpleNamespace(generation=1, stages=2, pool=lambda stage: [SimpleNamespace(worker_id=0, lanes=(0,))])
    view = SimpleNamespace(
        stages=stages,
        config=run.config,
        me=0,
        driver=SimpleNamespace(machine=SimpleNamespace(generation=1)),
        cutter=SimpleNamespace(over=lambda generation: False),
        transport=SimpleNamespace(channel=SimpleNamespace(forget=lambda number: None)),
        tick=lambda: None,
    )

    def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": torch.stack([task.loss(model, batch), torch.ones(())])}

    waves = Waves(cast(Any, view), metrics, 3, lambda k: torch.utils.data.default_collate([task.build_dataset("x")[k]]))
    given: Callable[[bytes], Mapping[int, bytes]] = lambda data: {0: data}  # noqa: E731
    return waves.run(given, lambda: waves.pass_on(cast(Any, SimpleNamespace(plan=plan, number=1 << 31))))


def test_an_evaluation_leaves_each_module_of_each_stage_in_its_own_mode() -> None:
    task = Odd(frozen_norm)
    undisturbed = run_split(task, TWO, 2, 3, values=VALUES)
    run = SplitRun(task, config_of(task, {"steps": 3, **VALUES}), TWO, 2)
    for step in range(1, 4):
        run.step(step)
        assert evaluated(run)["loss"] > 0
    for k in range(2):
        models = [one.workers[0][k].parts.model for one in (undisturbed, run)]
        for mine, theirs in zip(*(model.state_dict().values() for model in models), strict=True):
            assert torch.equal(mine, theirs)
    assert run.digests(3) == undisturbed.digests(3)


def test_strides_of_what_an_optimizer_keeps_are_those_of_every_cut() -> None:
    task = Odd(linear, lambda p: Whitened([{"params": p[2:]}, {"params": p[:2]}]))
    config = config_of(task, {"steps": 9, **VALUES})
    one, two = SplitRun(task, config, ((0, 2),), 1), SplitRun(task, config, TWO, 2)
    for step in (1, 2):
        one.step(step)
        two.step(step)
    whole, state = one.whole(), one.workers[0][0].state
    assert {"optimizer/0.weight/more/0", "optimizer/1.weight/basis"} <= dict(whole["values"]["strides"]).keys()
    assert two.whole() == whole
    blocks = [bytes(state.read_block(i)) for i in range(len(whole["blocks"]))]
    fresh = SplitRun(task, config, TWO, 2)
    for stage in fresh.workers[0].values():
        needed, where = select(whole, stage.state.names)
        stage.state.load(needed, lambda i, where=where: blocks[where[i]])  # type: ignore[misc]
    assert fresh.whole() == whole
    for run in (one, two, fresh):
        run.step(3)
    assert one.digests(3) == two.digests(3) == fresh.digests(3)


class Noisy(nn.Module):
    """Its gradient is rounded at random. how: draws."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.how = linear(), how

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        if out.requires_grad:
            out.register_hook(self.how)  # type: ignore[no-untyped-call]
        return out


class Recomputed(nn.Module):
    """Draws in its forward pass, which is repeated in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(linear(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


class UnitAgain(nn.Sequential):
    """A unit that is entered again in backward, and leaves the generators as they are then."""

    def __init__(self) -> None:
        super().__init__(linear(), nn.Dropout(0.3))

    def __call__(self, x: Tensor) -> Any:
        return checkpoint(super().__call__, x, use_reentrant=False, preserve_rng_state=False)


def noisy() -> nn.Module:
    return Noisy(lambda gradient: gradient + 0.1 * torch.randn_like(gradient))


def test_what_draws_in_its_backward_pass_is_refused_where_the_bits_would_go_by_the_cut() -> None:
    task = Odd(noisy)
    run_split(task, ((0, 2),), 1, 2, values=VALUES)
    for stages, how in ((2, {}), (2, {"recompute": True}), (1, {"kind": "interleaved"})):
        values = {**VALUES, "chunks": 2 // stages, "schedule": how.get("kind", "1f1b")}
        with pytest.raises(ConfigError, match=r"stage 0 draws random numbers in its backward pass.*stages=1"):
            run_split(task, TWO, stages, 1, values=values, **how)


@pytest.mark.parametrize("make", [Recomputed, UnitAgain])
def test_what_is_computed_again_in_a_backward_pass_may_draw(make: Callable[[], nn.Module]) -> None:
    task = Odd(make)
    one = run_split(task, ((0, 2),), 1, 2, values=VALUES)
    assert run_split(task, TWO, 2, 2, values=VALUES, recompute=True).digests(2) == one.digests(2)
