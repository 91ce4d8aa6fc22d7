from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_g2.algebra import fano_fisher_metric
from lightning_g2.errors import ConfigurationError, ShapeError
from lightning_g2.routing import RidgeFrame
from lightning_g2.routing.basis import orthonormalise, ridge_axes

SHAPES = [(24, 40), (40, 24), (16, 16), (12, 4, 3, 3), (64, 2, 3, 3)]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def planted(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Drift with a fixed rank-4 column space (of the short side) and noise, and that space's basis."""
    out, rest = shape[0], torch.Size(shape[1:]).numel()
    rows, columns = min(out, rest), max(out, rest)
    basis = torch.linalg.qr(noise(rows, 4, seed=77)).Q
    drift = 3 * basis @ noise(4, columns, seed=seed) + 0.3 * noise(rows, columns, seed=seed + 1)
    return (drift.t() if out > rest else drift).reshape(shape), basis


@pytest.mark.parametrize("form", ["covariance", "power"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tracks_a_planted_subspace(form, shape):
    frame = RidgeFrame(shape, form=form)
    overlaps = []
    for push in range(10):
        drift, basis = planted(shape, seed=2 * push)
        energy = frame.update(drift)
        overlaps.append((frame.basis.t() @ basis).square().sum().item() / 4)
        assert 0.0 <= energy.item() <= 8 / 3
    assert overlaps[0] > 0.9
    assert overlaps[-1] > 0.98
    assert energy.item() > 2.0


@pytest.mark.parametrize("form", ["covariance", "power"])
def test_follows_a_subspace_that_turns(form):
    frame = RidgeFrame((24, 40), form=form)
    for push in range(8):
        frame.update(planted((24, 40), seed=push)[0])
    other = torch.linalg.qr(noise(24, 4, seed=5)).Q
    for push in range(40):
        frame.update(3 * other @ noise(4, 40, seed=push) + 0.3 * noise(24, 40, seed=100 + push))
    assert (frame.basis.t() @ other).square().sum().item() / 4 > 0.95


@pytest.mark.parametrize("form", ["covariance", "power"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rank", [1, 4, 6])
def test_basis_is_orthonormal(form, dtype, rank):
    frame = RidgeFrame((24, 40), form=form, rank=rank)
    for push in range(5):
        frame.update(noise(24, 40, seed=push, dtype=dtype))
    assert frame.basis.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(frame.basis.t() @ frame.basis, torch.eye(rank, dtype=dtype), atol=tolerance, rtol=0)


@pytest.mark.parametrize("form", ["covariance", "power"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rank", [2, 4, 6])
def test_summary_identity(form, shape, rank):
    frame = RidgeFrame(shape, form=form, rank=rank)
    drift = noise(*shape, seed=3)
    energy = frame.update(drift)
    c = frame.summary(drift)
    units = torch.eye(7, dtype=torch.float64)
    psi = fano_fisher_metric(units[0], units[1])
    torch.testing.assert_close(c @ psi @ c / c.square().sum(), energy, atol=1e-10, rtol=0)
    torch.testing.assert_close(c.norm(), drift.norm(), atol=1e-10, rtol=0)


def test_energy_ends_of_the_range():
    frame = RidgeFrame((24, 40), form="power")
    low_rank = noise(24, 4) @ noise(4, 40, seed=1)
    assert frame.update(low_rank).item() == pytest.approx(8 / 3, abs=1e-9)
    assert frame.update(torch.zeros(24, 40, dtype=torch.float64)).item() == 0.0


def test_forms_agree_on_a_steady_drift():
    frames = [RidgeFrame((24, 40), form=form) for form in ("covariance", "power")]
    drift = planted((24, 40), seed=0)[0]
    energies = [[frame.update(drift) for _ in range(15)][-1] for frame in frames]
    torch.testing.assert_close(energies[0], energies[1], atol=1e-6, rtol=0)
    overlap = (frames[0].basis.t() @ frames[1].basis).square().sum().item()
    assert overlap == pytest.approx(4.0, abs=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_filter_removes_the_ridge_only(shape):
    frame = RidgeFrame(shape)
    for push in range(3):
        frame.update(planted(shape, seed=push)[0])
    gradient = noise(*shape, seed=9)
    matrix = gradient.reshape(shape[0], -1)
    matrix = matrix.t() if frame.transposed else matrix
    for weight in (0.0, 0.3):
        expected = matrix - (1 - weight) * frame.basis @ (frame.basis.t() @ matrix)
        expected = (expected.t() if frame.transposed else expected).reshape(shape)
        before = gradient.clone()
        damped = frame.filter(gradient, weight)
        torch.testing.assert_close(damped, expected, atol=1e-12, rtol=0)
        assert torch.equal(gradient, before)
        assert damped.stride() == gradient.stride()
    assert frame.filter(gradient, 1.0) is gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_filter_keeps_dtype_and_strides(dtype):
    frame = RidgeFrame((12, 4, 3, 3))
    frame.update(noise(12, 4, 3, 3))
    gradient = noise(12, 4, 3, 3, dtype=dtype).to(memory_format=torch.channels_last)
    damped = frame.filter(gradient, 0.0)
    assert damped.dtype == dtype
    assert damped.stride() == gradient.stride()
    reference = frame.filter(gradient.double(), 0.0)
    torch.testing.assert_close(damped.double(), reference, atol=3e-2, rtol=0)


@pytest.mark.parametrize("form", ["covariance", "power"])
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e12])
def test_any_size_of_drift_is_well_defined(form, scale):
    frame = RidgeFrame((24, 40), form=form)
    for push in range(6):
        energy = frame.update(noise(24, 40, seed=push, dtype=torch.float32) * scale)
        assert torch.isfinite(energy)
        gram = frame.basis.t() @ frame.basis
        torch.testing.assert_close(gram, torch.eye(4), atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", ["covariance", "power"])
def test_thin_drift_is_well_defined(form):
    frame = RidgeFrame((24, 40), form=form)
    for push in range(6):
        energy = frame.update(torch.outer(noise(24, seed=1), noise(40, seed=push)).float())
    assert energy.item() == pytest.approx(8 / 3, abs=1e-3)
    torch.testing.assert_close(frame.basis.t() @ frame.basis, torch.eye(4), atol=1e-5, rtol=0)


def test_observe_keeps_nothing():
    frame = RidgeFrame((24, 40))
    frame.update(noise(24, 40))
    before = frame.basis.clone()
    observation = frame.observe(noise(24, 40, seed=1))
    assert torch.equal(frame.basis, before)
    assert frame.pushes == 1
    frame.commit(observation)
    assert not torch.equal(frame.basis, before)
    assert frame.pushes == 2


@pytest.mark.parametrize("form", ["covariance", "power"])
def test_state_round_trip(form):
    frame, twin = RidgeFrame((24, 40), form=form, seed=1), RidgeFrame((24, 40), form=form, seed=2)
    for push in range(3):
        frame.update(noise(24, 40, seed=push))
    twin.load_state_dict(frame.state_dict())
    drift = noise(24, 40, seed=8)
    assert torch.equal(frame.update(drift), twin.update(drift))
    assert torch.equal(frame.basis, twin.basis)
    with pytest.raises(ShapeError, match=r"basis has shape \(24, 4\): must be \(16, 4\); load a state of the same"):
        RidgeFrame((16, 40)).load_state_dict(frame.state_dict())


def test_orthonormalise_falls_back_to_the_previous_basis():
    previous = torch.linalg.qr(noise(10, 4)).Q
    assert torch.equal(orthonormalise(torch.full((10, 4), float("nan"), dtype=torch.float64), previous), previous)
    torch.testing.assert_close(orthonormalise(torch.zeros(10, 4, dtype=torch.float64), previous), previous)
    vectors = noise(10, 4, seed=1)
    reference = torch.linalg.qr(vectors).Q
    found = orthonormalise(vectors, previous)
    torch.testing.assert_close(found @ found.t(), reference @ reference.t(), atol=1e-4, rtol=0)
    assert (torch.diagonal(found.t() @ vectors) > 0).all()


def test_ridge_axes_split_the_metric():
    axes = ridge_axes()
    units = torch.eye(7, dtype=torch.float64)
    psi = axes.t() @ fano_fisher_metric(units[0], units[1]) @ axes
    expected = torch.diag(torch.tensor([8 / 3] * 4 + [0.0] * 10, dtype=torch.float64))
    torch.testing.assert_close(psi, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(axes.t() @ axes, torch.eye(14, dtype=torch.float64), atol=1e-12, rtol=0)


def test_which_blocks_fit():
    assert RidgeFrame.fits((5, 5))
    assert RidgeFrame.fits((8, 2, 3, 3))
    for shape in ((4, 100), (100, 4), (100,), (), (0, 9)):
        assert not RidgeFrame.fits(shape)
    assert RidgeFrame((10, 40)).form == "covariance"
    assert RidgeFrame((5000, 6000)).form == "power"


def test_wrong_inputs_are_refused():
    with pytest.raises(ShapeError, match=r"shape=\(4, 9\): must be a matrix with more than rank=4 rows and columns"):
        RidgeFrame((4, 9))
    with pytest.raises(ConfigurationError, match=r"eta=0.0: must lie in \(0, 1\]"):
        RidgeFrame((9, 9), eta=0.0)
    with pytest.raises(ConfigurationError, match="rank=0: must be ≥ 1"):
        RidgeFrame((9, 9), rank=0)
    with pytest.raises(ConfigurationError, match="form='qr': must be one of auto, covariance, power; choose one"):
        RidgeFrame((9, 9), form="qr")
    with pytest.raises(ShapeError, match=r"tensor has shape \(9, 8\): must be \(9, 9\); use one frame per block"):
        RidgeFrame((9, 9)).update(torch.zeros(9, 8))
