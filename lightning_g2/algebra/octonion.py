"""Octonions: multiplication table, product and associator.

Units e_0 = 1 and e_1..e_7 with e_i² = -1. On an oriented line (i, j, k) of the Fano plane, and on its cyclic shifts,
e_i e_j = e_k and e_j e_i = -e_k.

Source:
    J. Baez, "The Octonions", Bull. AMS 39 (2002), §2.1; the lines below are his convention.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lightning_g2.errors import ShapeError

FANO_LINES: tuple[tuple[int, int, int], ...] = (
    (1, 2, 4),
    (2, 3, 5),
    (3, 4, 6),
    (4, 5, 7),
    (5, 6, 1),
    (6, 7, 2),
    (7, 1, 3),
)
"""The seven oriented lines; indices are those of the imaginary units."""


@lru_cache(maxsize=1)
def _table() -> Tensor:
    table = torch.zeros(8, 8, 8, dtype=torch.float64)
    for i in range(8):
        table[0, i, i] = 1.0
        table[i, 0, i] = 1.0
    for i in range(1, 8):
        table[i, i, 0] = -1.0
    for line in FANO_LINES:
        for shift in range(3):
            i, j, k = (line[(shift + step) % 3] for step in range(3))
            table[i, j, k] = 1.0
            table[j, i, k] = -1.0
    return table


@lru_cache(maxsize=32)
def _table_like(dtype: torch.dtype, device: torch.device) -> Tensor:
    return _table().to(device=device, dtype=dtype)


def require_floating(value: torch.dtype, name: str) -> None:
    """Raise ShapeError unless ``value`` is a real floating dtype.

    Args:
        value: the dtype to judge.
        name: what carries it, for the message.

    Raises:
        ShapeError: the dtype is integer, boolean or complex.
    """
    if not value.is_floating_point:
        raise ShapeError(f"{name} has dtype {value}: must be a real floating dtype; convert it, e.g. with .double()")


def require_vectors(size: int, **tensors: Tensor) -> None:
    """Raise ShapeError unless all tensors are real vectors of one length and one dtype.

    Args:
        size: required length of the last dimension.
        **tensors: the tensors by name, each of shape (..., size).

    Raises:
        ShapeError: a last dimension differs from ``size``, a dtype is not floating, or dtypes differ.
    """
    first: Tensor | None = None
    for name, tensor in tensors.items():
        if tensor.ndim < 1 or tensor.shape[-1] != size:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}: the last dimension must be {size}; "
                f"reshape it to (..., {size})"
            )
        require_floating(tensor.dtype, name)
        first = tensor if first is None else first
        if tensor.dtype != first.dtype:
            raise ShapeError(
                f"{name} has dtype {tensor.dtype}: must equal the others' {first.dtype}; convert one of them"
            )


def multiplication_table(dtype: torch.dtype = torch.float64) -> Tensor:
    """Structure constants of the octonions.

        e_i e_j = Σ_k T[i, j, k] e_k

    Args:
        dtype: floating dtype of the copy handed out.

    Returns:
        T, shape (8, 8, 8), entries in {-1, 0, 1}; dimensionless. A fresh copy: changing it changes nothing else.

    Raises:
        ShapeError: ``dtype`` is not a real floating dtype.

    Source:
        Baez 2002, §2.1.
    """
    require_floating(dtype, "dtype")
    return _table().to(dtype=dtype, copy=True)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Octonion product xy.

    Laws: |xy| = |x||y|; x(xy) = (xx)y and (yx)x = y(xx); neither commutative nor associative.

    Args:
        x: left factor, shape (..., 8), floating; leading dimensions broadcast.
        y: right factor, shape (..., 8), same dtype.

    Returns:
        Product, shape (..., 8), same dtype and device.

    Raises:
        ShapeError: a last dimension is not 8, or the dtypes differ or are not floating.

    Source:
        Baez 2002, §2.1.
    """
    require_vectors(8, x=x, y=y)
    table = _table_like(x.dtype, x.device)
    left = torch.einsum("...i,ijk->...jk", x, table)
    return torch.einsum("...j,...jk->...k", y, left)


def associator(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Associator A(x, y, z) = (xy)z - x(yz).

    Laws: alternating in its arguments; real parts do not matter; on basis units of norm 0 on a Fano line and 2 off it.

    Args:
        x: shape (..., 8), floating; leading dimensions broadcast.
        y: shape (..., 8), same dtype.
        z: shape (..., 8), same dtype.

    Returns:
        A(x, y, z), shape (..., 8), same dtype and device.

    Raises:
        ShapeError: a last dimension is not 8, or the dtypes differ or are not floating.

    Source:
        Baez 2002, §2 (alternativity).
    """
    require_vectors(8, x=x, y=y, z=z)
    return multiply(multiply(x, y), z) - multiply(x, multiply(y, z))
