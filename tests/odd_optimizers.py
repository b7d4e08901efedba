"""Optimizers that do something now and then, for some parameters, for some gradients, or with their own groups: what
each may be divided into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from optimizers_divided import Own


class Counted(Own):
    """Momentum, and a number of updates for each parameter."""

    def update(self, p: Any, state: Any, group: Any) -> None:
        state["n"] = state.get("n", 0) + 1
        momentum = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
        p.sub_(momentum * self.scale(p, state, group), alpha=group["lr"])

    def scale(self, p: Any, state: Any, group: Any) -> Any:
        """How far to go."""
        return 1.0

    def global_scale(self, group: Any) -> Any:
        """By the norm of all gradients of the group."""
        return 1 / (torch.stack([q.grad.float().norm() for q in group["params"] if q.grad is not None]).norm() + 1)


class Periodic(Counted):
    """Goes by the norm of all gradients in every fifth update."""

    def scale(self, p: Any, state: Any, group: Any) -> Any:
        return self.global_scale(group) if state["n"] % 5 == 0 else 1.0


class Late(Counted):
    """Goes by the norm of the parameter from the 90th update on."""

    def scale(self, p: Any, state: Any, group: Any) -> Any:
        return p.norm() / (p.norm() + 1) if state["n"] >= 90 else 1.0


class Clipped(Counted):
    """Goes by the norm of all gradients where that is very large."""

    def scale(self, p: Any, state: Any, group: Any) -> Any:
        found = self.global_scale(group)
        return found if found < 1e-5 else 1.0


class Slow(Counted):
    """Lookahead: slow parameters, to which the others go back in part in every third update."""

    def update(self, p: Any, state: Any, group: Any) -> None:
        slow = state.setdefault("slow", p.detach().clone())
        super().update(p, state, group)
        if state["n"] % 3 == 0:
            slow.lerp_(p, 0.5)
            p.copy_(slow)


class Lazy(Own):
    """Leaves out a parameter whose gradient is zero; its state is there from the beginning."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["momentum"] = torch.zeros_like(p, requires_grad=False)

    def update(self, p: Any, state: Any, group: Any) -> None:
        if p.grad.any():
            p.sub_(state["momentum"].mul_(0.9).add_(p.grad), alpha=group["lr"])


class Large(Counted):
    """Goes by the norm of parameters that are not small."""

    def scale(self, p: Any, state: Any, group: Any) -> Any:
        return p.norm() / (p.norm() + 1) if p.numel() > 100 else 1.0


class Finite(Counted):
    """Leaves out an update in which a gradient is not finite."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return super().step() if all(bool(g.isfinite().all()) for g in gradients) else None


class Turned(Own):
    """Puts its groups into another order."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        self.param_groups.reverse()

    def update(self, p: Any, state: Any, group: Any) -> None:
        p.sub_(p.grad, alpha=group["lr"])


class Freezes(Turned):
    """Takes a parameter out of its group in the fourth update."""

    k = 0

    def step(self, closure: Any = None) -> Any:
        Own.step(self)
        self.k += 1
        if self.k == 4:
            self.param_groups[0]["params"].pop(0)


class Paced(Counted):
    """Its rate is a tensor that goes down a little in each update."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            group["lr"] = torch.as_tensor(group["lr"]) * 0.99999


class Listed(Counted):
    """Keeps the last gradients of each parameter in a list."""

    def scale(self, p: Any, state: Any, group: Any) -> Any:
        history = state.setdefault("history", [])
        history[:] = [*history, p.grad.clone()][-3:]
        return torch.stack(history).mean(0).tanh()


class Buckets(Counted):
    """Keeps ten numbers of each parameter."""

    def scale(self, p: Any, state: Any, group: Any) -> Any:
        found = state.setdefault("buckets", torch.zeros(10))
        found.mul_(0.9).add_(torch.histc(p.grad.float(), bins=10, min=-3, max=3))
        return 1 / (1 + found.max())


class Remembers(Own):
    """Goes through parameters of its own list."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.all = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.all:
            if p.grad is not None:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                p.sub_(momentum, alpha=0.01)


class Norms(Counted):
    """Goes by the norm of all gradients, of the parameters in a list of its own."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.all = [p for group in self.param_groups for p in group["params"]]

    def scale(self, p: Any, state: Any, group: Any) -> Any:
        return 1 / (1 + torch.stack([q.grad.float().norm() for q in self.all if q.grad is not None]).norm())


class Favours(Counted):
    """Knows one parameter by itself."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.rates = {self.param_groups[0]["params"][-1]: 0.1}

    def scale(self, p: Any, state: Any, group: Any) -> Any:
        return self.rates.get(p, 1.0)


class Cached(Own):
    """Keeps momentum beside its state, by the number of the parameter."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.cache: dict[int, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for k, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                self.cache[k] = self.cache.get(k, 0) * 0.9 + p.grad
                p.sub_(self.cache[k], alpha=0.01)


class Later(Counted):
    """Begins to keep a second tensor in its third update."""

    def scale(self, p: Any, state: Any, group: Any) -> Any:
        if state["n"] < 3:
            return 1.0
        return 1 / (state.setdefault("square", torch.zeros_like(p)).lerp_(p.grad * p.grad, 0.1).sqrt() + 1)


class Averaged(Own):
    """Keeps one number for all: the mean of the largest elements of all gradients."""

    def step(self, closure: Any = None) -> Any:
        kept = self.state.setdefault("all", {"mean": 0.0})  # type: ignore[call-overload]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        largest = max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0)
        kept["mean"] = 0.9 * kept["mean"] + 0.1 * largest
        super().step()

    def update(self, p: Any, state: Any, group: Any) -> None:
        p.sub_(p.grad, alpha=group["lr"] / (1 + self.state["all"]["mean"]))  # type: ignore[index]


class Turns(Counted):
    """Counts its updates itself, and goes the other way in every seventh."""

    k = 0

    def step(self, closure: Any = None) -> Any:
        self.k += 1
        return super().step()

    def scale(self, p: Any, state: Any, group: Any) -> Any:
        return -1.0 if self.k % 7 == 0 else 1.0


class Whitened(Own):
    """Keeps bases as decompositions give them, column by column; some in a list. how: of the one that may be like the
    parameter."""

    def __init__(self, params: Any, how: Callable[[torch.Tensor], torch.Tensor] = lambda q: q) -> None:
        super().__init__(params)
        self.how = how

    def update(self, p: Any, state: Any, group: Any) -> None:
        state["n"] = state.get("n", 0) + 1
        rows = p.grad.reshape(len(p), -1)
        if state["n"] % 3 == 1:
            state["basis"] = self.how(torch.linalg.eigh(rows @ rows.t() + torch.eye(len(p)))[1])
            state["more"] = [torch.linalg.qr(rows)[0], torch.ones(2)]
        basis, more = state["basis"], state["more"][0]
        p.sub_((basis @ (basis.t() @ rows) + more @ (more.t() @ rows)).view_as(p), alpha=group["lr"])


def _in_two(kind: Callable[[Any], Any]) -> Callable[[list[nn.Parameter]], Any]:
    return lambda ps: kind([{"params": ps[::2]}, {"params": ps[1::2], "lr": 0.02}])


ODD: dict[str, tuple[Callable[[list[nn.Parameter]], Any], str]] = {
    kind.__name__: (_in_two(kind), divides)
    for divides, kinds in {
        "elements": (Counted, Slow, Paced, Turns),
        "matrices": (Late, Lazy, Large, Buckets),
        "nothing": (Periodic, Clipped, Finite, Turned, Freezes, Remembers, Norms, Favours, Cached, Averaged),
    }.items()
    for kind in kinds
} | {"Listed": (_in_two(Listed), "matrices")}
"""How each is made, and what may be updated apart."""
