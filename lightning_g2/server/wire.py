"""Dense gradients in a smaller dtype than their own: both ends' rule for which, and how they become large again."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def travel_dtype(own: torch.dtype, wire: torch.dtype | None) -> torch.dtype:
    """Dtype in which a dense gradient travels.

    Args:
        own: its own dtype. Complex and integer ones travel as they are, and so do floating ones that are no larger than
            ``wire``: that would save nothing.
        wire: the dtype asked for; None keeps every gradient in its own.

    Returns:
        ``wire`` or ``own``.
    """
    smaller = wire is not None and own.is_floating_point and wire.itemsize < own.itemsize
    return wire if wire is not None and smaller else own


def power_of_two(largest: float, own: torch.dtype, wire: torch.dtype) -> int:
    """Exponent k such that a gradient multiplied by 2ᵏ fits a dtype; multiplying by it rounds nothing.

    In float16, whose range is short, the largest entry comes to lie in [2¹⁴, 2¹⁵), so that nothing overflows and as
    little as possible underflows. bfloat16 and float32 have the range of most gradients: there k is 0, unless the
    largest entry would become infinite.

    Args:
        largest: largest absolute entry, finite.
        own: dtype of the gradient.
        wire: dtype in which it travels.

    Returns:
        k, for 0 as largest entry 0.
    """
    if largest == 0.0:
        return 0
    exponent = math.frexp(largest)[1]
    if wire != torch.float16:
        return min(0, 127 - exponent)
    most = 1023 if own == torch.float64 else 127  # 2**k has to be a number of the gradient's own dtype
    return min(15 - exponent, most)


def widened(gradient: Tensor, own: torch.dtype, exponent: int) -> Tensor:
    """A gradient as it was before it travelled, up to rounding.

    Args:
        gradient: as it came.
        own: dtype of the parameter.
        exponent: k of :func:`power_of_two`.

    Returns:
        A new tensor, or the same one where its dtype is ``own`` and k is 0.
    """
    wide = gradient.to(own)
    return wide * 2.0**-exponent if exponent else wide
