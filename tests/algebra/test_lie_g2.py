from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from lightning_g2.algebra import g2_basis, multiplication_table, multiply, project_to_g2
from lightning_g2.errors import ShapeError


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b.expand_as(a), atol=tolerance, rtol=0)


def rotations(dtype: torch.dtype) -> Tensor:
    """The 21 generators E_ij - E_ji of so(7)."""
    out = torch.zeros(21, 7, 7, dtype=dtype)
    for row, (i, j) in enumerate(combinations(range(7), 2)):
        out[row, i, j], out[row, j, i] = 1.0, -1.0
    return out


def constraint(omega: Tensor) -> Tensor:
    """What ``omega`` does to the 3-form: zero exactly for derivations, shape (n, 343)."""
    table = multiplication_table(omega.dtype)[1:, 1:, 1:]
    moved = (
        torch.einsum("nli,ljk->nijk", omega, table)
        + torch.einsum("nlj,ilk->nijk", omega, table)
        + torch.einsum("nlk,ijl->nijk", omega, table)
    )
    return moved.flatten(1)


def on_octonions(matrix: Tensor) -> Tensor:
    return torch.nn.functional.pad(matrix, (1, 0, 1, 0))


def test_orthonormal_and_antisymmetric(dtype, tolerance):
    basis = g2_basis(dtype)
    assert basis.shape == (14, 7, 7)
    close(torch.einsum("iab,jab->ij", basis, basis), torch.eye(14, dtype=dtype), tolerance)
    assert torch.equal(basis, -basis.transpose(1, 2))


def test_constraint_map(dtype, tolerance):
    values = torch.linalg.svdvals(constraint(rotations(dtype)).T)
    assert constraint(rotations(dtype)).T.shape == (343, 21)
    close(values[:7], torch.full((7,), 6 * math.sqrt(2), dtype=dtype), 10 * tolerance)
    assert values[7:].max() < 10 * tolerance
    close(constraint(g2_basis(dtype)), torch.zeros((), dtype=dtype), tolerance)


def test_closed_under_bracket(dtype, tolerance):
    basis = g2_basis(dtype)
    bracket = torch.einsum("iab,jbc->ijac", basis, basis)
    bracket = bracket - bracket.transpose(0, 1)
    assert bracket.abs().max() > 0.1
    close(project_to_g2(bracket), bracket, tolerance)


def test_leibniz(generator, dtype, tolerance):
    x, y = (torch.nn.functional.normalize(torch.randn(64, 8, generator=generator).to(dtype), dim=-1) for _ in range(2))
    for matrix in on_octonions(g2_basis(dtype)):
        left = multiply(x, y) @ matrix.T
        close(left, multiply(x @ matrix.T, y) + multiply(x, y @ matrix.T), tolerance)


def test_killing_form_negative_definite(dtype, tolerance):
    basis = g2_basis(dtype)
    bracket = torch.einsum("iab,jbc->ijac", basis, basis)
    bracket = bracket - bracket.transpose(0, 1)
    structure = torch.einsum("ijab,kab->ijk", bracket, basis)
    killing = torch.einsum("iab,jba->ij", structure, structure)
    values = torch.linalg.eigvalsh(killing)
    assert values.max() < -1.0
    close(values, values.mean(), 10 * tolerance)


def test_generators_move_every_unit_alike(generator, dtype, tolerance):
    units = torch.nn.functional.normalize(torch.randn(64, 7, generator=generator).to(dtype), dim=-1)
    units = torch.cat([units, torch.eye(7, dtype=dtype)])
    moved = torch.einsum("kij,nj->nki", g2_basis(dtype), units)
    close(moved.square().sum(dim=(1, 2)), torch.tensor(2.0, dtype=dtype), tolerance)
    values = torch.linalg.svdvals(moved).square()
    close(values[:, :6], torch.tensor(1 / 3, dtype=dtype), tolerance)
    assert values[:, 6:].max() < tolerance


def test_projector(generator, dtype, tolerance):
    omega = torch.randn(5, 3, 7, 7, generator=generator).to(dtype)
    once = project_to_g2(omega)
    assert once.shape == omega.shape
    close(project_to_g2(once), once, tolerance)
    matrix = project_to_g2(torch.eye(49, dtype=dtype).view(49, 7, 7)).flatten(1)
    close(matrix, matrix.T, tolerance)
    close(matrix.trace(), torch.tensor(14.0, dtype=dtype), 14 * tolerance)
    on_so7 = rotations(dtype).flatten(1) / math.sqrt(2)
    close((on_so7 @ matrix @ on_so7.T).trace(), torch.tensor(14.0, dtype=dtype), 14 * tolerance)


def test_basis_is_a_copy():
    g2_basis().zero_()
    assert g2_basis().norm() == pytest.approx(math.sqrt(14))


def test_wrong_inputs_are_refused():
    with pytest.raises(ShapeError, match=r"omega has shape \(7, 6\): must end in 7×7; reshape"):
        project_to_g2(torch.zeros(7, 6))
    with pytest.raises(ShapeError, match=r"omega has dtype torch.int64: must be a real floating dtype"):
        project_to_g2(torch.zeros(7, 7, dtype=torch.long))
    with pytest.raises(ShapeError, match=r"dtype has dtype torch.int32"):
        g2_basis(torch.int32)
