from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_g2.errors import ConfigurationError
from lightning_g2.routing import Gate, GateContext, GateDecision, RidgeFrame, available_gates, build_gate
from lightning_g2.routing import registry as registry_module
from lightning_g2.routing.mge import vacuum_weight
from lightning_g2.routing.sketch import block_seed

FRAMES, ACTIONS = ("adaptive", "random"), ("ridge", "scalar")
SCALES, RULES = ("unit", "thermal"), ("mge", "local", "constant", "age", "relative")
STALE = GateContext(rank=0, staleness=16, concurrency=16, lr=0.1, window={0: 0.5, 1: 1.0, 2: 0.2})


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def push(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shapes = {"wide": (16, 24), "tall": (24, 8), "kernel": (12, 4, 3, 3), "thin": (3, 50), "bias": (24,), "gain": ()}
    return {name: noise(*shape, seed=seed + i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def every_g2() -> Iterator[Gate]:
    for frame, action, scale, rule in itertools.product(FRAMES, ACTIONS, SCALES, RULES):
        yield build_gate("g2", frame=frame, action=action, scale=scale, weight_rule=rule)


def same_state(a: object, b: object) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same_state(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same_state, a, b))
    return a == b


def test_registry():
    assert available_gates() == tuple(sorted(available_gates()))
    for name in ("g2", "none"):
        gate = build_gate(name)
        assert isinstance(gate, Gate)
        assert gate.runs_on == "rank"
    assert build_gate("g2").needs == frozenset()
    assert build_gate("g2", frame="random").needs == {"weights"}


def test_a_gate_from_outside_can_be_registered(monkeypatch):
    class Half(Gate):
        def decide(self, gradients, context):
            return GateDecision({name: tensor / 2 for name, tensor in gradients.items()}, weight=0.5)

    monkeypatch.setattr(registry_module, "_GATES", dict(registry_module._GATES))
    registry_module.register_gate("half", Half)
    assert build_gate("half").decide({"a": torch.ones(2)}, GateContext()).gradients["a"].tolist() == [0.5, 0.5]
    assert Half().state_dict() == {}
    with pytest.raises(ConfigurationError, match="name='half': must not be registered yet; choose another name"):
        registry_module.register_gate("half", Half)
    with pytest.raises(ConfigurationError, match=r"beta=1.0: an option of gate 'half' must be left out"):
        build_gate("half", beta=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": -1.0}, r"beta=-1.0: must be ≥ 0; 0 turns the gate off"),
        ({"beta": math.inf}, r"beta=inf: must be ≥ 0"),
        ({"constant": 1.5}, r"constant=1.5: must lie in \[0, 1\]; 1 turns the gate off"),
        ({"reject_below": -0.1}, r"reject_below=-0.1: must lie in \[0, 1\]; 0 sends every push"),
        ({"rank": 0}, r"rank=0: must be ≥ 1; 4 is the rank"),
        ({"eta": 0.0}, r"eta=0.0: must lie in \(0, 1\]"),
        ({"reference_decay": 1.0}, r"reference_decay=1.0: must lie in \[0, 1\)"),
        ({"frames": 0, "frame": "random"}, r"frames=0: must be ≥ 1"),
        ({"frame": "fixed"}, r"frame='fixed': must be one of adaptive, random; choose one of them"),
        ({"scale": "hot"}, r"scale='hot': must be one of unit, thermal"),
        ({"weight_rule": "max"}, r"weight_rule='max': must be one of mge, local, constant, age, relative"),
        ({"action": "drop"}, r"action='drop': must be one of ridge, scalar"),
        ({"form": "svd"}, r"form='svd': must be one of auto, covariance, power"),
        ({"bete": 1.0}, r"bete=1.0: an option of gate 'g2' must be one of frame, scale, .*; remove it"),
        ({"beta": "4"}, r"options=.*: must have the documented types"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        build_gate("g2", **options)


def test_bad_names_are_refused():
    with pytest.raises(ConfigurationError, match=r"gate='g3': must be one of .*g2, .*none, .*; choose one of them"):
        build_gate("g3")
    with pytest.raises(ConfigurationError, match=r"beta=1.0: an option of gate 'none' must be left out"):
        build_gate("none", beta=1.0)


def test_none_gate_passes_the_same_tensors():
    gradients = push()
    decision = build_gate("none").decide(gradients, STALE)
    assert all(decision.gradients[name] is gradients[name] for name in gradients)
    assert (decision.energy, decision.weight, decision.rejected) == (0.0, 1.0, False)


def test_fresh_pushes_are_untouched_by_every_gate():
    for gate in every_g2():
        for step in range(3):
            gradients = push(step)
            copies = {name: tensor.clone() for name, tensor in gradients.items()}
            context = GateContext(staleness=0, concurrency=1, lr=0.1, step=step, window={0: 0.0})
            decision = gate.decide(gradients, context)
            assert decision.weight == 1.0
            assert set(decision.block_weight.values()) == {1.0}
            assert list(decision.gradients) == list(gradients)
            for name, tensor in gradients.items():
                assert decision.gradients[name] is tensor
                assert torch.equal(tensor, copies[name])


def test_weights_and_energies_stay_in_range():
    for gate in every_g2():
        for step in range(4):
            context = GateContext(
                staleness=5 * step, concurrency=4, lr={"wide": 0.1}, window={0: 1.0, 3: 0.4}, weights=push(99)
            )
            gradients = push(step)
            copies = {name: tensor.clone() for name, tensor in gradients.items()}
            decision = gate.decide(gradients, context)
            assert 0.0 <= decision.energy <= 8 / 3 + 1e-6
            assert 0.0 <= decision.weight <= 1.0
            assert all(0.0 <= value <= 1.0 for value in decision.block_weight.values())
            assert all(0.0 <= value <= 8 / 3 + 1e-6 for value in decision.block_energy.values())
            assert decision.block_energy.keys() == decision.block_weight.keys() == decision.scale.keys()
            assert all(torch.equal(gradients[name], copies[name]) for name in gradients)


def test_ridge_action_follows_the_definitions():
    gate = build_gate("g2", beta=2.0, form="covariance")
    frame = RidgeFrame((16, 24), form="covariance", seed=block_seed(0, "wide"))
    reference = torch.zeros(16, 24)
    for step in range(4):
        gradient = noise(16, 24, seed=step)
        decision = gate.decide({"wide": gradient}, STALE)
        drift = gradient - reference
        energy = frame.update(drift).item()
        weight = vacuum_weight(energy * 1.0, [1.0, 0.2], 2.0)
        assert decision.block_energy["wide"] == pytest.approx(energy, abs=1e-6)
        assert decision.block_weight["wide"] == pytest.approx(weight, abs=1e-6)
        assert decision.weight == decision.block_weight["wide"]
        assert decision.scale["wide"] == pytest.approx(0.1 * drift.norm().item(), rel=1e-5)
        expected = gradient - (1 - weight) * frame.basis @ (frame.basis.t() @ gradient)
        torch.testing.assert_close(decision.gradients["wide"], expected, atol=1e-5, rtol=0)
        reference = 0.9 * reference + 0.1 * gradient


def test_which_blocks_the_ridge_takes():
    gradients = push()
    decision = build_gate("g2", weight_rule="constant", constant=0.0).decide(gradients, STALE)
    assert set(decision.block_weight) == {"wide", "tall", "kernel"}
    for name, tensor in gradients.items():
        assert (decision.gradients[name] is tensor) == (name not in decision.block_weight)
        assert decision.gradients[name].stride() == tensor.stride()


def test_whole_push_is_the_weighted_mean():
    gate = build_gate("g2", beta=1.0)
    gradients = push()
    gradients["tall"] *= 10
    decision = gate.decide(gradients, STALE)
    squares = {name: gradients[name].square().sum().item() for name in decision.block_energy}
    for whole, parts in ((decision.energy, decision.block_energy), (decision.weight, decision.block_weight)):
        mean = sum(squares[name] * parts[name] for name in parts) / sum(squares.values())
        assert whole == pytest.approx(mean, rel=1e-5)


def test_thermal_scale():
    gradients = {"wide": noise(16, 24)}
    unit = build_gate("g2").decide(gradients, STALE)
    observed = unit.scale["wide"]

    def energy(scale: dict[str, float], lr: float = 0.1) -> float:
        context = GateContext(staleness=1, lr=lr, scale=scale)
        return build_gate("g2", scale="thermal").decide(gradients, context).energy

    assert energy({"wide": 4 * observed}) == pytest.approx(unit.energy / 4, rel=1e-5)
    assert energy({"wide": observed / 4}) == pytest.approx(unit.energy)
    assert energy({}) == pytest.approx(unit.energy)
    assert energy({}, lr=0.0) == pytest.approx(unit.energy)
    assert energy({"wide": observed}, lr=0.0) == 0.0


def test_own_window_entry_is_replaced():
    gradients = {"wide": noise(16, 24)}
    weights = [
        build_gate("g2", beta=1.0).decide(gradients, GateContext(rank=0, staleness=1, window=window)).weight
        for window in ({1: 0.5}, {0: 0.0, 1: 0.5}, {0: 9.0, 1: 0.5})
    ]
    assert weights[0] == weights[1] == weights[2] < 1.0


def test_scalar_action_scales_everything():
    gradients = push()
    decision = build_gate("g2", action="scalar", weight_rule="constant", constant=0.25).decide(gradients, STALE)
    assert decision.weight == 0.25
    for name, tensor in gradients.items():
        torch.testing.assert_close(decision.gradients[name], tensor * 0.25)


def test_scalar_action_can_reject():
    gate = build_gate("g2", action="scalar", weight_rule="age", beta=10.0, reject_below=0.1)
    gradients = push()
    decision = gate.decide(gradients, STALE)
    assert decision.rejected
    assert decision.reason == "weight 4.54e-05 is below reject_below=0.1"
    assert decision.energy > 0.0
    assert not gate.decide(gradients, GateContext(staleness=0)).rejected


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("block", ["wide", "bias", "gain", "complex"])
def test_not_finite_is_rejected_without_a_trace(frame, action, bad, block):
    gate = build_gate("g2", frame=frame, action=action)
    clean = push() | {"complex": noise(3).to(torch.complex64)}
    gate.decide(clean, STALE)
    before = copy.deepcopy(gate.state_dict())
    poisoned = {name: tensor.clone() for name, tensor in clean.items()}
    poisoned[block].view(-1)[-1] = bad
    decision = gate.decide(poisoned, STALE)
    assert decision.rejected
    assert decision.weight == 0.0
    assert decision.reason.endswith(f"in {block}")
    assert same_state(before, gate.state_dict())
    assert build_gate("none").decide(poisoned, STALE).reason == f"NaN or Inf in {block}"
    assert not gate.decide(clean, STALE).rejected


def test_first_push_may_be_bad():
    gate = build_gate("g2")
    assert gate.decide({"wide": torch.full((16, 24), float("nan"))}, STALE).rejected
    decision = gate.decide({"wide": noise(16, 24)}, STALE)
    assert not decision.rejected
    assert torch.equal(
        decision.gradients["wide"], build_gate("g2").decide({"wide": noise(16, 24)}, STALE).gradients["wide"]
    )


def test_overflowing_norm_is_rejected():
    decision = build_gate("g2").decide({"wide": torch.full((16, 24), 1e25)}, STALE)
    assert decision.rejected
    assert decision.reason == "NaN, Inf or a norm beyond its dtype's range in wide"


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_dtypes(frame, action, dtype):
    gate, exact = (build_gate("g2", frame=frame, action=action, beta=0.5) for _ in range(2))
    for step in range(3):
        rounded = push(step, dtype)
        decision = gate.decide(rounded, STALE)
        reference = exact.decide({name: tensor.double() for name, tensor in rounded.items()}, STALE)
        assert decision.energy == pytest.approx(reference.energy, abs=1e-3)
        for name, tensor in decision.gradients.items():
            assert tensor.dtype == dtype
            torch.testing.assert_close(tensor.double(), reference.gradients[name], atol=5e-2, rtol=0)


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("action", ACTIONS)
def test_odd_blocks_pass(frame, action):
    odd = {
        "complex": noise(8, 8).to(torch.complex64),
        "integer": torch.ones(8, 8, dtype=torch.long),
        "empty": torch.zeros(0, 8),
        "sparse": torch.eye(8).to_sparse(),
    }
    gate = build_gate("g2", frame=frame, action=action, weight_rule="constant", constant=0.5)
    decision = gate.decide(odd | {"half": noise(8, 8).half(), "double": noise(8, 8).double()}, STALE)
    for name in ("complex", "integer", "sparse"):
        assert decision.gradients[name] is odd[name]
    assert decision.gradients["empty"].shape == (0, 8)
    assert decision.gradients["half"].dtype == torch.float16
    assert decision.gradients["double"].dtype == torch.float64
    assert decision.weight == 0.5


def test_nothing_at_all():
    for gate in (*every_g2(), build_gate("none")):
        decision = gate.decide({}, STALE)
        assert (dict(decision.gradients), decision.energy, decision.weight, decision.rejected) == ({}, 0.0, 1.0, False)


def test_zero_gradients_are_calm():
    for gate in every_g2():
        for _ in range(3):
            decision = gate.decide({"wide": torch.zeros(16, 24), "bias": torch.zeros(4)}, STALE)
            assert decision.energy == 0.0
            assert not decision.gradients["wide"].any()


def test_non_contiguous_gradients():
    dense = noise(16, 24)
    expected = build_gate("g2").decide({"w": dense}, STALE).gradients["w"]
    repeated = noise(24).expand(16, 24)
    assert torch.isfinite(build_gate("g2").decide({"w": repeated}, STALE).gradients["w"]).all()
    views = {"turned": dense.t().contiguous().t(), "cut": torch.nn.functional.pad(dense, (0, 8))[:, :24]}
    for view in views.values():
        assert not view.is_contiguous()
        result = build_gate("g2").decide({"w": view}, STALE).gradients["w"]
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
    assert build_gate("g2").decide({"w": views["turned"]}, STALE).gradients["w"].stride() == (1, 16)


@pytest.mark.parametrize("frame", FRAMES)
def test_state_round_trip(frame):
    gate, twin = build_gate("g2", frame=frame), build_gate("g2", frame=frame)
    for step in range(3):
        gate.decide(push(step), STALE)
    twin.load_state_dict(gate.state_dict())
    for step in range(3, 6):
        a, b = gate.decide(push(step), STALE), twin.decide(push(step), STALE)
        assert a.energy == b.energy
        assert all(torch.equal(a.gradients[name], b.gradients[name]) for name in a.gradients)


def test_a_block_may_be_absent_for_a_while():
    gate = build_gate("g2")
    gate.decide(push(), STALE)
    partial = {name: tensor for name, tensor in push(1).items() if name != "wide"}
    assert "wide" not in gate.decide(partial, STALE).block_energy
    assert "wide" in gate.decide(push(2), STALE).block_energy


def test_autocast_and_grad_mode_do_not_matter():
    expected = build_gate("g2").decide(push(), STALE)
    gradients = {name: tensor.requires_grad_() for name, tensor in push().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decision = build_gate("g2").decide(gradients, STALE)
    assert decision.energy == expected.energy
    for name in decision.block_weight:
        assert torch.equal(decision.gradients[name], expected.gradients[name])
        assert not decision.gradients[name].requires_grad


class Reads(TorchDispatchMode):
    """Counts what makes a host wait for a device: scalar reads and copies to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            self.count += 1
        if func in (torch.ops.aten.nonzero.default, torch.ops.aten.equal.default):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("form", ["covariance", "power"])
def test_at_most_one_host_synchronisation(monkeypatch, frame, action, form):
    calls: list[str] = []
    for method in ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        original = getattr(Tensor, method)

        def counted(self, *args, _original=original, _method=method, **kwargs):
            calls.append(_method)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, method, counted)
    gate = build_gate("g2", frame=frame, action=action, form=form)
    for step in range(6):
        context = GateContext(staleness=step, concurrency=2, lr=0.1, window={1: 0.4}, weights=push(50))
        calls.clear()
        with Reads() as reads:
            gate.decide(push(step), context)
        assert calls == ["tolist"]
        assert reads.count == 0
    with Reads() as reads:
        push()["gain"].item()
    assert reads.count == 1
    calls.clear()
    build_gate("none").decide(push(), STALE)
    assert calls == ["tolist"]


def test_context_defaults_and_rates():
    context = GateContext()
    assert context.age == 0.0
    assert GateContext(lr={"a": 0.5}).lr_of("a") == 0.5
    assert GateContext(lr={"a": 0.5}).lr_of("b") == 0.0
    assert GateContext(lr=0.1).lr_of("b") == 0.1
    assert GateContext(staleness=8, concurrency=16, pushes_per_version=4).age == 2.0
    with pytest.raises(AttributeError, match="cannot assign"):
        context.rank = 3


def test_an_old_push_is_sent_only_when_it_is_calm():
    old = GateContext(rank=0, staleness=7, concurrency=4, lr=0.1)
    young = GateContext(rank=0, staleness=6, concurrency=4, lr=0.1)
    hot, calm = {"beta": 100.0}, {"beta": 1e-6}
    gate = build_gate("g2", bounded_delay=2.0, **hot)
    decision = gate.decide(push(), old)
    assert decision.rejected
    assert decision.reason.startswith("delay 7 is above 6 (bounded_delay=2)")
    assert not gate.decide(push(1), young).rejected, "7 > 2·(N-1) ≥ 6"
    assert not build_gate("g2", bounded_delay=2.0, **calm).decide(push(), old).rejected, "rescued"
    assert not build_gate("g2", bounded_delay=None, **hot).decide(push(), old).rejected
    scalar = build_gate("g2", action="scalar", bounded_delay=2.0, **hot).decide(push(), old)
    assert scalar.rejected


def test_a_rejected_old_push_still_teaches_the_frame():
    gate = build_gate("g2", bounded_delay=1.0, beta=100.0)
    gate.decide(push(), GateContext(staleness=50, concurrency=2, lr=0.1))
    assert gate.state_dict()["references"], "else a slow rank would never learn its ridge and never be calm"
