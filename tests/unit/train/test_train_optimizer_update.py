"""An optimizer's update, whole or of a worker's own parts: what is looked at when, what is refused, what is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook

from divided_members import DividedMember, plan_of
from everstep.base.errors import ConfigError
from everstep.exact.dealt import Dealt
from everstep.exact.divisible import divisible
from everstep.exact.pieces import Ranges
from everstep.exact.seeding import seed_all
from everstep.exact.state_memory import StateMemory
from everstep.train import optimizer_update
from everstep.train.offload import FarMemory, StateFile
from everstep.train.optimizer_kind import NO_GRADIENT, OptimizerKind
from everstep.train.optimizer_update import OptimizerUpdate, refuse_undivided

ELEMENTS = OptimizerKind("elements", "", False, 64)
PLAN = plan_of(2, 1)


class Near(FarMemory):
    """Far memory that is the ordinary one, and remembers what is said to it."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def make(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def lacks(self, tensor: Tensor) -> bool:
        return False

    def ahead(self, tensor: Tensor) -> None:
        self.said.append((tensor.storage_offset(), tensor.numel()))

    def let_go(self) -> None:
        self.said.append("let go")


def divided(member: DividedMember) -> Any:
    return lambda: Dealt(member.state, PLAN, 0, 0, member.with_gradients)


def make(member: DividedMember, update: OptimizerUpdate, step: int, dealt: Any) -> list[Ranges]:
    """Returns what was updated at once, one after the other."""
    calls: list[Ranges] = []
    member.gradients(step)
    update.make(step, step, dealt(), give=calls.append)
    member.clear()
    return calls


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[OptimizerKind]:
    """What the next looks at an optimizer find, the last one for ever; each look takes one."""
    found = [ELEMENTS]
    monkeypatch.setattr(optimizer_update, "kind_of", lambda *_, **how: found.pop(0) if len(found) > 1 else found[0])
    return found


@pytest.mark.parametrize("most", [1 << 20, 256])
def test_parts_are_updated_to_the_bits_of_the_whole_and_nothing_else_is(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_update, "DIVIDED_ELEMENTS", most)
    whole, member = DividedMember(), DividedMember()
    update = OptimizerUpdate(member.optimizer, StateMemory())
    for step in (1, 2):
        whole.whole(step)
        before = [p.clone() for p in member.model.parameters()]
        calls = make(member, update, step, divided(member))
        assert update.dealt is not None and update.kind is not None and update.kind.divides == "elements"
        mine = update.dealt.updates()
        cut = [[r for p, own in call.items() if divisible(p) for r in own] for call in calls]
        assert all(sum(stop - first for first, stop in of) <= most for of in cut) and (len(calls) > 1) == (most == 256)
        assert {*mine} == {p for c in calls for p in c}
        right = dict(zip(member.model.parameters(), whole.model.parameters(), strict=True))
        shares = []
        for old, (parameter, expected) in zip(before, right.items(), strict=True):
            flat, was, theirs = (memory(tensor, parameter) for tensor in (parameter, old, expected))
            updated = torch.zeros(flat.numel(), dtype=torch.bool)
            for first, stop in mine.get(parameter, ()):
                updated[first:stop] = True
            assert torch.equal(flat, torch.where(updated, theirs, was))
            shares.append(updated)
        assert 0.3 < torch.cat(shares).float().mean() < 0.7
        with torch.no_grad():  # as the others send them
            for parameter, expected in right.items():
                parameter.copy_(expected)
    update.forget()
    assert update.dealt is None


def memory(tensor: Tensor, like: Tensor) -> Tensor:
    """Elements in the order of the parameter's memory."""
    return torch.empty_like(like).copy_(tensor).detach().as_strided((like.numel(),), (1,))


def test_each_update_says_anew_which_parts_it_is_of() -> None:
    whole, member = DividedMember(), DividedMember()
    update = OptimizerUpdate(member.optimizer, StateMemory())
    whole.whole(1)
    make(member, update, 1, lambda: None)
    assert update.dealt is None and update.kind is None, "nobody has to know how it can be divided"
    for mine, right in zip(member.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, right)
    make(member, update, 2, divided(member))
    assert update.dealt is not None
    member.gradients(3)
    update.make(3, 3)
    assert update.dealt is None


@pytest.mark.parametrize(("divides", "said"), [("elements", ""), ("nothing", "divide 0 bytes of the state of AdamW")])
def test_it_is_told_once_how_much_members_do_not_divide_if_that_is_much(divides: str, said: str) -> None:
    member = DividedMember(divides=divides)
    update = OptimizerUpdate(member.optimizer, StateMemory(), kind=ELEMENTS)
    assert not update.undivided(), "there is no update yet"
    make(member, update, 1, divided(member))
    told = update.undivided()
    assert said in told and bool(said) == bool(told)
    size = sum(8 * p.numel() + 4 for p in member.model.parameters() if p.requires_grad)  # and one for their step
    assert not said or f"all of the other {size:,}:" in told
    make(member, update, 2, divided(member))
    assert not update.undivided()


def test_it_is_told_if_nothing_is_divided_since_parts_of_no_elements_are_not_updated() -> None:
    member = DividedMember(divides="nothing")
    update = OptimizerUpdate(member.optimizer, StateMemory(), kind=ELEMENTS._replace(follows=False))
    make(member, update, 1, divided(member))
    told = update.undivided()
    assert "it cannot update a parameter of no elements" in told and "float32" not in told


@pytest.mark.parametrize("zero", [True, False])
def test_it_is_told_once_if_there_is_no_state_to_divide(zero: bool) -> None:
    member = DividedMember(SGD)
    update = OptimizerUpdate(member.optimizer, StateMemory(), kind=ELEMENTS._replace(state_bytes=0) if zero else None)
    make(member, update, 1, lambda: None)
    assert ("saves no memory: SGD keeps nothing" in update.undivided()) == zero
    assert not update.undivided()


def hooked(kind: str, optimizer: Any) -> Any:
    if kind == "own":
        return optimizer.register_step_post_hook(lambda *_: None)
    if kind == "global":
        return register_optimizer_step_post_hook(lambda *_: None)
    return optimizer.register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize(("kind", "named"), [("own", "post-hooks"), ("global", "post-hooks"), ("before", "pre-hooks")])
def test_hooks_of_a_step_would_see_a_part_of_it(kind: str, named: str) -> None:
    member = DividedMember()
    update, hook = OptimizerUpdate(member.optimizer, StateMemory()), hooked(kind, member.optimizer)
    try:
        with pytest.raises(ConfigError, match=f"no step {named} of AdamW"):
            make(member, update, 1, divided(member))
        make(member, OptimizerUpdate(member.optimizer, StateMemory()), 2, lambda: None)
    finally:
        hook.remove()


def test_an_optimizer_that_no_part_goes_with_is_refused_before_it_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, found = DividedMember().optimizer, list[OptimizerKind]()
    monkeypatch.setattr(optimizer_update, "expected_kind", lambda *_: found[-1])
    for good in (ELEMENTS, OptimizerKind("matrices", "the elements differ"), OptimizerKind("nothing", NO_GRADIENT)):
        found.append(good)
        assert refuse_undivided(optimizer, 3, 1) == good
    found.append(OptimizerKind("nothing", "the elements would differ"))
    with pytest.raises(ConfigError, match=r"AdamW does not allow: .* \(the elements would differ\)"):
        refuse_undivided(optimizer, 3, 1)


def test_a_divided_state_is_not_to_be_saved_by_the_loop() -> None:
    member = DividedMember()
    update = OptimizerUpdate(member.optimizer, StateMemory())
    member.optimizer.state_dict()
    for step in (1, 2):
        make(member, update, step, divided(member))
        with pytest.raises(ConfigError, match="state_dict is not available"):
            member.optimizer.state_dict()
    assert len(member.optimizer._optimizer_state_dict_pre_hooks) == 1
    assert not update.under_way


@pytest.mark.parametrize(("every", "looked"), [(0, [1, 2]), (1, [1, 2, 3, 4, 5, 6]), (3, [1, 2, 3, 6])])
def test_what_an_optimizer_is_like_is_looked_at_first_and_then_every_so_many_steps(
    monkeypatch: pytest.MonkeyPatch, every: int, looked: list[int]
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(optimizer_update, "kind_of", lambda _, seed, **how: seen.append(seed) or ELEMENTS)
    member = DividedMember()
    update = OptimizerUpdate(member.optimizer, StateMemory(), every)
    for step in range(1, 7):
        make(member, update, step, divided(member))
    assert seen == looked


@pytest.mark.parametrize(
    ("every", "kind", "begins", "far"),
    [
        (100, None, 1, [1, 100, 200, 300, 400]),
        (100, ELEMENTS, 1, [100, 200, 300, 400]),  # it was tried when it was built
        (100, ELEMENTS, 951, [951, 1000, 1100, 1200, 1300]),  # but not from here on
        (400, ELEMENTS, 1, [400]),
        (400, None, 1, [1, 400]),
        (0, ELEMENTS, 1, []),
        (0, None, 1, [1]),
    ],
)
def test_an_optimizer_is_tried_ahead_where_it_was_not_before(
    monkeypatch: pytest.MonkeyPatch, every: int, kind: OptimizerKind | None, begins: int, far: list[int]
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        optimizer_update, "kind_of", lambda _, seed, ahead, **how: (seen.append(seed) if ahead else 0) or ELEMENTS
    )
    update = OptimizerUpdate(DividedMember().optimizer, StateMemory(), every, kind)
    for step in range(begins, begins + 400):
        update._find_kind(step, step)
    assert seen == far


def test_a_look_for_which_there_is_no_room_changes_nothing(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def full(*_: Any, **how: Any) -> OptimizerKind:
        raise MemoryError("no room")

    monkeypatch.setattr(optimizer_update, "kind_of", full)
    member = DividedMember()
    update = OptimizerUpdate(member.optimizer, StateMemory(), 1, ELEMENTS)
    make(member, update, 1, divided(member))
    assert update.kind == ELEMENTS and "step 1: the optimizer is taken to be as it was before: no room" in caplog.text
    with pytest.raises(MemoryError, match="no room"):
        make(member, OptimizerUpdate(member.optimizer, StateMemory()), 1, divided(member))


def test_an_optimizer_that_has_changed_ends_the_job_by_name(looks: list[OptimizerKind]) -> None:
    larger, silent = ELEMENTS._replace(state_bytes=99), OptimizerKind("nothing", NO_GRADIENT)
    looks[:] = [ELEMENTS, larger, silent, ELEMENTS._replace(at_once=True)]
    member = DividedMember()
    update = OptimizerUpdate(member.optimizer, StateMemory(), 1)
    for step in (1, 2, 3):  # a larger state is no other kind, and without gradients nothing can be said
        make(member, update, step, divided(member))
        assert update.kind == ELEMENTS
    with pytest.raises(ConfigError, match=r"AdamW treats its parameters otherwise at step 4 .*\(it can be divided\)"):
        make(member, update, 4, divided(member))
    looks[:] = [OptimizerKind("matrices", "the elements differ")]
    with pytest.raises(ConfigError, match=r"\(the elements differ\)"):
        make(member, update, 5, divided(member))


def test_the_disk_is_asked_for_room_once(looks: list[OptimizerKind], tmp_path: Any, monkeypatch: Any) -> None:
    rooms: list[int] = []
    monkeypatch.setattr(StateFile, "room_for", lambda memory, nbytes: rooms.append(nbytes))
    trained = nn.Linear(4, 4)
    update = OptimizerUpdate(SGD(trained.parameters()), StateFile(tmp_path), 1)
    for step in (1, 2):
        trained(torch.ones(4)).sum().backward()
        update.make(step, step)
    assert rooms == [64]


class Probe:
    """Remembers what became of it."""

    def __init__(self, said: list[Any]) -> None:
        self._said = said

    def refuse_uncarried(self) -> None:
        self._said.append("carried")

    def compare(self, step: int) -> None:
        self._said.append(step)


@pytest.mark.parametrize("parts", [False, True])
def test_the_first_update_is_proved_and_a_part_of_one_cannot_be(monkeypatch: pytest.MonkeyPatch, parts: bool) -> None:
    said: list[Any] = []
    monkeypatch.setattr(
        optimizer_update, "UpdateProbe", lambda optimizer, seed, compares: said.append(("probe", seed)) or Probe(said)
    )
    member = DividedMember()
    update = OptimizerUpdate(member.optimizer, StateMemory())
    for step in (7, 8):
        make(member, update, step, divided(member) if parts else lambda: None)
        assert update.proven
    assert said == [("probe", 7), "carried", *[7] * (not parts)]
    other = DividedMember()
    known = OptimizerUpdate(other.optimizer, StateMemory())
    known.prove()
    make(other, known, 1, lambda: None)
    assert len(said) == 3 - parts


class Watched(AdamW):
    """Looks around while it is stepped, and draws a number."""

    owner: Any = None

    def step(self, closure: Any = None) -> Any:
        self.seen = self.owner.under_way, torch.rand(()).item()
        return super().step()


def test_an_update_begins_with_the_seed_and_is_under_way_until_it_has_ended() -> None:
    trained = nn.Linear(3, 3)
    optimizer = Watched(trained.parameters())
    optimizer.owner = update = OptimizerUpdate(optimizer, StateMemory())
    update.prove()
    trained(torch.ones(3)).sum().backward()
    torch.rand(5)
    update.make(1, 99)
    seed_all(99)
    assert optimizer.seen == (True, torch.rand(()).item()) and not update.under_way


# ---- where the state lies elsewhere


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(optimizer_update, "PART_ELEMENTS", 40)
    yield


def far(memory: FarMemory, looks: list[OptimizerKind], **kind: Any) -> tuple[nn.Sequential, OptimizerUpdate]:
    looks[:] = [ELEMENTS._replace(**kind)]
    seed_all(1)
    trained = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    update = OptimizerUpdate(Adam(trained.parameters()), memory)
    update.prove()
    for step in (1, 2):
        trained(torch.ones(8)).sum().backward()
        update.make(step, step)
    return trained, update


def test_the_state_of_a_part_is_read_ahead_and_let_go_of_after_it(
    small_parts: None, looks: list[OptimizerKind]
) -> None:
    memory = Near()
    trained, update = far(memory, looks)
    at = memory.said.index("let go", memory.said.index("let go") + 1)
    ahead = [one for one in memory.said if one != "let go"]
    calls = optimizer_update.calls_of(list(trained.parameters()), 40, True)
    assert len(calls) > 2 and memory.said.count("let go") == 2 * len(calls)
    state = update._optimizer.state
    expected = [
        (first, stop - first)
        for call in calls[1:]
        for parameter, ranges in call.items()
        for value in state[parameter].values()
        if value.shape == parameter.shape
        for first, stop in ranges
    ]
    assert ahead == expected and at > 0, "in the first update there is no state yet"


@pytest.mark.parametrize("kind", [{"at_once": True}, {"divides": "nothing"}])
def test_what_goes_with_no_part_is_updated_at_once(small_parts: None, looks: list[OptimizerKind], kind: Any) -> None:
    memory = Near()
    far(memory, looks, **kind)
    assert memory.said == ["let go", "let go"]


def test_an_update_in_parts_that_changes_its_groups_is_refused(small_parts: None, looks: list[OptimizerKind]) -> None:
    class Counting(Adam):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["calls"] = self.param_groups[0].get("calls", 0) + 1
            return super().step()

    for size, refused in ((8, True), (4, False)):  # one call alone is what it always was
        trained = nn.Linear(size, size)
        update = OptimizerUpdate(Counting(trained.parameters()), Near())
        update.prove()
        trained(torch.ones(size)).sum().backward()
        if refused:
            with pytest.raises(ConfigError, match="an update changes its groups or attributes"):
                update.make(1, 1)
        else:
            update.make(1, 1)


# ---- a slow disk


def judged(*took_and_waited_s: tuple[float, float]) -> list[str]:
    """What is said after updates that took so long, so long after the one before."""
    update, said, now = OptimizerUpdate(SGD([torch.zeros(1)]), Near()), [], 0.0
    update._before = now
    for took, whole in took_and_waited_s:
        now += whole
        update._judge(now - took, now)
        said.append(update.complaint())
    return said


def test_a_disk_is_too_slow_when_three_updates_in_a_row_take_most_of_the_time() -> None:
    slow, short, rare = (2.0, 3.0), (0.9, 1.0), (2.0, 4.0)
    said = judged(slow, slow, slow, slow, slow)
    assert [bool(one) for one in said] == [False, False, True, False, False], "it is told once"
    assert "the last took 2.0 of 3.0 s" in said[2] and "the host's memory" in said[2]
    assert not any(judged(slow, slow, short, slow, slow, rare, slow, slow))
    assert any(judged(short, slow, slow, slow)) and not any(judged((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)))
