from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_g2.algebra import fano_fisher_metric
from lightning_g2.routing import G2Sketch, GateContext, build_gate
from lightning_g2.routing.random_frame import RandomFrame


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("frames", [1, 3])
def test_energy_is_the_metric_of_the_sketch(frames):
    blocks, weights = {"a": noise(30, 20), "b": noise(50, seed=1)}, {"a": noise(30, 20, seed=2)}
    frame, sketch = RandomFrame(seed=4, frames=frames), G2Sketch(seed=4, frames=frames)
    vacuum = torch.eye(7)[1]
    psi = fano_fisher_metric(sketch.direction(weights, vacuum), vacuum).double()

    def expected(c: Tensor) -> Tensor:
        return (torch.einsum("mi,mij,mj->m", c, psi, c) / c.square().sum(-1)).mean()

    frame.begin(weights, blocks["a"])
    for name, block in blocks.items():
        torch.testing.assert_close(frame.energy(name, block), expected(sketch.sketch(name, block)))
    total = sketch.sketch_all(blocks)
    torch.testing.assert_close(frame.energy_of_push().double(), expected(total), atol=1e-5, rtol=0)


def test_energy_does_not_depend_on_size():
    gradients = {"a": noise(30, 20), "b": noise(50, seed=1)}
    energies = []
    for size in (1e-6, 1.0, 1e6):
        gate = build_gate("g2", frame="random", action="scalar")
        energies.append(gate.decide({name: size * g for name, g in gradients.items()}, GateContext()).energy)
    assert energies[0] == pytest.approx(energies[1], rel=1e-5)
    assert energies[2] == pytest.approx(energies[1], rel=1e-5)


def test_mean_energy_over_seeds():
    drift = noise(400)
    energies = []
    for seed in range(400):
        frame = RandomFrame(seed=seed)
        frame.begin({"w": drift}, drift)
        energies.append(frame.energy("other", drift).item())
    assert sum(energies) / len(energies) == pytest.approx(16 / 21, abs=0.06)
    assert 0.0 <= min(energies) <= max(energies) <= 8 / 3 + 1e-6
