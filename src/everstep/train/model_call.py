"""Running a task's loss where only a part of the model is at hand: what stands in for the model's forward pass.

The model's own `forward` is replaced on the instance, so everything else about it (attributes, hooks, `isinstance`) is
as the task expects. At the first part the call is stopped as soon as its arguments are known; at the last one the
arguments are ignored, and the last part's output is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everstep.base.errors import EverstepError, TaskError, check
from everstep.exact.trees import Bundle

Loss = Callable[[nn.Module, Any], Any]
"""`Task.loss` or `Task.metrics`: (model, batch) -> its result."""


class _Stopped(EverstepError):
    """Leaves the task's code once the model has been called."""


class ModelCall:
    """Takes the place of one model's `forward`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._answer: Callable[..., Any] | None = None
        self._calls = 0
        self._before = model.__dict__.get("forward")
        model.forward = self._forward  # type: ignore[method-assign]

    def __enter__(self) -> ModelCall:
        return self

    def __exit__(self, *_: object) -> None:
        """The model's own forward pass is in its place again."""
        if self._before is not None:
            self._model.forward = self._before  # type: ignore[method-assign]
        else:
            del self._model.__dict__["forward"]

    def arguments(self, loss: Loss, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the task's call of the model.

        Raises: TaskError if it does not call it, or calls it with tensors that need gradients.
        """
        found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def stop(*args: Any, **kwargs: Any) -> Any:
            found.append((args, kwargs))
            raise _Stopped("the model was called; let this exception through")

        try:
            self._run(loss, batch, stop)
        except _Stopped:
            args, kwargs = found[0]
            if any(t.requires_grad for t in tensors_in((args, kwargs))):
                raise TaskError(
                    "the loss calls the model with a tensor that requires a gradient; with stages, what goes into "
                    "the model must come from the batch alone"
                ) from None
            return args, kwargs
        if found:
            raise TaskError("the loss caught the exception that stops it where the model is called; let it through")
        raise TaskError(_NEVER)

    def result(self, loss: Loss, batch: Any, output: Callable[[], Any]) -> Any:
        """Result of the task's function, with the model's output from `output()`, called once.

        Raises: TaskError if the task calls the model never or twice.
        """
        result = self._run(loss, batch, lambda *args, **kwargs: output())
        if self._calls == 0:
            raise TaskError(_NEVER)
        return result

    def _run(self, loss: Loss, batch: Any, answer: Callable[..., Any]) -> Any:
        versions = [(t, t._version) for t in tensors_in(batch) if not t.is_inference()]
        self._answer, self._calls = answer, 0
        try:
            return loss(self._model, batch)
        finally:
            self._answer = None
            if any(t._version != version for t, version in versions):
                raise TaskError(
                    "the loss changes its batch in place; with stages it runs at the first and at the last one, so it "
                    "must work on a copy"
                )

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        check(self._answer is not None, "a model that is split can only be called by its task's loss and metrics")
        self._calls += 1
        if self._calls > 1:
            raise TaskError(_TWICE)
        return self._answer(*args, **kwargs)  # type: ignore[misc]


_NEVER = "the loss never called the model; with stages it must call it exactly once, as model(...)"
_TWICE = "the loss called the model twice; with stages it must call it exactly once: make one batch of both"


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor in nested mappings, lists and tuples."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_in(value)


class GraphEntry(torch.autograd.Function):
    """Where a part's graph begins: hands in tensors, and takes what autograd has for them, exactly as it is.

    Not leaves: those refuse operations in place, and their gradients would be copied into other strides.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, holder: EntryHolder) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.holder = holder
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in holder.tensors)

    @staticmethod
    def backward(ctx: Any, *found: Tensor | None) -> Any:  # type: ignore[override]
        ctx.holder.take(list(found))
        return None, None


class EntryHolder:
    """The tensors that go into a part and want a gradient, and the gradients once they are there."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.found: list[Tensor | None] = [None] * len(tensors)

    def take(self, found: list[Tensor | None]) -> None:
        self.found = found

    @staticmethod
    def enter(parcel: Bundle, tensors: Sequence[Tensor]) -> tuple[EntryHolder, Any]:
        """A graph begins with these in the places of a bundle's tensors; returns also the tree that goes in."""
        wanted = parcel.wants_gradient
        holder = EntryHolder([t for t, w in zip(tensors, wanted, strict=True) if w])
        inputs: Iterator[Tensor] = iter(())
        if holder.tensors:
            inputs = iter(GraphEntry.apply(torch.zeros((), requires_grad=True), holder))  # type: ignore[no-untyped-call]
        return holder, parcel.tree([next(inputs) if w else t for t, w in zip(tensors, wanted, strict=True)])
