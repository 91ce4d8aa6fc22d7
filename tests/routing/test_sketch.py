from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_g2.errors import ConfigurationError, ShapeError
from lightning_g2.routing import G2Sketch
from lightning_g2.routing.sketch import CHUNK, block_seed


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_shape_dtype_and_determinism():
    d = noise(30, 20, dtype=torch.float32)
    c = G2Sketch(seed=3, frames=2).sketch("w", d)
    assert c.shape == (2, 14)
    assert c.dtype == torch.float32
    assert torch.equal(c, G2Sketch(seed=3, frames=2).sketch("w", d))
    assert torch.equal(c[:1], G2Sketch(seed=3).sketch("w", d))
    for other in (G2Sketch(seed=4, frames=2).sketch("w", d), G2Sketch(seed=3, frames=2).sketch("v", d)):
        assert not torch.allclose(c, other)
    assert not torch.allclose(c[0], c[1])


def test_values_are_pinned():
    # Ranks of different builds and devices must agree: integer hashing leaves nothing to the platform.
    one_hot = torch.eye(5, dtype=torch.float64)
    sketch = G2Sketch(seed=1)
    got = [(int(c.abs().argmax()), float(c.sum())) for c in (sketch.sketch("w", row)[0] for row in one_hot)]
    assert got == [(10, 1.0), (3, 1.0), (9, 1.0), (0, -1.0), (3, -1.0)]


def test_linear():
    sketch = G2Sketch(seed=5, frames=3)
    a, b = noise(1000, seed=1), noise(1000, seed=2)
    left = sketch.sketch("w", 2.0 * a - 3.0 * b)
    torch.testing.assert_close(left, 2.0 * sketch.sketch("w", a) - 3.0 * sketch.sketch("w", b), atol=1e-10, rtol=0)


def test_additive_over_blocks():
    sketch = G2Sketch(seed=5)
    blocks = {"a": noise(40, 3), "b": noise(7), "c": noise(2, 2, 2)}
    total = sum(sketch.sketch(name, tensor) for name, tensor in blocks.items())
    torch.testing.assert_close(sketch.sketch_all(blocks), total, atol=1e-12, rtol=0)
    assert torch.equal(sketch.sketch_all({}), torch.zeros(1, 14))


@pytest.mark.parametrize("cut", [1, 1000, CHUNK, CHUNK + 17])
def test_chunking_changes_nothing(cut):
    d = noise(2 * CHUNK + 333)
    sketch = G2Sketch(seed=2)
    parts = sum(sketch.sketch("w", part, offset=i * cut) for i, part in enumerate(d[: 3 * cut].split(cut)))
    torch.testing.assert_close(parts, sketch.sketch("w", d[: 3 * cut]), atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=str
)
def test_dtypes_agree_within_rounding(dtype, tolerance):
    d = noise(200, 100)
    exact = G2Sketch(seed=2).sketch("w", d)
    assert exact.dtype == torch.float64
    error = (G2Sketch(seed=2).sketch("w", d.to(dtype)).double() - exact).norm() / exact.norm()
    assert error < tolerance


def test_layout_does_not_matter():
    d = noise(60, 40)
    sketch = G2Sketch(seed=2)
    assert torch.equal(sketch.sketch("w", d.t().contiguous().t()), sketch.sketch("w", d))
    assert torch.equal(sketch.sketch("w", torch.zeros(0)), torch.zeros(1, 14))


def test_norm_is_kept_on_average():
    # Energy in few elements is the hard case: a poor hash shows there first.
    d = noise(50) * torch.linspace(0.01, 3.0, 50, dtype=torch.float64) ** 2
    ratios = torch.stack([G2Sketch(seed=seed).sketch("w", d).square().sum() for seed in range(2000)]) / d.square().sum()
    assert ratios.mean().item() == pytest.approx(1.0, abs=0.02)


def test_coordinates_and_signs_are_even():
    columns = torch.stack([G2Sketch(seed=9).sketch("w", torch.ones(1), offset=i)[0] for i in range(2800)])
    counts = torch.cat([(columns > 0).sum(0), (columns < 0).sum(0)]).double()
    assert counts.sum() == 2800
    assert ((counts - 100) ** 2 / 100).sum() < 60  # χ² with 27 degrees of freedom


class Largest(TorchDispatchMode):
    """Largest tensor that any operation returns, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not any(out.untyped_storage().data_ptr() == d for d in self.given):
            self.size_bytes = max(self.size_bytes, out.untyped_storage().nbytes())
        return out

    given: tuple[int, ...] = ()


def test_no_big_allocation():
    d = torch.ones(40 * CHUNK)
    mode = Largest()
    mode.given = (d.untyped_storage().data_ptr(),)
    with mode:
        G2Sketch().sketch("w", d)
    assert 0 < mode.size_bytes <= CHUNK * 8


def test_direction_is_unit_and_orthogonal():
    vacuum = torch.eye(7, dtype=torch.float64)[1]
    theta = G2Sketch(seed=1, frames=3).direction({"w": noise(300), "i": torch.ones(3, dtype=torch.long)}, vacuum)
    assert theta.shape == (3, 7)
    torch.testing.assert_close(theta.norm(dim=-1), torch.ones(3, dtype=torch.float64), atol=1e-12, rtol=0)
    assert (theta @ vacuum).abs().max() < 1e-12


@pytest.mark.parametrize("weights", [{}, {"w": torch.zeros(9)}, {"w": torch.full((9,), float("nan"))}], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_direction_falls_back(weights, axis):
    vacuum = torch.eye(7, dtype=torch.float64)[axis]
    theta = G2Sketch(seed=1).direction(weights, vacuum)
    assert theta.norm().item() == pytest.approx(1.0)
    assert (theta @ vacuum).abs().max() < 1e-12


def test_direction_falls_back_when_parallel():
    sketch = G2Sketch(seed=1)
    raw = sketch.direction({"w": torch.ones(1)}, torch.zeros(7))  # without a vacuum: the raw direction, one axis
    theta = sketch.direction({"w": torch.ones(1)}, raw[0])
    assert theta.norm().item() == pytest.approx(1.0)
    assert (theta @ raw[0]).abs().max() < 1e-6


def test_block_seed_depends_on_both():
    seeds = {block_seed(s, n) for s in range(20) for n in ("a", "b", "0.weight")}
    assert len(seeds) == 60
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_wrong_inputs_are_refused():
    with pytest.raises(ConfigurationError, match="frames=0: must be ≥ 1; 1 is the plain sketch"):
        G2Sketch(frames=0)
    with pytest.raises(ShapeError, match=r"w has dtype torch.int64: must be a real floating dtype; leave it out"):
        G2Sketch().sketch("w", torch.ones(3, dtype=torch.long))
