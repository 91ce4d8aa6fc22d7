"""How well one number tells another: area under the ROC curve, rank correlation with others held fixed, bootstrap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def average_ranks(values: Tensor) -> Tensor:
    """Ranks from 1, ties sharing their mean rank.

    Args:
        values: shape (n,).

    Returns:
        Shape (n,), float64.
    """
    _, group, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks: Tensor = (last - (counts.double() - 1.0) / 2.0)[group]
    return ranks


def auc(scores: Tensor, positive: Tensor) -> float:
    """Probability that a positive one has the larger score than a negative one, ties counting half.

    Args:
        scores: shape (n,).
        positive: shape (n,), bool.

    Returns:
        In [0, 1]; 0.5 says nothing; NaN where all are of one kind.

    Source:
        H. B. Mann, D. R. Whitney, "On a test of whether one of two random variables is stochastically larger than the
        other" (1947).
    """
    n, m = int(positive.sum()), int((~positive).sum())
    if n == 0 or m == 0:
        return math.nan
    return float((average_ranks(scores)[positive].sum() - n * (n + 1) / 2) / (n * m))


def rank_correlation(x: Tensor, y: Tensor, *, given: Sequence[Tensor] = ()) -> float:
    """Spearman's correlation of x and y, or with others held fixed.

    Ranks of x and y are regressed on the ranks of ``given`` (and a constant); what is left is correlated.

    Args:
        x: shape (n,).
        y: shape (n,).
        given: each of shape (n,).

    Returns:
        In [-1, 1]; 0 where one of them does not vary.
    """
    left, right = _residual(average_ranks(x), given), _residual(average_ranks(y), given)
    scale = left.norm() * right.norm()
    # What regression leaves of a rank that the others determine is rounding.
    return float(left @ right / scale) if scale > 1e-9 * len(x) ** 3 else 0.0


def multiple_correlation(y: Tensor, causes: Sequence[Tensor]) -> float:
    """How much of y's ranks a linear combination of other ranks gives: R, the root of the explained share.

    Args:
        y: shape (n,).
        causes: each of shape (n,).

    Returns:
        In [0, 1].
    """
    ranks = average_ranks(y)
    whole, left = _residual(ranks, ()).square().sum(), _residual(ranks, causes).square().sum()
    return math.sqrt(max(0.0, 1.0 - float(left / whole))) if whole > 0 else 0.0


def interval(
    statistic: Callable[[Tensor], float], n: int, *, block: int = 16, draws: int = 200, seed: int = 0
) -> tuple[float, float]:
    """95% interval of a statistic of a series by the moving-block bootstrap.

    Args:
        statistic: of the entries with these indices, shape (n,).
        n: entries of the series.
        block: neighbours that are drawn together, since they depend on each other.
        draws: number of resampled series.
        seed: of the draws.

    Returns:
        The 2.5% and 97.5% quantiles; NaNs are left out.

    Source:
        H. R. Künsch, "The jackknife and the bootstrap for general stationary observations" (1989).
    """
    generator = torch.Generator().manual_seed(seed)
    block = max(1, min(block, n))
    offsets = torch.arange(block)
    values = []
    for _ in range(draws):
        starts = torch.randint(n - block + 1, (-(-n // block),), generator=generator)
        values.append(statistic((starts.unsqueeze(1) + offsets).flatten()[:n]))
    finite = torch.tensor([value for value in values if math.isfinite(value)], dtype=torch.float64)
    if not len(finite):
        return math.nan, math.nan
    low, high = torch.quantile(finite, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _residual(ranks: Tensor, given: Sequence[Tensor]) -> Tensor:
    """What a regression on the ranks of others, and a constant, leaves."""
    centred = ranks - ranks.mean()
    if not given:
        return centred
    others = torch.stack([r - r.mean() for r in map(average_ranks, given)], dim=1)
    explained: Tensor = others @ torch.linalg.lstsq(others, centred.unsqueeze(1), driver="gelsd").solution[:, 0]
    return centred - explained
