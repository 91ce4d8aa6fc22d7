"""Octonions, the Lie algebra g2 and the Fano-Fisher metric: pure mathematics on tensors.

Every function is exact up to rounding, broadcasts over leading dimensions, and works in any real floating dtype on any
device. Constants are built once in float64 and handed out as copies.
"""

from lightning_g2.algebra.fano_fisher import fano_fisher_metric
from lightning_g2.algebra.lie_g2 import g2_basis, project_to_g2
from lightning_g2.algebra.octonion import associator, multiplication_table, multiply

__all__ = ["associator", "fano_fisher_metric", "g2_basis", "multiplication_table", "multiply", "project_to_g2"]
