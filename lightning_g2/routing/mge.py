"""Maslov-Gibbs Einsum gate: from energies to weights.

Everything here is a pure function. β is an inverse temperature: 0 turns the gate off, large β selects the calmest push.
Effective energies Ê = E·x carry the age x, so a fresh push has Ê = 0.

Source:
    doi:10.5281/zenodo.20077198 for the Gibbs weights; the vacuum state is this package's addition: without it equal
    energies, however hot, would all pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_g2.errors import ShapeError
from lightning_g2.routing.option import require_within

_BETA_REMEDY = "0 turns the gate off"


def mge_weights(energies: Tensor, beta: float) -> Tensor:
    """Gibbs weights of the energies in a window.

        π_k = exp(-βE_k) / Σ_j exp(-βE_j)

    Limits: β → 0 uniform, β → ∞ all on the smallest energy (shared by ties). By log-sum-exp, so no β overflows.

    Args:
        energies: E, shape (..., n), real floating, n ≥ 1; dimensionless.
        beta: inverse temperature, ≥ 0; dimensionless.

    Returns:
        π, shape (..., n), same dtype and device, summing to 1 over the last dimension.

    Raises:
        ConfigurationError: ``beta`` is negative or not finite.
        ShapeError: the window is empty or the dtype not floating.

    Source:
        doi:10.5281/zenodo.20077198.
    """
    require_within("beta", beta, 0.0, math.inf, _BETA_REMEDY)
    if energies.ndim < 1 or energies.shape[-1] < 1 or not energies.dtype.is_floating_point:
        raise ShapeError(
            f"energies has shape {tuple(energies.shape)} and dtype {energies.dtype}: must be floating of shape "
            f"(..., n), n ≥ 1; give one energy per live rank"
        )
    # Subtracting the minimum first keeps β·E from overflowing before softmax does its own shift.
    return torch.softmax(-beta * (energies - energies.amin(dim=-1, keepdim=True)), dim=-1)


def vacuum_weight(energy: float, others: Sequence[float], beta: float) -> float:
    """Weight of a push under the Gibbs law with a vacuum state of energy 0.

        w = min(1, (n+1)·exp(-βÊ) / (1 + Σ_j exp(-βÊ_j))),   j over the n live ranks, the push's own included

    All calm → 1; all hot → 0; alone and fresh → exactly 1.

    Args:
        energy: own effective energy Ê ≥ 0; dimensionless.
        others: effective energies of the other live ranks.
        beta: inverse temperature ≥ 0.

    Returns:
        Weight in [0, 1].

    Source:
        This package; Gibbs weights after doi:10.5281/zenodo.20077198.
    """
    return relative_weight(energy, [0.0, *others], beta)  # the vacuum is one more state, always calm


def local_weight(energy: float, beta: float) -> float:
    """Weight exp(-βÊ), without looking at other ranks.

    Args:
        energy: own effective energy Ê ≥ 0; dimensionless.
        beta: inverse temperature ≥ 0.

    Returns:
        Weight in [0, 1].
    """
    return min(1.0, math.exp(-beta * energy))


def age_weight(age: float, beta: float) -> float:
    """Weight exp(-βx), without looking at energies: the control for whatever an energy claims.

    Args:
        age: relative age x ≥ 0; dimensionless.
        beta: inverse temperature ≥ 0.

    Returns:
        Weight in [0, 1].
    """
    return min(1.0, math.exp(-beta * age))


def relative_weight(energy: float, others: Sequence[float], beta: float) -> float:
    """Weight min(1, n·π_k), the source's rule: hot pushes pass when all are equally hot.

    Args:
        energy: own effective energy Ê ≥ 0; dimensionless.
        others: effective energies of the other live ranks.
        beta: inverse temperature ≥ 0.

    Returns:
        Weight in [0, 1].

    Source:
        doi:10.5281/zenodo.20077198.
    """
    logarithm = math.log(len(others) + 1) - beta * energy - _log_sum_exp([-beta * energy, *_scaled(others, beta)])
    return min(1.0, math.exp(min(0.0, logarithm)))


def relative_age(staleness: int, concurrency: int, pushes_per_version: int) -> float:
    """Age of a push in rounds: x = τK/N.

    Args:
        staleness: τ, versions between base and decision, ≥ 0.
        concurrency: N, live ranks, ≥ 1.
        pushes_per_version: K ≥ 1.

    Returns:
        x ≥ 0; 1 is the mean age of a push when N equal ranks take turns; dimensionless.
    """
    return max(0, staleness) * max(1, pushes_per_version) / max(1, concurrency)


def normalised_entropy(weights: Tensor) -> Tensor:
    """Entropy of Gibbs weights over its maximum: H(π)/log n, and 1 for n = 1.

    Args:
        weights: π, shape (..., n), floating, summing to 1.

    Returns:
        Shape (...), in [0, 1].
    """
    n = weights.shape[-1]
    if n == 1:
        return torch.ones_like(weights[..., 0])
    entropy: Tensor = torch.special.entr(weights).sum(dim=-1)
    return entropy / math.log(n)


def effective_sample_size(weights: Tensor) -> Tensor:
    """Effective sample size as a fraction: 1/(n Σ π²).

    Args:
        weights: π, shape (..., n), floating, summing to 1.

    Returns:
        Shape (...), from 1/n (one rank decides) to 1 (all alike).
    """
    size: Tensor = weights.shape[-1] * weights.square().sum(dim=-1)
    return size.reciprocal()


def _scaled(energies: Sequence[float], beta: float) -> list[float]:
    return [-beta * energy for energy in energies]


def _log_sum_exp(exponents: Sequence[float]) -> float:
    top = max(exponents)
    return top + math.log(sum(math.exp(exponent - top) for exponent in exponents))
