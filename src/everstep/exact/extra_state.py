"""State of modules beside parameters and buffers (`get_extra_state`), as one tensor of bytes per module.

Apart because all code that carries a state knows tensors. So the extra state of a module is hashed, sent, saved and cut
into stages like a buffer, under its name in `state_dict`. The bytes are a safetensors file: the tensors of the extra
state, and as JSON (`exact.jsonable`) the containers that hold them. No pickle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from everstep.base.errors import CheckpointCorrupt, ConfigError
from everstep.exact.jsonable import decode, encode

SUFFIX = "_extra_state"
_JSON, _VALUE = "json", "value"


def has_extra_state(module: nn.Module) -> bool:
    """Whether the module's class defines `get_extra_state`."""
    own = getattr(type(module), "get_extra_state", nn.Module.get_extra_state)
    return own is not nn.Module.get_extra_state


def keepers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with extra state, each once, by the name of that state in `state_dict`."""
    for prefix, module in model.named_modules():
        if has_extra_state(module):
            yield f"{prefix}.{SUFFIX}" if prefix else SUFFIX, module


def is_extra(name: str) -> bool:
    """Whether this is a name of extra state."""
    return name.rpartition(".")[2] == SUFFIX


def packed(name: str, module: nn.Module) -> Tensor:
    """A module's extra state as bytes: uint8, in one dimension. Equal values of equal types give equal bytes.

    Raises: ConfigError naming a part that cannot be carried.
    """
    return pack(name, module.get_extra_state())


def pack(name: str, value: Any) -> Tensor:
    """A value in the form of `packed`."""
    tensors: dict[str, Tensor] = {}
    try:
        node = encode(value, _VALUE, tensors)
        elsewhere = sorted(key for key, tensor in tensors.items() if tensor.device.type != "cpu")
        text = json.dumps([node, elsewhere], separators=(",", ":")).encode()
        own = {key: tensor.detach().cpu().clone().contiguous() for key, tensor in tensors.items()}
        data = save({**own, _JSON: _bytes(text)})
    except (ConfigError, RuntimeError, TypeError, ValueError, KeyError) as error:
        said = " ".join(str(error).split())[:300]
        raise ConfigError(f"the extra state of {_owner(name)} cannot be carried: {said}") from error
    return _bytes(data)


def unpack(data: Tensor, device: torch.device | None = None) -> Any:
    """Inverse of `pack`. device: for tensors that were not on the host; by default they stay on the host.

    Raises: CheckpointCorrupt if these are no bytes of `pack`.
    """
    try:
        tensors = load(bytes(data.detach().cpu().contiguous().numpy().data))
        node, elsewhere = json.loads(bytes(tensors.pop(_JSON).numpy().data))
        if device is not None:
            tensors |= {key: tensors[key].to(device) for key in elsewhere}
        return decode(node, tensors)
    except CheckpointCorrupt:
        raise
    except Exception as error:  # raised by the code of safetensors or json
        raise CheckpointCorrupt(f"extra state is not as Everstep writes it: {error!r}") from error


def give(module: nn.Module, data: Tensor) -> None:
    """Set a module's extra state from these bytes."""
    parameter = next(module.parameters(), None)
    with torch.no_grad():
        module.set_extra_state(unpack(data, parameter.device if parameter is not None else None))


# ---- in files for other tools


def to_file(name: str, value: Any) -> Tensor:
    """Form of a value in a file of tensors: the value itself if it is a tensor, else its bytes."""
    itself = isinstance(value, Tensor) and not _are_bytes(value)
    return value.detach().cpu().clone().contiguous() if itself else pack(name, value)


def from_file(found: Tensor) -> Any:
    """Value from a file of tensors. Raises: CheckpointCorrupt."""
    return unpack(found) if _are_bytes(found) else found


def _are_bytes(tensor: Tensor) -> bool:
    return tensor.dtype == torch.uint8 and tensor.dim() == 1


# ---- before the start


def refuse_uncarried(model: nn.Module) -> None:
    """Check that all extra state can be taken and given back.

    Raises: ConfigError naming a module whose state cannot.
    """
    for name, module in keepers(model):
        before = packed(name, module)
        kind = f"{_owner(name)} ({type(module).__name__})"
        if getattr(type(module), "set_extra_state", None) is nn.Module.set_extra_state:
            raise ConfigError(f"{kind} has get_extra_state and no set_extra_state: define both, or neither")
        give(module, before)
        if not torch.equal(packed(name, module), before):
            raise ConfigError(
                f"{kind} returns another extra state than it was given: set_extra_state(s) must have get_extra_state() "
                "return s, to the bit"
            )


def _owner(name: str) -> str:
    return name.removesuffix(SUFFIX).removesuffix(".") or "the model"


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
