"""Low-rank adapters for the linear layers of a trained model (LoRA: Hu et al., arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_g2.errors import ConfigurationError


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices.

        y = W x + b + (alpha / rank) · up · down · x

    ``up`` begins at zero, so that a fresh adapter changes nothing.

    Args:
        base: the layer; its parameters are frozen.
        rank: inner extent of the product, ≥ 1.
        alpha: scale of the product, > 0; dimensionless.
    """

    def __init__(self, base: nn.Linear, *, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.down, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs, shape (..., in_features), to outputs, shape (..., out_features)."""
        adapted = functional.linear(functional.linear(x, self.down), self.up)
        outputs: Tensor = self.base(x) + self.scale * adapted
        return outputs


def add_adapters(model: nn.Module, *, names: Collection[str], rank: int = 8, alpha: float = 16.0) -> list[str]:
    """Freeze a model and put adapters on some of its linear layers, in place.

    Args:
        model: what was trained before.
        names: last parts of the layers' names, e.g. ``{"qkv", "attention_out"}``.
        rank: inner extent of each adapter, ≥ 1.
        alpha: scale of each adapter, > 0.

    Returns:
        Full names of the layers that have got one.

    Raises:
        ConfigurationError: a value is out of range, or no layer has such a name.
    """
    if rank < 1:
        raise ConfigurationError(f"rank={rank}: must be ≥ 1; try 8")
    if not alpha > 0.0:
        raise ConfigurationError(f"alpha={alpha}: must be > 0; try 2·rank")
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    chosen = [name for name in linear if name.rpartition(".")[2] in names]
    if not chosen:
        known = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigurationError(f"names={sorted(names)}: no linear layer is called so; there are {', '.join(known)}")
    model.requires_grad_(False)
    for name in chosen:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, LoRALinear(linear[name], rank=rank, alpha=alpha))
    return chosen
