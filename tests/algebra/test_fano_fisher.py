from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_g2.algebra import associator, fano_fisher_metric, g2_basis
from lightning_g2.errors import ShapeError


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b.expand_as(a), atol=tolerance, rtol=0)


def unit(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1).to(
        dtype
    )


def test_spectrum(generator, dtype, tolerance):
    theta, vacuum = unit(generator, dtype, 200, 7), unit(generator, dtype, 200, 7)
    psi = fano_fisher_metric(theta, vacuum)
    assert psi.shape == (200, 14, 14)
    close(psi, psi.transpose(1, 2), tolerance)
    values = torch.linalg.eigvalsh(psi)
    active = (8 / 3) * (1 - (theta * vacuum).sum(-1).square())
    close(values[:, 10:], active[:, None], tolerance)
    assert values[:, :10].abs().max() < tolerance


def test_orthogonal_pairs_reach_eight_thirds(generator, dtype, tolerance):
    vacuum = unit(generator, dtype, 50, 7)
    theta = unit(generator, dtype, 50, 7)
    theta = torch.nn.functional.normalize(theta - (theta * vacuum).sum(-1, keepdim=True) * vacuum, dim=-1)
    values = torch.linalg.eigvalsh(fano_fisher_metric(theta, vacuum))
    close(values[:, 10:], torch.tensor(8 / 3, dtype=dtype), tolerance)


def test_oblique_pair(dtype, tolerance):
    units = torch.eye(7, dtype=dtype)
    values = torch.linalg.eigvalsh(fano_fisher_metric((units[0] + units[1]) / math.sqrt(2), units[1]))
    close(values[10:], torch.tensor(4 / 3, dtype=dtype), tolerance)
    assert values[:10].abs().max() < tolerance


def test_parallel_pair_gives_zero(generator, dtype, tolerance):
    theta = unit(generator, dtype, 20, 7)
    close(fano_fisher_metric(theta, theta), torch.zeros((), dtype=dtype), tolerance)
    close(fano_fisher_metric(-theta, theta), torch.zeros((), dtype=dtype), tolerance)


def test_means_over_basis_pairs(dtype, tolerance):
    units = torch.eye(7, dtype=dtype)
    psi = fano_fisher_metric(units[:, None], units[None, :])
    assert psi.shape == (7, 7, 14, 14)
    identity = torch.eye(14, dtype=dtype)
    close(psi.mean(dim=(0, 1)), (32 / 49) * identity, tolerance)
    close(psi.sum(dim=(0, 1)) / 42, (16 / 21) * identity, tolerance)


def test_energy_is_twice_the_squared_associator(generator, dtype, tolerance):
    theta, vacuum = unit(generator, dtype, 64, 7), unit(generator, dtype, 64, 7)
    c = unit(generator, dtype, 64, 14)
    moved = torch.einsum("nk,kij,nj->ni", c, g2_basis(dtype), vacuum)
    octonion = [torch.nn.functional.pad(v, (1, 0)) for v in (theta, moved, vacuum)]
    f = associator(*octonion).square().sum(-1)
    energy = torch.einsum("ni,nij,nj->n", c, fano_fisher_metric(theta, vacuum), c)
    close(energy, 2 * f, tolerance)
    assert energy.min() >= -tolerance
    assert energy.max() <= 8 / 3 + tolerance


def test_metric_is_the_hessian(generator):
    theta, vacuum, c = (unit(generator, torch.float64, n) for n in (7, 7, 14))
    basis = g2_basis()

    def f(coordinates: Tensor) -> Tensor:
        moved = torch.einsum("k,kij,j->i", coordinates, basis, vacuum)
        return associator(*(torch.nn.functional.pad(v, (1, 0)) for v in (theta, moved, vacuum))).square().sum()

    close(torch.autograd.functional.hessian(f, c), fano_fisher_metric(theta, vacuum), 1e-12)


def test_mean_energy_of_a_random_direction(generator):
    units = torch.eye(7, dtype=torch.float64)
    c = unit(generator, torch.float64, 40_000, 14)
    energy = torch.einsum("ni,ij,nj->n", c, fano_fisher_metric(units[0], units[1]), c)
    assert energy.mean().item() == pytest.approx(16 / 21, abs=0.01)
    assert energy.std().item() == pytest.approx(0.43, abs=0.01)


def test_wrong_inputs_are_refused():
    with pytest.raises(ShapeError, match=r"theta has shape \(8,\): the last dimension must be 7"):
        fano_fisher_metric(torch.zeros(8), torch.zeros(7))
    with pytest.raises(ShapeError, match=r"vacuum has dtype torch.float64: must equal"):
        fano_fisher_metric(torch.zeros(7), torch.zeros(7).double())
