"""Orthonormal bases: of a tracked subspace, and of the ridge and the valley in g2."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lightning_g2.algebra.fano_fisher import MAXIMUM_ENERGY, fano_fisher_metric

_SHIFT = 1e-6


def orthonormalise(vectors: Tensor, previous: Tensor) -> Tensor:
    """Orthonormal basis of the columns, by Cholesky-QR twice in float64.

    A shift by 1e-6 of ``previous`` keeps rank-deficient input (a zero or thin drift) well defined, and the diagonal of
    R is positive, so that columns do not flip sign from push to push. Where that still fails ``previous`` is returned.
    No decomposition of the tall matrix and no host synchronisation, unlike ``torch.linalg.qr`` on some devices.

    Args:
        vectors: shape (rows, rank), floating.
        previous: orthonormal basis before, shape (rows, rank), same dtype.

    Returns:
        Q, shape (rows, rank), same dtype and device.

    Source:
        Y. Yamamoto et al., "Roundoff error analysis of the CholeskyQR2 algorithm" (2015).
    """
    wide = vectors.double()
    scale = torch.linalg.vector_norm(wide)
    fallback = previous.double()
    wide = torch.add(wide / scale.clamp_min(torch.finfo(torch.float64).tiny), fallback, alpha=_SHIFT)
    for _ in range(2):
        factor, _ = torch.linalg.cholesky_ex(wide.t() @ wide)
        wide = torch.linalg.solve_triangular(factor.t(), wide, upper=True, left=False)
    sound = torch.isfinite(wide).all() & torch.isfinite(scale)
    return torch.where(sound, wide, fallback).to(vectors.dtype)


@lru_cache(maxsize=1)
def ridge_axes() -> Tensor:
    """Orthonormal axes of R¹⁴ for Ψ(e_1, e_2): columns 0-3 span the ridge, columns 4-13 the valley.

    Returns:
        Shape (14, 14), float64, shared: read only.

    Source:
        doi:10.5281/zenodo.20077198.
    """
    units = torch.eye(7, dtype=torch.float64)
    projector = fano_fisher_metric(units[0], units[1]) / MAXIMUM_ENERGY
    axes: list[Tensor] = []
    # Gram-Schmidt on the columns of both projectors in fixed order: eigh would leave the axes to the LAPACK build.
    for part in (projector, torch.eye(14, dtype=torch.float64) - projector):
        for column in part.unbind(1):
            rest = column - sum((axis @ column * axis for axis in axes), torch.zeros_like(column))
            rest = rest - sum((axis @ rest * axis for axis in axes), torch.zeros_like(column))
            if rest.norm() > 1e-6:
                axes.append(rest / rest.norm())
    return torch.stack(axes, dim=1)
