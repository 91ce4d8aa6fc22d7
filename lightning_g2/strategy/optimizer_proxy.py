"""Replace ``step`` on a rank's optimizer by a push, without anyone who looks at the optimizer noticing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

_MISSING = object()


class OptimizerProxy:
    """Puts a pushing ``step`` on an optimizer instance, and takes it away again.

    Replacing it on the instance keeps everything before it as it was under every precision plugin: unscaling,
    ``on_before_optimizer_step``, clipping; and it reaches optimizers that are stepped by hand.

    Args:
        optimizer: the rank's optimizer.
        push: called after the closure; sends the gradients and brings weights.
    """

    def __init__(self, optimizer: Optimizer, push: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._push = push
        self._saved: dict[str, Any] = {}

    def install(self) -> None:
        """Put the pushing ``step`` in place."""
        optimizer, push = self._optimizer, self._push

        def step(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            # Schedulers look here to see that a step came before theirs.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            push()
            return loss

        # Schedulers made later would otherwise wrap `step` as a bound method, which it is not.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._set("step", step)
        # A fused optimizer unscales gradients within its step; here the scaler has to do it, before the push.
        self._set("_step_supports_amp_scaling", False)

    def remove(self) -> None:
        """Give the optimizer its own ``step`` back."""
        for name, value in self._saved.items():
            if value is _MISSING:
                vars(self._optimizer).pop(name, None)
            else:
                vars(self._optimizer)[name] = value
        self._saved.clear()

    def _set(self, name: str, value: Any) -> None:
        self._saved.setdefault(name, vars(self._optimizer).get(name, _MISSING))
        vars(self._optimizer)[name] = value
