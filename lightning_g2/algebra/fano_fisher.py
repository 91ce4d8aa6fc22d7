"""The Fano-Fisher metric on g2: how much a motion breaks associativity.

Source:
    doi:10.5281/zenodo.20077198 and doi:10.5281/zenodo.20076498. The spectrum below corrects their "8/3 for all unit
    pairs": it is 8/3 only where θ ⟂ e_A.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_g2.algebra.lie_g2 import basis_like
from lightning_g2.algebra.octonion import associator, require_vectors

MAXIMUM_ENERGY = 8.0 / 3.0
"""Largest eigenvalue of Ψ for unit θ ⟂ e_A: the upper end of the friction's range."""


def fano_fisher_metric(theta: Tensor, vacuum: Tensor) -> Tensor:
    """Fano-Fisher metric Ψ(θ, e_A), the Hessian of F(c) = |A(θ, Ω(c) e_A, e_A)|² with Ω(c) = Σ c_i Ω_i.

        Ψ_ij = 2 <V_i, V_j>,   V_i = A(θ, Ω_i e_A, e_A),   E(c) = cᵀ Ψ c = 2 F(c)

    Laws for unit arguments: rank 4 with eigenvalues (8/3)(1 - <θ, e_A>²), so 0 ≤ E ≤ 8/3 for unit c; the null space
    has dimension 10; θ ∥ e_A gives the zero matrix. The arguments are used as they are: nothing is normalised or
    orthogonalised, and Ψ scales as |θ|²|e_A|⁴.

    Args:
        theta: θ, imaginary octonion, shape (..., 7), floating; leading dimensions broadcast.
        vacuum: e_A, imaginary octonion, shape (..., 7), same dtype.

    Returns:
        Ψ, shape (..., 14, 14), symmetric, positive semi-definite, same dtype and device; dimensionless.

    Raises:
        ShapeError: a last dimension is not 7, or the dtypes differ or are not floating.

    Source:
        doi:10.5281/zenodo.20077198.
    """
    require_vectors(7, theta=theta, vacuum=vacuum)
    basis = basis_like(theta.dtype, theta.device)
    moved = torch.einsum("kij,...j->...ki", basis, vacuum)
    arguments = (_imaginary(theta).unsqueeze(-2), _imaginary(moved), _imaginary(vacuum).unsqueeze(-2))
    broken = associator(*arguments)
    return 2.0 * broken @ broken.transpose(-1, -2)


def _imaginary(vector: Tensor) -> Tensor:
    """Octonion without real part: (..., 7) → (..., 8)."""
    return torch.nn.functional.pad(vector, (1, 0))
