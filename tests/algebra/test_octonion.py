from __future__ import annotations

from itertools import combinations, permutations

import pytest
import torch
from torch import Tensor

from lightning_g2.algebra import associator, multiplication_table, multiply
from lightning_g2.algebra.octonion import FANO_LINES
from lightning_g2.errors import ShapeError


def draw(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape, 8, generator=generator, dtype=torch.float64), dim=-1).to(
        dtype
    )


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b.expand_as(a), atol=tolerance, rtol=0)


def test_norm_is_multiplicative(generator, dtype, tolerance):
    x, y = draw(generator, dtype, 256) * 1.5, draw(generator, dtype, 256)
    close(multiply(x, y).norm(dim=-1), x.norm(dim=-1) * y.norm(dim=-1), tolerance)


def test_alternativity(generator, dtype, tolerance):
    x, y = draw(generator, dtype, 256), draw(generator, dtype, 256)
    zero = torch.zeros(8, dtype=dtype)
    for triple in ((x, x, y), (y, x, x), (x, y, x)):
        close(associator(*triple), zero, tolerance)


def test_associator_alternates_and_ignores_real_parts(generator, dtype, tolerance):
    x, y, z = (draw(generator, dtype, 128) for _ in range(3))
    a = associator(x, y, z)
    assert a.norm(dim=-1).max() > 0.5
    close(associator(y, x, z), -a, tolerance)
    close(associator(x, z, y), -a, tolerance)
    close(associator(z, y, x), -a, tolerance)
    real = torch.zeros(8, dtype=dtype)
    real[0] = 0.7
    close(associator(x + real, y - real, z), a, tolerance)


def test_moufang(generator, dtype, tolerance):
    x, y, z = (draw(generator, dtype, 256) for _ in range(3))
    m = multiply
    close(m(z, m(x, m(z, y))), m(m(m(z, x), z), y), tolerance)
    close(m(x, m(z, m(y, z))), m(m(m(x, z), y), z), tolerance)
    close(m(m(z, x), m(y, z)), m(m(z, m(x, y)), z), tolerance)


def test_fano_lines_and_associator_norms(dtype):
    units = torch.eye(8, dtype=dtype)
    lines = {frozenset(line) for line in FANO_LINES}
    assert len(lines) == 7
    norms = {t: associator(*(units[i] for i in t)).norm().item() for t in combinations(range(1, 8), 3)}
    assert sum(value == 0.0 for value in norms.values()) == 7
    assert sum(value == 2.0 for value in norms.values()) == 28
    assert {frozenset(t) for t, value in norms.items() if value == 0.0} == lines


def test_products_of_units(dtype):
    units = torch.eye(8, dtype=dtype)
    for i in range(1, 8):
        assert torch.equal(multiply(units[i], units[i]), -units[0])
        assert torch.equal(multiply(units[0], units[i]), units[i])
    for i, j in permutations(range(1, 8), 2):
        assert torch.equal(multiply(units[i], units[j]), -multiply(units[j], units[i]))
    for i, j, k in FANO_LINES:
        assert torch.equal(multiply(units[i], units[j]), units[k])
        assert torch.equal(multiply(units[j], units[k]), units[i])


def test_broadcasts(generator, dtype, tolerance):
    x, y = draw(generator, dtype, 4, 1), draw(generator, dtype, 5)
    product = multiply(x, y)
    assert product.shape == (4, 5, 8)
    close(product[2, 3], multiply(x[2, 0], y[3]), tolerance)
    assert multiply(draw(generator, dtype, 0), y[0]).shape == (0, 8)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_its_dtype(generator, low):
    x, y = draw(generator, torch.float64, 16), draw(generator, torch.float64, 16)
    product = multiply(x.to(low), y.to(low))
    assert product.dtype == low
    torch.testing.assert_close(product.double(), multiply(x, y), atol=5e-2, rtol=0)


def test_table_is_a_copy():
    multiplication_table().zero_()
    table = multiplication_table(torch.float32)
    assert table.dtype == torch.float32
    assert table.shape == (8, 8, 8)
    assert table.abs().sum() == 64


def test_wrong_inputs_are_refused():
    x = torch.zeros(8)
    with pytest.raises(ShapeError, match=r"x has shape \(7,\): the last dimension must be 8; reshape"):
        multiply(torch.zeros(7), x)
    with pytest.raises(ShapeError, match=r"y has dtype torch.float64: must equal the others' torch.float32; convert"):
        multiply(x, x.double())
    with pytest.raises(ShapeError, match=r"z has dtype torch.int64: must be a real floating dtype; convert"):
        associator(x, x, x.long())
    with pytest.raises(ShapeError, match=r"x has shape \(\)"):
        multiply(torch.tensor(1.0), x)
    with pytest.raises(ShapeError, match=r"dtype has dtype torch.complex64"):
        multiplication_table(torch.complex64)
