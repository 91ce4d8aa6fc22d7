"""Rules and optimizers as they are written on a command line: ``g2(beta=4, scale="unit")``."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_g2.cli.bench.muon import MuonWithAdamW
from lightning_g2.errors import ConfigurationError
from lightning_g2.simulate.source import OptimizerLike


@dataclass(frozen=True)
class Spec:
    """A name with options.

    Attributes:
        text: as it was written.
        name: the name.
        options: its keyword options.
    """

    text: str
    name: str
    options: dict[str, Any]


def parse_spec(text: str) -> Spec:
    """Take a name with options apart.

    Args:
        text: ``name`` or ``name(option=value, ...)``, values as in Python.

    Raises:
        ConfigurationError: it is not of that form.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return Spec(text.strip(), node.id, {})
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Name)
        assert not node.args
        options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise ConfigurationError(
            f"{text!r}: must be a name, with options as name(option=value); quote it for the shell"
        ) from error
    return Spec(text.strip(), node.func.id, options)


def optimizer_of(text: str) -> OptimizerLike:
    """An optimizer of ``torch.optim`` with options, such as ``sgd(momentum=0.9)``; ``muon`` has AdamW beside it.

    Args:
        text: see :func:`parse_spec`.

    Raises:
        ConfigurationError: there is no such optimizer.
    """
    spec = parse_spec(text)
    if spec.name.lower() == "muon":
        return partial(MuonWithAdamW, **spec.options)
    for name, value in vars(torch.optim).items():
        if name.lower() == spec.name.lower() and isinstance(value, type):
            return partial(value, **spec.options)
    raise ConfigurationError(f"optimizer={text!r}: no class of torch.optim is called {spec.name!r}; try adam")
