"""Optimizer steps that a rank makes itself, several to one push.

The module's own optimizers step on the rank, and keep their state there. After a number of steps, and wherever ranks
meet, the rank pushes how far its weights have moved since they were loaded; the server takes that for a gradient and
moves its weights with an optimizer of its own (DiLoCo, arXiv 2311.08105; asynchronous local SGD, arXiv 2401.09135).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_g2.strategy.optimizer_proxy import ReplacedStep

OUTER_KEY = "lightning_g2_outer"
"""Entry of a checkpoint: what the server's optimizer keeps."""


def is_exact(dtype: torch.dtype) -> bool:
    """Whether a dtype has no differences to learn from: integers and booleans."""
    return not (dtype.is_floating_point or dtype.is_complex)


class LocalSteps:
    """Counts a rank's own optimizer steps, and says when to push what they have done.

    A push covers whole accumulation windows: within one, gradients of one optimizer may wait while another steps. The
    round ends with the window in which one of the module's optimizers has made its ``every`` steps.

    Args:
        every: H, optimizer steps to a push.
        push: pushes the difference and loads what the server then has; called with the steps of all optimizers and
            the training samples behind it.

    Attributes:
        window_open: batches of an accumulation window are under way.
    """

    def __init__(self, every: int, push: Callable[[int, int], None]) -> None:
        self.window_open = False
        self._every = every
        self._push = push
        self._steps: Counter[int] = Counter()
        self._samples = 0
        self._depth = 0
        self._pushing = False

    @property
    def unpushed(self) -> int:
        """Steps of all optimizers that no push has brought yet."""
        return self._steps.total()

    def restart(self) -> None:
        """A training begins; one before it, a finder's, may have ended in the middle of a round."""
        self._steps.clear()
        self._samples, self._depth, self._pushing, self.window_open = 0, 0, False, False

    def close_window(self, samples: int) -> None:
        """An accumulation window has ended, with so many samples in it: push if the round is over."""
        self.window_open = False
        self._samples += samples
        if max(self._steps.values(), default=0) >= self._every:
            self.flush()

    def flush(self) -> bool:
        """Push the steps since the last push, if there are any; returns whether there were."""
        if not self._steps or self._pushing:  # a signal's handler may ask in the middle of a push
            return False
        self._pushing = True
        try:
            self._push(self.unpushed, self._samples)
        finally:
            self._pushing = False
        self._steps.clear()
        self._samples = 0
        return True

    def step(self, optimizer: int, make: Callable[[], Any]) -> Any:
        """Make one step; one that an optimizer makes within its own (as SAM does) is part of that.

        Args:
            optimizer: index of the module's optimizer.
            make: makes it.

        Returns:
            What ``make`` returns.
        """
        self._depth += 1
        try:
            result = make()
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._steps[optimizer] += 1
        return result


class LocalStep(ReplacedStep):
    """Puts a counting ``step`` on an optimizer instance, and takes it away again; the optimizer's own step runs in it.

    Closure, hooks, fused and foreach forms stay the optimizer's own. Between the closure and the step the gradients are
    looked at; where they may not be used the optimizer steps without any, as it does for unused parameters.

    Args:
        optimizer: the rank's optimizer.
        index: index of the module's optimizer that it is, or is within.
        steps: counts.
        admit: says, once gradients are there, whether they may be used.
    """

    def __init__(self, optimizer: Optimizer, index: int, steps: LocalSteps, admit: Callable[[], bool]) -> None:
        super().__init__(optimizer)
        self._index = index
        self._steps = steps
        self._admit = admit

    def install(self) -> None:
        """Put the counting ``step`` in place."""
        own = self._optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            withheld: dict[Tensor, Tensor] = {}
            closure = args[0] if args else kwargs.pop("closure", None)
            if closure is None:
                withheld.update(self._withhold())
            else:

                def judged() -> Any:
                    loss = closure()
                    withheld.update(self._withhold())
                    return loss

                args = (judged, *args[1:])
            try:
                return self._steps.step(self._index, lambda: own(*args, **kwargs))
            finally:
                for parameter, gradient in withheld.items():
                    parameter.grad = gradient

        self._replace(step)

    def _withhold(self) -> dict[Tensor, Tensor]:
        """Take gradients that may not be used away, for the time of the step."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined] # schedulers look here
        with torch.no_grad():
            if self._admit():
                return {}
        parameters = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        withheld = {p: p.grad for p in parameters}
        for parameter in parameters:
            parameter.grad = None
        return withheld
