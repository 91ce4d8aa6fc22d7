"""Largest stable learning rate of a rule on a quadratic whose gradients are a fixed number of versions old."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_g2.simulate.delay import uniform
from lightning_g2.simulate.simulation import simulate
from lightning_g2.simulate.source import GateLike, OptimizerLike

_PERIODS = 24
_LEAST_PUSHES = 240
_DIVERGED = 1e9
_STEP = math.sqrt(2.0)
_LARGEST = 64.0
"""A rate this many times the limit of plain SGD without delay counts as any rate."""


def delayed_sgd_limit(delay: int) -> float:
    """Largest ηλ for which plain SGD on ½λw² with gradients τ versions old is stable: 2 sin(π/(4τ+2)).

    Args:
        delay: τ ≥ 0, versions.

    Source:
        The characteristic equation z^(τ+1) - z^τ + ηλ = 0, whose roots reach the unit circle there.
    """
    return 2.0 * math.sin(math.pi / (4 * delay + 2))


def is_stable(
    lr: float,
    *,
    delay: int,
    gate: GateLike = "none",
    optimizer: OptimizerLike = "sgd",
    eigenvalues: Sequence[float] = (1.0,),
    columns: int = 1,
) -> bool:
    """Whether training on a quadratic settles: its mean loss falls from the middle to the last third.

    The loss is ½ Σ λ_i |w_i|² over the rows w_i of a matrix; τ+1 ranks of equal speed take turns, so that after the
    first round each push is τ versions old.

    Args:
        lr: learning rate.
        delay: τ ≥ 0, versions.
        gate: the rule.
        optimizer: as in :func:`simulate`.
        eigenvalues: λ of each row.
        columns: length of a row; the g2 gate filters matrices with more than four rows and columns.
    """
    curvature = torch.tensor(eigenvalues, dtype=torch.float64).unsqueeze(1)
    seen: list[float] = []

    def loss(model: nn.Module, batch: object) -> Tensor:
        (weight,) = model.parameters()
        value = 0.5 * (curvature * weight.square()).sum()
        seen.append(value.item())
        if not seen[-1] < _DIVERGED:  # NaN too
            raise _DivergedError
        return value

    pushes = max(_LEAST_PUSHES, _PERIODS * (4 * delay + 2))
    model = _Matrix(len(eigenvalues), columns)
    try:
        simulate(
            model, loss, lambda rank, k: None, ranks=delay + 1, pushes=pushes, gate=gate, optimizer=optimizer, lr=lr,
            delays=uniform(), seed=0,
        )  # fmt: skip
    except _DivergedError:
        return False
    third = pushes // 3
    return sum(seen[2 * third : 3 * third]) <= sum(seen[third : 2 * third]) * (1.0 + 1e-9)


def largest_stable_rate(
    *,
    delay: int,
    gate: GateLike = "none",
    optimizer: OptimizerLike = "sgd",
    eigenvalues: Sequence[float] = (1.0,),
    columns: int = 1,
    tolerance: float = 0.003,
) -> float:
    """Learning rate up to which training is stable, by steps of √2 and bisection; see :func:`is_stable`.

    Args:
        delay: τ ≥ 0, versions.
        gate: the rule.
        optimizer: as in :func:`simulate`.
        eigenvalues: λ of each row.
        columns: length of a row.
        tolerance: relative width of the last bracket.

    Returns:
        The rate; ``inf`` where rates of up to 64/λ_max are stable, as for a rule that sends nothing.
    """

    def stable(lr: float) -> bool:
        return is_stable(lr, delay=delay, gate=gate, optimizer=optimizer, eigenvalues=eigenvalues, columns=columns)

    # Upwards in small steps: where a rule is not linear, rates above an unstable one may be stable again.
    low = delayed_sgd_limit(delay) / max(eigenvalues) / 2.0
    while not stable(low):
        low /= _STEP
    while stable(high := low * _STEP):
        low = high
        if low > _LARGEST / max(eigenvalues):
            return math.inf
    while high - low > tolerance * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if stable(middle) else (low, middle)
    return math.sqrt(low * high)


class _DivergedError(Exception):
    pass


class _Matrix(nn.Module):
    """One matrix parameter of mean square 1, in float64."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        start = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.weight = nn.Parameter(start * math.sqrt(start.numel()) / torch.linalg.vector_norm(start))
