"""Replace ``step`` on a rank's optimizer by a push, without anyone who looks at the optimizer noticing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_MISSING = object()


class ReplacedStep:
    """A ``step`` of our own on an optimizer instance, for a while.

    Args:
        optimizer: the rank's optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._saved: dict[str, Any] = {}

    def remove(self) -> None:
        """Give the optimizer its own ``step`` back."""
        for name, value in self._saved.items():
            if value is _MISSING:
                vars(self._optimizer).pop(name, None)
            else:
                vars(self._optimizer)[name] = value
        self._saved.clear()

    def _replace(self, step: Callable[..., Any]) -> None:
        # Schedulers made later would otherwise wrap `step` as a bound method, which it is not.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._set("step", step)
        # A fused optimizer unscales gradients within its step; here the scaler has to do it, before they are looked at.
        self._set("_step_supports_amp_scaling", False)

    def _set(self, name: str, value: Any) -> None:
        self._saved.setdefault(name, vars(self._optimizer).get(name, _MISSING))
        vars(self._optimizer)[name] = value


class OptimizerProxy(ReplacedStep):
    """Puts a pushing ``step`` on an optimizer instance, and takes it away again.

    Replacing it on the instance keeps everything before it as it was under every precision plugin: unscaling,
    ``on_before_optimizer_step``, clipping; and it reaches optimizers that are stepped by hand. Step hooks run here, on
    the rank: pre-hooks before the closure as always, post-hooks once the push has brought its weights.

    Args:
        optimizer: the rank's optimizer.
        push: called after the closure; sends the gradients and brings weights.
    """

    def __init__(self, optimizer: Optimizer, push: Callable[[], None]) -> None:
        super().__init__(optimizer)
        self._push = push

    def install(self) -> None:
        """Put the pushing ``step`` in place."""
        optimizer, push = self._optimizer, self._push

        def step(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _run_pre_hooks(optimizer, (optimizer, *args), kwargs)
            closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            # Schedulers look here to see that a step came before theirs.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            push()
            for hook in (*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
                hook(optimizer, args, kwargs)
            return loss

        self._replace(step)


def _run_pre_hooks(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run step pre-hooks, which may replace the arguments of the step."""
    for hook in (*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()):
        replaced = hook(optimizer, args, kwargs)
        if replaced is not None:
            if not isinstance(replaced, tuple) or len(replaced) != 2:
                raise RuntimeError(
                    f"step pre-hook {hook}: must return None or (new_args, new_kwargs), got {replaced!r}"
                )
            args, kwargs = replaced
    return args, kwargs
