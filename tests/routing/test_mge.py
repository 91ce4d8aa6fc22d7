from __future__ import annotations

import math

import pytest
import torch

from lightning_g2.errors import ConfigurationError, ShapeError
from lightning_g2.routing import mge_weights
from lightning_g2.routing.mge import (
    age_weight,
    effective_sample_size,
    local_weight,
    normalised_entropy,
    relative_age,
    relative_weight,
    vacuum_weight,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gibbs_weights(dtype):
    energies = torch.tensor([[0.5, 1.0, 2.5], [0.0, 0.0, 8 / 3]], dtype=dtype)
    weights = mge_weights(energies, 2.0)
    direct = torch.exp(-2.0 * energies)
    torch.testing.assert_close(weights, direct / direct.sum(-1, keepdim=True))
    assert weights.dtype == dtype


def test_gibbs_limits():
    energies = torch.tensor([0.5, 0.2, 2.5, 0.2], dtype=torch.float64)
    assert torch.equal(mge_weights(energies, 0.0), torch.full((4,), 0.25, dtype=torch.float64))
    expected = torch.tensor([0.0, 0.5, 0.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(mge_weights(energies, 1e6), expected)
    torch.testing.assert_close(mge_weights(energies + 100.0, 3.0), mge_weights(energies, 3.0))
    assert torch.isfinite(mge_weights(torch.tensor([1e30, 2e30]), 1e5)).all()


def test_vacuum_limits():
    assert vacuum_weight(0.0, [], 4.0) == 1.0
    assert vacuum_weight(0.0, [0.0] * 15, 4.0) == 1.0
    assert vacuum_weight(2.5, [2.5] * 15, 50.0) < 1e-40
    assert vacuum_weight(2.5, [0.1] * 15, 0.0) == 1.0
    assert vacuum_weight(0.1, [2.0] * 15, 4.0) == 1.0
    assert vacuum_weight(2.0, [0.0] * 15, 1e9) == 0.0
    n, beta, own, others = 4, 1.5, 0.8, [0.1, 0.4, 1.2]
    direct = (n + 1) * math.exp(-beta * own) / (1 + sum(math.exp(-beta * e) for e in [own, *others]))
    assert vacuum_weight(own, others, beta) == pytest.approx(min(1.0, direct), rel=1e-12)


def test_relative_lets_equal_heat_pass():
    assert relative_weight(2.5, [2.5] * 15, 50.0) == pytest.approx(1.0)
    assert relative_weight(2.5, [], 4.0) == 1.0
    energies = torch.tensor([1.3, 0.2, 0.9], dtype=torch.float64)
    expected = 3 * mge_weights(energies, 2.0)[0].item()
    assert relative_weight(1.3, [0.2, 0.9], 2.0) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rule", [vacuum_weight, relative_weight])
@pytest.mark.parametrize("beta", [0.0, 0.3, 4.0, 32.0, 1e4])
def test_weights_stay_in_range_and_fall_with_energy(rule, beta):
    previous = 1.0
    for step in range(60):
        weight = rule(step * 2.0, [0.3, 5.0, 40.0], beta)
        assert 0.0 <= weight <= previous
        previous = weight


def test_simple_rules():
    assert local_weight(0.5, 2.0) == pytest.approx(math.exp(-1.0))
    assert age_weight(0.0, 9.0) == 1.0
    assert age_weight(3.0, 0.5) == pytest.approx(math.exp(-1.5))


def test_relative_age():
    assert relative_age(0, 16, 1) == 0.0
    assert relative_age(15, 16, 1) == 15 / 16
    assert relative_age(3, 16, 4) == 12 / 16
    assert relative_age(2, 1, 1) == 2.0


def test_entropy_and_sample_size():
    uniform, sharp = torch.full((2, 5), 0.2), torch.eye(5)
    torch.testing.assert_close(normalised_entropy(uniform), torch.ones(2))
    torch.testing.assert_close(normalised_entropy(sharp), torch.zeros(5))
    torch.testing.assert_close(normalised_entropy(torch.ones(3, 1)), torch.ones(3))
    torch.testing.assert_close(effective_sample_size(uniform), torch.ones(2))
    torch.testing.assert_close(effective_sample_size(sharp), torch.full((5,), 0.2))


def test_wrong_inputs_are_refused():
    with pytest.raises(ConfigurationError, match=r"beta=-1.0: must be ≥ 0; 0 turns the gate off"):
        mge_weights(torch.zeros(3), -1.0)
    with pytest.raises(ConfigurationError, match="beta=nan"):
        mge_weights(torch.zeros(3), float("nan"))
    with pytest.raises(ShapeError, match=r"energies has shape \(0,\) and dtype torch.float32: must be floating"):
        mge_weights(torch.zeros(0), 1.0)
    with pytest.raises(ShapeError, match=r"dtype torch.int64"):
        mge_weights(torch.zeros(3, dtype=torch.long), 1.0)
