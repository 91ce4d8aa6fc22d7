"""A module's optimizer, taken apart on a rank and put together again on a server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# Bookkeeping that every torch optimizer makes for itself, and that learning-rate schedulers and Lightning put on the
# instance. None of it is the optimizer's own.
_NOT_SHIPPED = frozenset({
    "defaults", "state", "param_groups", "step", "_opt_called", "_step_count", "_zero_grad_profile_name",
    "_step_supports_amp_scaling", "_warned_capturable_if_run_uncaptured", "_patch_step_function",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
})  # fmt: skip


@dataclass(frozen=True)
class OptimizerSpec:
    """Everything that makes an optimizer, with parameters replaced by their index in the layout.

    Attributes:
        cls: the optimizer's class.
        defaults: its ``defaults``.
        groups: its parameter groups; ``params`` holds indices into the layout.
        state: its state by index; tensors on the CPU.
        attributes: further attributes that the class keeps on the instance.
    """

    cls: type[Optimizer]
    defaults: dict[str, Any]
    groups: tuple[dict[str, Any], ...]
    state: dict[int, Any]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, optimizer: Optimizer, index_of: Mapping[int, int]) -> OptimizerSpec:
        """Take an optimizer apart.

        Args:
            optimizer: any dense torch optimizer; left as it is.
            index_of: index in the layout by ``id(parameter)``.
        """
        groups = tuple(
            {**hyper_parameters(group), "params": [index_of[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        )
        return cls(
            cls=type(optimizer),
            defaults=dict(optimizer.defaults),
            groups=groups,
            state={index_of[id(p)]: to_cpu(state) for p, state in optimizer.state.items()},
            attributes={k: to_cpu(v) for k, v in vars(optimizer).items() if k not in _NOT_SHIPPED},
        )

    def build(self, parameters: Sequence[torch.nn.Parameter]) -> Optimizer:
        """Put the optimizer together again over a server's parameters, the way unpickling does.

        Torch defines ``__setstate__`` for each of its optimizers, so no constructor needs to be guessed: classes with
        positional options, or that build state when constructed, come back as they were.
        """
        optimizer = self.cls.__new__(self.cls)
        groups = [{**group, "params": [parameters[i] for i in group["params"]]} for group in self.groups]
        state: defaultdict[Any, Any] = defaultdict(dict)
        state.update({parameters[index]: value for index, value in self.state.items()})
        optimizer.__setstate__({"defaults": self.defaults, "state": state, "param_groups": groups})
        vars(optimizer).update(self.attributes)
        return optimizer


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """All entries of a parameter group but its parameters, as the server can use them: tensors on the CPU.

    ``capturable`` is for CUDA graphs, which a server on the CPU has none of.
    """
    values = {key: to_cpu(value) for key, value in group.items() if key != "params"}
    if values.get("capturable"):
        values["capturable"] = False
    return values


def set_hyper_parameters(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Give an optimizer's groups the values that a rank has sent, group by group."""
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update(values)


def to_cpu(value: Any) -> Any:
    """A copy of nested optimizer state with every tensor detached and on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: to_cpu(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_cpu(item) for item in value)
    return value
