"""Building a model that no single host could hold: on the meta device first, then module by module, each by itself.

Every module is initialised under generators seeded from the job's seed and the module's own path, so what it begins
with does not depend on which other modules are made here: the same bits in every topology.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from everstep.base.errors import ConfigError
from everstep.exact.seeding import module_seed, preserve_rng, seed_all


def build_by_module(
    build: Callable[[], nn.Module],
    units_of: Callable[[nn.Module], Sequence[nn.Module]],
    seed: int,
    device: torch.device,
    wanted: Iterable[int] | None = None,
) -> tuple[nn.Module, list[nn.Module]]:
    """The model and its units. Only the units `wanted` (all by default), and what is outside all units, take memory.

    A module is initialised by its `reset_parameters()`, then by the model's `_init_weights(module)`, where there are
    such. A tied parameter begins as its first module makes it.

    Raises: ConfigError naming a module that has parameters or buffers of its own and neither of the two.
    """
    with torch.device("meta"):
        model = build()
    units = list(units_of(model))
    chosen = set(range(len(units)) if wanted is None else wanted)
    needed = {id(m) for k, unit in enumerate(units) if k in chosen for m in unit.modules()}
    inside = {id(m) for unit in units for m in unit.modules()}
    needed |= {id(m) for m in model.modules() if id(m) not in inside}
    made: dict[int, nn.Parameter] = {}
    owners = _owners(model)
    needed |= {
        id(owners[id(p)]) for m in model.modules() if id(m) in needed for p in m._parameters.values() if p is not None
    }
    with preserve_rng():
        for path, module in model.named_modules():
            if id(module) in needed:
                _materialise(model, path, module, seed, device, owners, made)
    for module in model.modules():  # what is not made stays tied to what is, so that every stage sees the tie
        if id(module) not in needed:
            tied = {name: made[id(p)] for name, p in module._parameters.items() if p is not None and id(p) in made}
            module._parameters.update(tied)
    return model, units


def _owners(model: nn.Module) -> dict[int, nn.Module]:
    """id of each parameter -> the first module that has it."""
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), module)
    return owners


def _materialise(
    model: nn.Module,
    path: str,
    module: nn.Module,
    seed: int,
    device: torch.device,
    owners: dict[int, nn.Module],
    made: dict[int, nn.Parameter],
) -> None:
    ties: dict[str, nn.Parameter] = {}
    own = False
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if owners[id(parameter)] is not module or id(parameter) in made:
            ties[name] = made[id(parameter)]
        else:
            own = True
            made[id(parameter)] = nn.Parameter(_empty(parameter, device), requires_grad=parameter.requires_grad)
            made[id(parameter)].__dict__.update(parameter.__dict__)
        module._parameters[name] = _scratch(parameter, device) if name in ties else made[id(parameter)]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            own = True
            module._buffers[name] = _empty(buffer, device)
    if own:
        _initialise(model, path, module, seed)
    module._parameters.update(ties)


def _initialise(model: nn.Module, path: str, module: nn.Module, seed: int) -> None:
    reset = getattr(module, "reset_parameters", None)
    rest = getattr(model, "_init_weights", None)
    if reset is None and rest is None:
        raise ConfigError(
            f"meta_init: module {path or 'at the top'} ({type(module).__name__}) has parameters or buffers of its own "
            "and no reset_parameters() to initialise them; give it one, or set meta_init to false"
        )
    seed_all(module_seed(seed, path))
    with torch.no_grad():
        if reset is not None:
            reset()
        if rest is not None:
            rest(module)


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    """Zeros, so that what nobody initialises is the same everywhere."""
    return torch.zeros_like(tensor.detach(), device=device)


def _scratch(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """For a tied parameter while another module's initialiser runs over it."""
    return nn.Parameter(_empty(parameter, device), requires_grad=parameter.requires_grad)
