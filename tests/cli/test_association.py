"""Area under the curve, rank correlations and the bootstrap, against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_g2.cli.bench.sources.association import (
    auc,
    average_ranks,
    interval,
    multiple_correlation,
    rank_correlation,
)


def noise(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_ties_share_their_mean_rank() -> None:
    assert average_ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_auc_counts_pairs() -> None:
    scores = noise(40, 1).mul(3).round()  # with ties
    positive = noise(40, 2) > 0
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive].tolist() for b in scores[~positive].tolist()]
    assert auc(scores, positive) == pytest.approx(sum(pairs) / len(pairs))
    assert auc(-scores, positive) == pytest.approx(1 - auc(scores, positive))
    assert math.isnan(auc(scores, torch.ones(40, dtype=torch.bool)))


def test_rank_correlation_sees_order_alone() -> None:
    x = noise(50, 3)
    assert rank_correlation(x, x.exp()) == pytest.approx(1.0)
    assert rank_correlation(x, -x.pow(3)) == pytest.approx(-1.0)
    assert rank_correlation(x, torch.zeros(50)) == 0.0
    assert rank_correlation(x, x + noise(50, 4), given=[x]) == 0.0


def test_partial_correlation_is_that_of_its_formula() -> None:
    z = noise(400, 5)
    x, y = z + noise(400, 6), z + noise(400, 7)
    xy, xz, yz = rank_correlation(x, y), rank_correlation(x, z), rank_correlation(y, z)
    partial = rank_correlation(x, y, given=[z])
    assert partial == pytest.approx((xy - xz * yz) / math.sqrt((1 - xz**2) * (1 - yz**2)))
    assert xy > 0.4
    assert abs(partial) < 0.1  # all that x tells of y it has from z


def test_multiple_correlation() -> None:
    x, y, other = noise(200, 8), noise(200, 9), noise(200, 10)
    assert multiple_correlation(y, [x]) == pytest.approx(abs(rank_correlation(x, y)))
    assert multiple_correlation(x, [x, other]) == pytest.approx(1.0)
    assert multiple_correlation(x + other, [x, other]) > max(
        rank_correlation(x, x + other), rank_correlation(other, x + other)
    )


def test_the_interval_has_the_width_that_theory_gives() -> None:
    values = noise(900, 11)
    low, high = interval(lambda index: float(values[index].mean()), 900, draws=400)
    assert low < float(values.mean()) < high
    assert high - low == pytest.approx(2 * 1.96 * float(values.std()) / 30, rel=0.25)
    steps = noise(60, 12).repeat_interleave(15)  # as many numbers, but a fifteenth of them independent
    wide = interval(lambda index: float(steps[index].mean()), 900, block=45, draws=400)
    assert wide[1] - wide[0] > 2 * (high - low)
    assert all(math.isnan(bound) for bound in interval(lambda index: math.nan, 10))
