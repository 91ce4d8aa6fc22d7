"""An optimizer at work on a server: it steps with the groups and hyper-parameters of whoever pushes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_g2.errors import G2Error
from lightning_g2.server.optimizer import OptimizerSpec, inner_optimizers, plain_value, same_value, to_cpu

Groups = Sequence[Mapping[str, Any]]


class ServedOptimizer:
    """Steps a module's optimizer for many ranks.

    Optimizer state belongs to parameters, so each push may come with groups of its own: a rank that has unfrozen a
    layer names the new group, one that has not yet does not, and neither disturbs the other. A hyper-parameter that
    the optimizer itself changes as it steps (a step-size estimate kept in the group) stays the server's until a rank
    changes it.

    Args:
        spec: the optimizer.
        parameters: the server's parameters; grows when parameters are adopted.
    """

    def __init__(self, spec: OptimizerSpec, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.optimizer: Optimizer = spec.build(parameters)
        self.name = spec.name
        self._parameters = parameters
        self._initial = [_without_parameters(group) for group in self.optimizer.param_groups]
        self._sent: dict[int, list[Mapping[str, Any]]] = {}
        self._members: tuple[tuple[int, ...], ...] = ()
        self._evolved: set[tuple[int, str]] = set()
        # Torch's own optimizers copy what they keep of a gradient; others may keep the gradient itself.
        stepping = (self.optimizer, *inner_optimizers(self.optimizer).values())
        self._keeps_gradients = any(type(o).__module__.split(".")[0] != "torch" for o in stepping)

    def evolved(self) -> list[dict[str, Any]]:
        """Per group, the hyper-parameters that the optimizer itself has changed."""
        return [
            {key: to_cpu(group[key]) for g, key in sorted(self._evolved) if g == i and key in group}
            for i, group in enumerate(self.optimizer.param_groups)
        ]

    def regroup(self, members: tuple[tuple[int, ...], ...], groups: Groups) -> None:
        """Give the optimizer the pusher's groups; those that it has beyond them keep what nobody else claims."""
        if not members or members == self._members:
            return
        own = self.optimizer.param_groups
        wanted = [[self._parameters[i] for i in group] for group in members]
        claimed = {id(p) for group in wanted for p in group}
        for index, group in enumerate(own):
            kept = [] if index < len(wanted) else [p for p in group["params"] if id(p) not in claimed]
            group["params"] = wanted[index] if index < len(wanted) else kept
        for index in range(len(own), len(wanted)):
            values = {key: plain_value(value) for key, value in groups[index].items()}
            self.optimizer.add_param_group({**values, "params": wanted[index]})
        self._members = members

    def set_hyper_parameters(self, rank: int, groups: Groups) -> None:
        """Take over what a rank has sent, group by group."""
        previous = self._sent.get(rank, self._initial)
        for index, (group, values) in enumerate(zip(self.optimizer.param_groups, groups, strict=False)):
            for key, value in values.items():
                before = previous[index].get(key) if index < len(previous) else None
                if (index, key) not in self._evolved or not same_value(before, value):
                    group[key] = plain_value(value)
        self._sent[rank] = list(groups)

    def step(self, inner: str, pushed: Sequence[torch.nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """Step on gradients; parameters without one, and their state, stay as they are.

        Args:
            inner: attribute that holds the optimizer to step; empty for the optimizer itself.
            pushed: the parameters that have a gradient.
            gradients: their gradients.

        Raises:
            G2Error: the optimizer failed.
        """
        if not any(group["params"] for group in self.optimizer.param_groups):
            return  # another server has all its parameters; not every optimizer can step without any
        stepping = inner_optimizers(self.optimizer)[inner] if inner else self.optimizer
        before = [_without_parameters(group) for group in self.optimizer.param_groups]
        for parameter, gradient in zip(pushed, gradients, strict=True):
            gradient = gradient.to(parameter.dtype)
            parameter.grad = gradient.clone() if self._keeps_gradients else gradient
        try:
            _step(stepping, pushed)
        except Exception as error:
            raise G2Error(f"optimizer {self.name}: its step failed ({type(error).__name__}: {error})") from error
        finally:
            for parameter in pushed:
                parameter.grad = None
        for index, (was, group) in enumerate(zip(before, self.optimizer.param_groups, strict=True)):
            for key, value in group.items():
                if key != "params" and not same_value(was.get(key), value):
                    self._evolved.add((index, key))


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step cannot be called without a closure."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _step(optimizer: Optimizer, pushed: Sequence[torch.nn.Parameter]) -> None:
    if not needs_closure(optimizer):
        optimizer.step()
        return
    versions = [parameter._version for parameter in pushed]
    calls: list[bool] = []

    def closure() -> Tensor:
        # The rank has evaluated it already, on the weights that the gradients belong to, and once.
        if calls or versions != [parameter._version for parameter in pushed]:
            raise G2Error(
                "it evaluates its closure again, on weights that only the server has; use an optimizer that steps "
                "once for each gradient"
            )
        calls.append(True)
        return torch.zeros(())

    optimizer.step(closure)  # type: ignore[arg-type]


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: to_cpu(value) for key, value in group.items() if key != "params"}
