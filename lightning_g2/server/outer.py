"""The server's own optimizers: for what ranks have moved by themselves, and for gradients with a delayed momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_g2.errors import ConfigurationError
from lightning_g2.server.aggregate import Aggregation
from lightning_g2.server.optimizer import hyper_parameters
from lightning_g2.server.state import ServerSnapshot

OuterName = Literal["nesterov", "delayed_nesterov"]


class DelayedNesterov(Optimizer):
    """Nesterov momentum that moves only with every K-th push.

    With g the pushed difference, or gradient, each push does D += g, and

        every K-th push:  m = β·m + D/K,  w -= η·(β·m + g/K),  D = 0
        any other:        w -= η·g/K

    so that K pushes together act as one step of their mean. K = 1 is Nesterov momentum itself. A parameter that a push
    does not move is left as it is by that push, D and m included. A group may have ``weight_decay`` and ``maximize`` of
    :class:`torch.optim.SGD`; it counts its ``pushes``.

    Args:
        params: parameters or groups.
        lr: η ≥ 0, dimensionless.
        momentum: β, 0 to 1.
        delay: K ≥ 1, pushes.

    Source:
        Delayed Nesterov of arXiv 2401.09135, with c = 0.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float, delay: int) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "delay": delay, "pushes": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move by what is in ``.grad``."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["pushes"] += 1
            due = group["pushes"] % group["delay"] == 0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group, due)
        return loss

    def _move(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any], due: bool) -> None:
        lr, momentum, delay = group["lr"], group["momentum"], group["delay"]
        if group.get("maximize"):
            gradient = -gradient
        if decay := group.get("weight_decay"):
            gradient = gradient.add(parameter, alpha=decay)
        parameter.sub_(gradient, alpha=lr / delay)
        if momentum == 0:
            return
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"], state["accumulated"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["accumulated"].add_(gradient)
        if due:
            state["momentum_buffer"].mul_(momentum).add_(state["accumulated"], alpha=1 / delay)
            state["accumulated"].zero_()
            parameter.sub_(state["momentum_buffer"], alpha=lr * momentum)


@dataclass(frozen=True, kw_only=True)
class OuterStep:
    """How a server moves its weights by a rank's difference (weights loaded minus weights now).

    Attributes:
        name: ``"delayed_nesterov"``, see :class:`DelayedNesterov`, or ``"nesterov"``, SGD with Nesterov momentum.
        lr: learning rate; 1 takes the difference as it is.
        momentum: momentum, 0 to 1; 0 for none.
        delay: K of the delayed form, pushes.
    """

    name: OuterName = "delayed_nesterov"
    lr: float = 0.7
    momentum: float = 0.5
    delay: int = 1

    def hyper_parameters(self) -> dict[str, Any]:
        """Those of its one parameter group."""
        values = hyper_parameters(self.build({}).param_groups[0])
        values.pop("pushes", None)  # the server counts them
        return values

    def build(self, named: Mapping[str, torch.nn.Parameter], state: Mapping[str, Any] | None = None) -> Optimizer:
        """The optimizer over parameters.

        Args:
            named: the parameters by name.
            state: what :func:`outer_state` has kept of an earlier training.
        """
        groups = [{"params": list(named.values())}]  # an empty group is allowed, an empty list is not
        optimizer: Optimizer
        if self.name == "nesterov":
            optimizer = SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0)
        else:
            optimizer = DelayedNesterov(groups, self.lr, self.momentum, self.delay)
            optimizer.param_groups[0]["pushes"] = 0 if state is None else state["pushes"]
        for name, kept in ({} if state is None else state["state"]).items():
            if name in named:
                kept = {key: value.clone() for key, value in kept.items()}
                if self.name == "delayed_nesterov":  # the plain form keeps no sum
                    kept.setdefault("accumulated", torch.zeros_like(kept["momentum_buffer"]))
                optimizer.state[named[name]] = kept
        return optimizer


def outer_state(snapshot: ServerSnapshot) -> dict[str, Any]:
    """What a checkpoint keeps of the outer optimizer: its state by parameter name, and the count of its pushes."""
    (parts,) = snapshot.parts([spec.name for spec in snapshot.layout.specs])
    state = {
        name: {key: value.clone() for key, value in kept.items() if isinstance(value, Tensor)}
        for name, kept in parts.state.items()
    }
    (group,) = parts.attributes["param_groups"]
    return {"pushes": group.get("pushes", 0), "state": {name: kept for name, kept in state.items() if kept}}


def served_optimizers(optimizers: Sequence[Optimizer], aggregation: Aggregation) -> list[Optimizer]:
    """What the server steps for a module's optimizers: themselves, or their delayed form.

    Args:
        optimizers: the module's; left as they are.
        aggregation: how many pushes make one version.

    Raises:
        ConfigurationError: an optimizer has no delayed form.
    """
    if not aggregation.delayed_nesterov:
        return list(optimizers)
    return [_delayed(optimizer, aggregation.aggregate) for optimizer in optimizers]


def _delayed(optimizer: Optimizer, delay: int) -> DelayedNesterov:
    """SGD with Nesterov momentum, its momentum delayed; state and groups are taken over."""
    groups = optimizer.param_groups
    if type(optimizer) is not SGD or not all(group["nesterov"] for group in groups):
        raise ConfigurationError(
            f"delayed_nesterov=True with optimizer {type(optimizer).__name__}: the delayed form is one of SGD with "
            "Nesterov momentum; use torch.optim.SGD(..., momentum=0.9, nesterov=True), or leave delayed_nesterov out"
        )
    first = groups[0]
    delayed = DelayedNesterov([dict(group) for group in groups], first["lr"], first["momentum"], delay)
    for parameter, kept in optimizer.state.items():
        if (momentum := kept.get("momentum_buffer")) is not None:
            delayed.state[parameter] = {"accumulated": torch.zeros_like(momentum), **kept}
    return delayed
