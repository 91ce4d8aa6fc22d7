"""The Lie algebra g2 of derivations of the octonions, inside so(7).

D ∈ so(7) is a derivation iff it annihilates the 3-form φ_ijk = <e_i e_j, e_k>, and that is so iff
Σ_ij φ_ijk D_ij = 0 for each k: so(7) = g2 (14) ⊕ R⁷ (7). For each unit e_k exactly three Fano lines pass through it, so
the condition on k binds three entries D_ij and leaves two free: 7 × 2 = 14. That gives the basis in closed form,
the same on every machine, without a decomposition by LAPACK.

Source:
    R. Bryant, "Some remarks on G2-structures" (2005), §2.6 (the splitting of Λ²); Baez 2002, §4.1.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from lightning_g2.algebra.octonion import FANO_LINES, require_floating
from lightning_g2.errors import ShapeError


def _pairs_through(unit: int) -> list[tuple[int, int]]:
    """Pairs (i, j) with e_i e_j = +e_unit, one for each of the three lines through ``unit``, by smallest member."""
    pairs = [
        (line[(shift + 1) % 3], line[(shift + 2) % 3])
        for line in FANO_LINES
        for shift in range(3)
        if line[shift] == unit
    ]
    return sorted(pairs, key=min)


@lru_cache(maxsize=1)
def _basis() -> Tensor:
    # Coefficients that sum to zero over the three pairs of a unit; a rotation generator has Frobenius norm √2.
    patterns = ((1.0, -1.0, 0.0), (1.0, 1.0, -2.0))
    basis = torch.zeros(14, 7, 7, dtype=torch.float64)
    for unit in range(1, 8):
        for row, pattern in enumerate(patterns):
            norm = math.sqrt(2.0 * sum(value * value for value in pattern))
            for value, (i, j) in zip(pattern, _pairs_through(unit), strict=True):
                basis[2 * (unit - 1) + row, i - 1, j - 1] = value / norm
                basis[2 * (unit - 1) + row, j - 1, i - 1] = -value / norm
    return basis


@lru_cache(maxsize=32)
def basis_like(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The basis in a dtype and on a device, cached; for reading only.

    Args:
        dtype: floating dtype.
        device: where it shall live.

    Returns:
        Ω, shape (14, 7, 7). Shared: do not write to it; :func:`g2_basis` hands out copies.
    """
    return _basis().to(device=device, dtype=dtype)


def g2_basis(dtype: torch.dtype = torch.float64) -> Tensor:
    """Orthonormal basis Ω_1..Ω_14 of g2 = der(O) as 7×7 matrices acting on the imaginary octonions.

    Laws: tr(Ω_iᵀ Ω_j) = δ_ij; D(xy) = D(x)y + xD(y); closed under the bracket; Σ_i |Ω_i e_A|² = 2 for each unit e_A.

    Args:
        dtype: floating dtype of the copy handed out.

    Returns:
        Ω, shape (14, 7, 7); dimensionless. A fresh copy, in a fixed order that no library version can change.

    Raises:
        ShapeError: ``dtype`` is not a real floating dtype.

    Source:
        Bryant 2005, §2.6.
    """
    require_floating(dtype, "dtype")
    return _basis().to(dtype=dtype, copy=True)


def project_to_g2(omega: Tensor) -> Tensor:
    """Orthogonal projection onto g2 in the Frobenius product.

        P(ω) = Σ_i <Ω_i, ω> Ω_i

    Laws: idempotent, symmetric, trace 14. A general matrix loses its symmetric part first, as g2 ⊂ so(7).

    Args:
        omega: shape (..., 7, 7), floating.

    Returns:
        P(ω), shape (..., 7, 7), same dtype and device.

    Raises:
        ShapeError: the last two dimensions are not 7×7, or the dtype is not floating.

    Source:
        Bryant 2005, §2.6.
    """
    if omega.ndim < 2 or omega.shape[-2:] != (7, 7):
        raise ShapeError(f"omega has shape {tuple(omega.shape)}: must end in 7×7; reshape it to (..., 7, 7)")
    require_floating(omega.dtype, "omega")
    basis = basis_like(omega.dtype, omega.device)
    return torch.einsum("...i,ijk->...jk", torch.einsum("ijk,...jk->...i", basis, omega), basis)
