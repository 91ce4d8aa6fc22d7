"""A module's optimizer, stepped for some parameters at a time by several threads."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_g2.errors import ConfigurationError

_OF_INSTANCE = frozenset({"step", "_opt_called", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"})


class SharedOptimizer:
    """Steps an optimizer for the parameters of one update, without a lock on weights or state.

    Each thread has a shell: an optimizer of the same class, whose groups hold stand-ins (same storage, a ``.grad`` of
    their own) and whose state for them *is* the optimizer's. So the optimizer itself keeps state and hyper-parameters:
    schedules act at the next update, its ``state_dict`` is as always, and with one thread it is what plain training
    makes. Only a parameter's first step is made alone: it creates the state. Step hooks of the optimizer do not run.

    Args:
        optimizer: any whose step treats each parameter by itself.
        parameters: the module's, by name.
        private: each thread has a state of its own instead; the optimizer's stays as it is.

    Raises:
        ConfigurationError: the optimizer couples parameters.
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], *, private: bool = False) -> None:
        if isinstance(optimizer, LBFGS):
            raise ConfigurationError(
                "optimizer LBFGS: must step each parameter by itself, and LBFGS evaluates the loss many times a step; "
                "use another optimizer"
            )
        self.optimizer = optimizer
        self._parameters = parameters
        self._private = private
        self._local = threading.local()
        self._first_step = threading.Lock()
        self._begun: set[str] = {n for n, p in parameters.items() if optimizer.state.get(p)}
        self._group_of: dict[int, int] = {}

    def owns(self, name: str) -> bool:
        """Whether the optimizer has this parameter."""
        return self._group(name) is not None

    def rate(self, name: str) -> float:
        """Learning rate of a parameter; 0 for one that is not the optimizer's."""
        group = self._group(name)
        return 0.0 if group is None else float(self.optimizer.param_groups[group].get("lr", 1.0))

    def step(self, gradients: Mapping[str, Tensor], rates: Mapping[str, float]) -> None:
        """Step the parameters that have a gradient here.

        Args:
            gradients: by parameter name; those of parameters that the optimizer does not have are left out.
            rates: factor for the learning rate, by parameter name; 1 where none is given.

        Raises:
            ConfigurationError: the step changed a group's hyper-parameters, which all parameters share.
        """
        named = [name for name in gradients if self.owns(name)]
        if not named:
            return
        alone = self._begun.issuperset(named)
        with nullcontext() if alone else self._first_step:
            self._step(named, gradients, rates)
            self._begun.update(named)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedules look here

    def _step(self, named: list[str], gradients: Mapping[str, Tensor], rates: Mapping[str, float]) -> None:
        shell, state = self._shell(), self._local.state if self._private else self.optimizer.state
        stand_ins: dict[str, nn.Parameter] = {}
        groups: dict[tuple[int, float], dict[str, Any]] = {}
        for name in named:
            parameter, factor = self._parameters[name], rates.get(name, 1.0)
            number = self._group_of[id(parameter)]
            original = self.optimizer.param_groups[number]
            stand_in = stand_ins[name] = nn.Parameter(parameter.data)
            stand_in.grad = gradients[name]
            if (number, factor) not in groups:
                groups[number, factor] = {**original, "params": []}
                if factor != 1.0:
                    groups[number, factor]["lr"] = original["lr"] * factor
            groups[number, factor]["params"].append(stand_in)
            if parameter in state:
                shell.state[stand_in] = state[parameter]
        shell.param_groups = list(groups.values())
        before = [dict(group) for group in shell.param_groups]
        shell.step()
        for name, stand_in in stand_ins.items():
            if stand_in in shell.state:
                state[self._parameters[name]] = shell.state[stand_in]
        shell.state.clear()
        for group, old in zip(shell.param_groups, before, strict=True):
            changed = [key for key in group if group[key] is not old.get(key)]
            if changed:
                raise ConfigurationError(
                    f"optimizer {type(self.optimizer).__name__}: its step changes {changed[0]!r} of a parameter group, "
                    "which layers that are updated one by one cannot share; use an optimizer that keeps its counts by "
                    "parameter"
                )

    def _shell(self) -> Optimizer:
        shell: Optimizer | None = getattr(self._local, "shell", None)
        if shell is None:
            kind = type(self.optimizer)
            shell = kind.__new__(kind)
            vars(shell).update({k: v for k, v in vars(self.optimizer).items() if k not in _OF_INSTANCE})
            shell._optimizer_step_pre_hooks = type(self.optimizer._optimizer_step_pre_hooks)()
            shell._optimizer_step_post_hooks = type(self.optimizer._optimizer_step_post_hooks)()
            shell.state = defaultdict(dict)
            self._local.shell, self._local.state = shell, {}
        return shell

    def _group(self, name: str) -> int | None:
        parameter = self._parameters[name]
        if id(parameter) not in self._group_of:  # also for groups that are added while training
            self._group_of = {id(p): i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        return self._group_of.get(id(parameter))
