"""The spectral gate: formula, laws, contract."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from lightning_g2.errors import ConfigurationError, ShapeError
from lightning_g2.routing import GateContext, build_gate
from lightning_g2.routing.sketch import block_seed
from lightning_g2.routing.spectral import SpectralFrame, weigh

STALE = GateContext(rank=0, staleness=16, concurrency=16, lr=0.1)
CONTROLS = [{"energies": name} for name in ("mean", "shuffled", "permuted", "age", "constant")]
OPTIONS = [{}, {"scale": "unit"}, {"norm": "none"}, {"rank": 1}, {"directions": "random"}, *CONTROLS]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def push(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shapes = {"wide": (16, 40), "tall": (40, 8), "kernel": (12, 4, 3, 3), "thin": (2, 50), "bias": (24,), "gain": ()}
    return {name: noise(*shape, seed=seed + i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def same_state(a: object, b: object) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same_state(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same_state, a, b))
    return a == b


@pytest.mark.parametrize("shape", [(16, 40), (40, 8), (12, 4, 3, 3), (2, 50), (3, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_energies_of_directions_are_energies(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    frame = SpectralFrame(shape, rank=6)
    for step in range(6):
        seen = frame.observe(noise(*shape, seed=step, dtype=dtype))
        for side in (seen.left, seen.right):
            unit = torch.eye(side.basis.shape[1], dtype=dtype)
            torch.testing.assert_close(side.basis.t() @ side.basis, unit, atol=1e-5, rtol=0)
            for energies in (side.energies, side.mean):
                assert energies.dtype == dtype
                assert (energies >= 0).all()
                assert energies.sum() <= 8 / 3 + 1e-5
                assert 0.0 <= side.rest(energies) <= 8 / 3
        assert 0.0 <= seen.energy <= 8 / 3
        frame.commit(seen)


def test_directions_are_the_singular_ones_of_the_drift() -> None:
    left, right = (torch.linalg.qr(noise(rows, 3, seed=rows, dtype=torch.float64))[0] for rows in (20, 30))
    strengths = torch.tensor([8.0, 4.0, 1.0], dtype=torch.float64)
    frame = SpectralFrame((20, 30), rank=2)
    for _ in range(30):
        frame.commit(frame.observe((left * strengths) @ right.t()))
    expected = 8 / 3 * strengths[:2].square() / strengths.square().sum()
    for side, directions in ((frame.left, left), (frame.right, right)):
        torch.testing.assert_close(side.energies, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close((side.basis.t() @ directions).abs(), torch.eye(2, 3).double(), atol=1e-2, rtol=0)
        rest = (8 / 3 - expected.sum()) / (directions.shape[0] - 2)
        torch.testing.assert_close(side.rest(side.energies), rest, atol=1e-4, rtol=0)


def test_the_formula() -> None:
    beta, power, rank = 2.0, 0.75, 4
    gate = build_gate("g2_spectral", beta=beta, power=power, rank=rank)
    frame = SpectralFrame((16, 40), rank=rank, seed=block_seed(0, "w"))
    reference, hottest = torch.zeros(16, 40), 0.0
    for step in range(5):
        gradient = noise(16, 40, seed=step) * (5 - step)
        drift = gradient - reference
        observed = 0.1 * drift.norm().item()
        decision = gate.decide({"w": gradient}, GateContext(staleness=8, concurrency=16, lr=0.1, scale={"w": hottest}))
        hottest = max(hottest, observed)
        frame.commit(frame.observe(drift))
        expected = gradient.double()
        for i, side in enumerate((frame.left, frame.right)):
            basis, rows = side.basis.double(), side.basis.shape[0]
            full = torch.linalg.qr(torch.cat([basis, noise(rows, rows - rank, seed=7).double()], dim=1))[0]
            shares = (full.t() @ (drift.double() if i == 0 else drift.double().t())).square().sum(1)
            energies = 8 / 3 * shares / shares.sum()
            energies[rank:] = energies[rank:].mean()
            weights = (1 + beta * 0.5 * observed / hottest * energies / energies.mean()) ** -power
            matrix = (full * weights) @ full.t()
            expected = matrix @ expected if i == 0 else expected @ matrix
        assert decision.weight == pytest.approx((expected.norm() / gradient.norm()).item(), rel=1e-4)
        assert decision.scale["w"] == pytest.approx(observed, rel=1e-5)
        expected = expected * (gradient.norm() / expected.norm())
        torch.testing.assert_close(decision.gradients["w"].double(), expected, atol=1e-4, rtol=0)
        reference = 0.9 * reference + 0.1 * gradient


def test_weigh_is_a_symmetric_matrix_on_each_side() -> None:
    frame = SpectralFrame((6, 9), rank=2)
    matrix, rest = noise(6, 9), torch.tensor(0.5)
    left, right = torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4])
    both = [0.5 * torch.eye(rows) for rows in (6, 9)]
    for i, (side, weights) in enumerate(((frame.left, left), (frame.right, right))):
        both[i] += (side.basis * (weights - 0.5)) @ side.basis.t()
    weighed = weigh(matrix, (frame.left, left, rest), (frame.right, right, rest))
    torch.testing.assert_close(weighed, both[0] @ matrix @ both[1])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_fresh_push_leaves_with_its_own_tensors(options: dict[str, object]) -> None:
    gate = build_gate("g2_spectral", **options)
    for step in range(3):
        gradients = push(step)
        decision = gate.decide(gradients, GateContext(staleness=0, concurrency=1, lr=0.1))
        assert all(decision.gradients[name] is gradients[name] for name in gradients)
        assert set(decision.block_weight.values()) == {1.0}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ranges_norms_and_who_is_weighed(options: dict[str, object]) -> None:
    gate = build_gate("g2_spectral", **options)
    for step in range(5):
        gradients = push(step)
        copies = copy.deepcopy(gradients)
        decision = gate.decide(gradients, GateContext(staleness=1 + 9 * step, concurrency=4, lr={"wide": 0.1}))
        assert all(torch.equal(gradients[name], copies[name]) for name in gradients)
        assert decision.block_weight.keys() == {"wide", "tall", "kernel", "thin"}
        assert all(0.0 <= weight <= 1.0 for weight in decision.block_weight.values())
        assert all(0.0 <= energy <= 8 / 3 + 1e-6 for energy in decision.block_energy.values())
        for name, sent in decision.gradients.items():
            if name not in decision.block_weight:
                assert sent is gradients[name]
            elif options.get("norm") == "none":
                assert sent.norm() <= gradients[name].norm() * (1 + 1e-5)
            else:
                torch.testing.assert_close(sent.norm(), gradients[name].norm())


def test_without_temperature_nothing_is_weighed() -> None:
    gradients = push()
    decision = build_gate("g2_spectral", beta=0.0).decide(gradients, STALE)
    assert all(decision.gradients[name] is gradients[name] for name in gradients)
    assert decision.weight == 1.0


def test_a_direction_that_holds_more_of_the_drift_is_damped_more() -> None:
    gate = build_gate("g2_spectral", rank=4)
    along, across = noise(16, 1, seed=1) @ noise(1, 40, seed=2), noise(16, 40, seed=3)
    for step in range(10):
        gate.decide({"w": 5.0 * (-1) ** step * along + across}, STALE)
    sent = gate.decide({"w": 5.0 * along + across}, STALE).gradients["w"]

    def share(matrix: Tensor) -> float:
        return ((matrix * along).sum() / matrix.norm() / along.norm()).item()

    assert share(sent) < 0.2 * share(5.0 * along + across)


def test_a_push_opens_as_the_learning_rate_falls() -> None:
    weights = []
    for lr in (0.1, 0.03, 0.01, 0.0):
        gate = build_gate("g2_spectral", seed=3)
        weights.append(gate.decide(push(), GateContext(staleness=16, concurrency=16, lr=lr, scale={
            name: 0.1 * tensor.norm().item() for name, tensor in push().items()})).weight)  # fmt: skip
    assert weights == sorted(weights)
    assert weights[0] < 0.5
    assert weights[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("block", ["wide", "bias", "gain", "complex"])
def test_not_finite_is_rejected_without_a_trace(bad: float, block: str) -> None:
    gate = build_gate("g2_spectral")
    clean = push() | {"complex": noise(3).to(torch.complex64)}
    gate.decide(clean, STALE)
    before = copy.deepcopy(gate.state_dict())
    poisoned = {name: tensor.clone() for name, tensor in clean.items()}
    poisoned[block].view(-1)[-1] = bad
    decision = gate.decide(poisoned, STALE)
    assert decision.rejected
    assert decision.reason.endswith(f"in {block}")
    assert same_state(before, gate.state_dict())
    assert not gate.decide(clean, STALE).rejected
    overflowing = build_gate("g2_spectral").decide({"w": torch.full((16, 24), 1e25)}, STALE)
    assert overflowing.reason == "NaN, Inf or a norm beyond its dtype's range in w"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    gate, exact = (build_gate("g2_spectral", rank=4) for _ in range(2))
    for step in range(3):
        rounded = push(step, dtype)
        decision = gate.decide(rounded, STALE)
        reference = exact.decide({name: tensor.double() for name, tensor in rounded.items()}, STALE)
        assert decision.energy == pytest.approx(reference.energy, abs=1e-3)
        for name, tensor in decision.gradients.items():
            assert tensor.dtype == dtype
            torch.testing.assert_close(tensor.double(), reference.gradients[name], atol=5e-2, rtol=0)


def test_odd_blocks() -> None:
    odd = {
        "complex": noise(8, 8).to(torch.complex64),
        "integer": torch.ones(8, 8, dtype=torch.long),
        "sparse": torch.eye(8).to_sparse(),
        "row": noise(1, 8),
        "empty": torch.zeros(0, 8),
    }
    turned = noise(24, 16).t()
    gate = build_gate("g2_spectral")
    decision = gate.decide(odd | {"turned": turned, "zero": torch.zeros(8, 8)}, STALE)
    assert all(decision.gradients[name] is odd[name] for name in odd)
    assert decision.gradients["turned"].stride() == turned.stride()
    assert not decision.gradients["zero"].any()
    straight = build_gate("g2_spectral").decide({"turned": turned.contiguous()}, STALE).gradients["turned"]
    torch.testing.assert_close(decision.gradients["turned"], straight, atol=1e-5, rtol=0)
    empty = build_gate("g2_spectral").decide({}, STALE)
    assert (dict(empty.gradients), empty.energy, empty.weight) == ({}, 0.0, 1.0)


def test_state_round_trip() -> None:
    gate, twin = build_gate("g2_spectral"), build_gate("g2_spectral")
    for step in range(3):
        gate.decide(push(step), STALE)
    twin.load_state_dict(copy.deepcopy(gate.state_dict()))
    assert same_state(gate.state_dict(), twin.state_dict())
    for step in range(3, 6):
        a, b = gate.decide(push(step), STALE), twin.decide(push(step), STALE)
        assert a.energy == b.energy
        assert all(torch.equal(a.gradients[name], b.gradients[name]) for name in a.gradients)
    with pytest.raises(ShapeError, match=r"left basis has shape \(16, 15\): must be \(16, 4\)"):
        build_gate("g2_spectral", rank=4).load_state_dict(gate.state_dict())
    with pytest.raises(ShapeError, match="must be a matrix with at least two rows and columns"):
        SpectralFrame((5,))
    with pytest.raises(ShapeError, match=r"tensor has shape \(3, 4\): must be \(4, 3\)"):
        SpectralFrame((4, 3)).observe(noise(3, 4))


def test_autocast_and_grad_mode_do_not_matter() -> None:
    expected = build_gate("g2_spectral").decide(push(), STALE)
    gradients = {name: tensor.requires_grad_() for name, tensor in push().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decision = build_gate("g2_spectral").decide(gradients, STALE)
    for name in decision.block_weight:
        assert torch.equal(decision.gradients[name], expected.gradients[name])
        assert not decision.gradients[name].requires_grad


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_host_synchronisation(monkeypatch: pytest.MonkeyPatch, options: dict[str, object]) -> None:
    calls: list[str] = []
    for method in ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        original = getattr(Tensor, method)

        def counted(self: Tensor, *args: object, _original=original, _method=method, **kwargs: object) -> object:  # type: ignore[no-untyped-def]
            calls.append(_method)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, method, counted)
    gate = build_gate("g2_spectral", **options)
    for step in range(6):
        calls.clear()
        gate.decide(push(step), GateContext(staleness=step, concurrency=2, lr=0.1))
        assert calls == ["tolist"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": -1.0}, r"beta=-1.0: must be ≥ 0; 0 turns the gate off"),
        ({"power": 0.0}, r"power=0.0: must be > 0 and finite"),
        ({"rank": 0}, r"rank=0: must be ≥ 1"),
        ({"eta": 0.0}, r"eta=0.0: must lie in \(0, 1\]"),
        ({"reference_decay": 1.0}, r"reference_decay=1.0: must lie in \[0, 1\)"),
        ({"constant": 2.0}, r"constant=2.0: must lie in \[0, 1\]"),
        ({"scale": "hot"}, r"scale='hot': must be one of unit, thermal"),
        ({"norm": "whole"}, r"norm='whole': must be one of block, none"),
        ({"energies": "all"}, r"energies='all': must be one of own, mean, shuffled, permuted, age, constant"),
        ({"directions": "all"}, r"directions='all': must be one of tracked, random"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_gate("g2_spectral", **options)
