"""The server's optimizer state in a rank's optimizer: for a checkpoint, at the end of training, from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_g2.server import OptimizerParts, inner_optimizers

_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def borrowed_state(optimizer: Optimizer, parts: OptimizerParts, evolved: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Let a rank's optimizer have the server's state for a moment.

    Args:
        optimizer: the rank's.
        parts: what the server's keeps, its state by this rank's parameters.
        evolved: per group, hyper-parameters that the server's optimizer itself has changed.
    """
    involved = [optimizer, *inner_optimizers(optimizer).values()]
    attributes = [dict(vars(o)) for o in involved]
    states = [dict(o.state) for o in involved]
    groups = [dict(group) for group in optimizer.param_groups]
    try:
        give_state(optimizer, parts, evolved)
        yield
    finally:
        for o, attribute, state in zip(involved, attributes, states, strict=True):
            vars(o).clear()
            vars(o).update(attribute)
            o.state.clear()
            o.state.update(state)
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(values)


def give_state(optimizer: Optimizer, parts: OptimizerParts, evolved: Sequence[Mapping[str, Any]]) -> None:
    """Give a rank's optimizer the server's state; it keeps its own groups and what schedules have set in them.

    Args:
        optimizer: the rank's.
        parts: what the server's keeps, its state by this rank's parameters.
        evolved: per group, hyper-parameters that the server's optimizer itself has changed.
    """
    parts.put_into(optimizer)
    for o in (optimizer, *inner_optimizers(optimizer).values()):
        here = {id(p) for group in o.param_groups for p in group["params"]}
        for parameter in [p for p in o.state if id(p) not in here]:  # another rank has been given it already
            del o.state[parameter]
    for group, values in zip(optimizer.param_groups, evolved, strict=False):
        group.update(values)


def load_exactly(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Undo the rounding of loaded state: torch gives it the parameter's dtype, a server's masters have their own.

    Args:
        optimizer: has just loaded ``saved``.
        saved: an optimizer's state dictionary.
    """
    keys = chain.from_iterable(group["params"] for group in saved["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, parameter in zip(keys, parameters, strict=True):
        for name, value in saved["state"].get(key, {}).items():
            loaded = optimizer.state[parameter].get(name)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][name] = value.detach().to(loaded.device, copy=True)


def dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype of an option's name."""
    return None if name is None else _DTYPES[name]
