"""What is known of the batches and windows that the threads are at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_g2.strategy.push_in_parts import PushInParts
from lightning_g2.values import GateDecision


@dataclass(eq=False)
class WindowUnderWay:
    """Batches that make one update together.

    Attributes:
        size: how many; fewer, where the data end earlier.
        number: of the rank's windows in this fit.
        batches: of it that have begun.
        samples: training samples behind these.
        base: server's version of the weights that the first of them was begun on.
        lane: of its push.
        push: of its gradients, once there are any.
        arrived: indices of the parameters that it has brought gradients for.
        held: gradients that go with the last packet, by index.
        held_factor: what their learning rates are multiplied by.
        ages: of the layers that it has updated.
        decisions: of the gate, where no server counts them.
        pushed: its push has been taken in.
    """

    size: int
    number: int
    batches: int = 0
    samples: int = 0
    base: int = 0
    lane: int = 0
    push: PushInParts | None = None
    arrived: set[int] = field(default_factory=set)
    held: dict[int, Tensor] = field(default_factory=dict)
    held_factor: float = 1.0
    ages: list[int] = field(default_factory=list)
    decisions: list[GateDecision] = field(default_factory=list)
    pushed: bool = False


@dataclass(eq=False)
class BatchUnderWay:
    """One batch, from its hook ``on_train_batch_start`` to its ``on_train_batch_end``.

    Attributes:
        batch: on the module's device.
        index: within the epoch.
        arguments: of ``training_step``.
        is_last: no batch follows in this epoch.
        left: batches left in its window, itself included, where the server hands windows out.
        window: the update that it belongs to.
        first: it is the first of its window.
        ends_stretch: no batch may begin before this one has been followed: the trainer validates, saves or ends then.
        logs: what hooks and the training step have logged.
        output: what ``on_train_batch_end`` gets.
        through: both of its passes are over.
    """

    batch: Any
    index: int
    arguments: tuple[Any, ...]
    is_last: bool
    window: WindowUnderWay
    first: bool
    left: int = 0
    ends_stretch: bool = False
    logs: list[LoggedValue] = field(default_factory=list)
    output: dict[str, Any] = field(default_factory=dict)
    through: bool = False


class LoggedValue:
    """A call of ``self.log``, to be made where Lightning expects it: on the main thread, in the order of the batches.

    Args:
        hook: in which it was called.
        name: key.
        value: kept as it is now.
        arguments: all others.
        options: all others.
    """

    def __init__(self, hook: str, name: str, value: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._hook, self._name = hook, name
        if isinstance(value, Tensor):
            value = value.clone() if options.get("enable_graph") else value.detach().clone()
        self._value, self._arguments, self._options = value, arguments, options
        self._of_step = value._forward_cache if isinstance(value, Metric) else None

    def replay(self, module: LightningModule) -> None:
        """Make the call on the module."""
        hook, module._current_fx_name = module._current_fx_name, self._hook
        now = self._value._forward_cache if isinstance(self._value, Metric) else None
        try:
            if isinstance(self._value, Metric):
                self._value._forward_cache = self._of_step  # later batches may have been through the metric
            module.log(self._name, self._value, *self._arguments, **self._options)
        finally:
            module._current_fx_name = hook
            if isinstance(self._value, Metric):
                self._value._forward_cache = now


@contextmanager
def logs_kept(module: LightningModule, logs: list[LoggedValue]) -> Iterator[None]:
    """Have ``self.log`` of a module, or of a thread's copy of it, add to a list for a while."""

    def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
        hook = module._current_fx_name or "training_step"
        logs.append(LoggedValue(hook, name, value, arguments, options))

    vars(module)["log"] = log
    try:
        yield
    finally:
        vars(module).pop("log", None)
