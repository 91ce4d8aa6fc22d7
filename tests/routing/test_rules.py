"""Staleness rules beside g2, and the controls of the g2 gate: formulas, contract, and who may run them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from lightning_g2 import G2RoutingCallback
from lightning_g2.errors import ConfigurationError
from lightning_g2.routing import Gate, GateContext, available_gates, build_gate, registry
from lightning_g2.routing.mge import local_weight, vacuum_weight

RULES = ("concurrency", "cosine", "dana", "dc", "drop", "inverse", "polynomial", "predict", "ssp", "zeno")
CONTROLS = ("g2_energy_only", "g2_random_subspace", "g2_shuffled", "g2_spectral")


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def push(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shapes = {"wide": (16, 24), "tall": (24, 8), "bias": (24,)}
    return {name: noise(*shape, seed=seed + i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def quadratic(weights: Mapping[str, Tensor]) -> Tensor:
    return sum((weight.double().square().sum() / 2 for weight in weights.values()), torch.zeros(()))


def context(staleness: int = 8, **fields: object) -> GateContext:
    known: dict[str, object] = {
        "rank": 0, "concurrency": 4, "lr": 0.1, "window": {0: 0.5, 1: 1.0}, "weights": push(5), "base_weights": push(9),
        "evaluate": quadratic,
    }  # fmt: skip
    return GateContext(staleness=staleness, **{**known, **fields})


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_every_rule_is_in_the_registry() -> None:
    assert set(available_gates()) == {"none", "g2", *RULES, *CONTROLS}


@pytest.mark.parametrize("name", available_gates())
def test_every_rule_states_where_it_runs_and_its_source(name: str) -> None:
    gate = build_gate(name)
    assert gate.runs_on in ("rank", "server")
    assert gate.needs <= {"weights", "base_weights", "evaluate"}
    assert "Source:" in (type(gate).__doc__ or "")
    assert name.split("_")[0] in gate.describe()


@pytest.mark.parametrize("name", available_gates())
def test_every_rule_keeps_the_contract(name: str) -> None:
    gate, twin = build_gate(name), build_gate(name)
    for step in range(4):
        gradients = push(10 * step)
        before = copy.deepcopy(gradients)
        decision = gate.decide(gradients, context(step))
        assert equal(gradients, before)  # never written to
        assert decision.gradients.keys() == gradients.keys()
        assert all(d.dtype == g.dtype and d.shape == g.shape for d, g in zip(decision.gradients.values(), gradients.values(), strict=True))  # noqa: E501 # fmt: skip
        assert 0.0 <= decision.weight <= 1.0
        assert 0.0 <= decision.energy <= 8 / 3
        if step == 1:  # in between, a push that cannot be used: as if it had not been
            poisoned = push()
            poisoned["bias"][3] = math.nan
            spoilt = gate.decide(poisoned, context())
            assert spoilt.rejected
            assert "bias" in spoilt.reason
        assert equal(decision.gradients, twin.decide(gradients, context(step)).gradients)
    fresh = build_gate(name)
    fresh.load_state_dict(gate.state_dict())
    if name not in ("g2_shuffled", "g2_random_subspace", "zeno"):  # these draw, or look again
        assert equal(fresh.decide(push(7), context()).gradients, gate.decide(push(7), context()).gradients)


@pytest.mark.parametrize("name", [name for name in available_gates() if name not in ("dana", "zeno")])
def test_a_fresh_push_leaves_with_its_own_tensors(name: str) -> None:
    gate = build_gate(name)
    for step in range(3):
        gradients = push(step)
        decision = gate.decide(gradients, context(0, window={}))
        assert all(decision.gradients[block] is gradients[block] for block in gradients)
        assert decision.weight == 1.0


@pytest.mark.parametrize(
    ("name", "options", "staleness", "factor"),
    [
        ("inverse", {}, 0, 1.0),
        ("inverse", {}, 1, 1.0),
        ("inverse", {}, 8, 1 / 8),
        ("concurrency", {}, 4, 1.0),
        ("concurrency", {}, 8, 0.5),
        ("polynomial", {}, 8, 1 / 3),
        ("polynomial", {"exponent": 1.0}, 3, 0.25),
    ],
)
def test_factors_of_age(name: str, options: dict[str, float], staleness: int, factor: float) -> None:
    gradients = push()
    decision = build_gate(name, **options).decide(gradients, context(staleness))
    assert decision.weight == pytest.approx(factor)
    assert torch.allclose(decision.gradients["bias"], gradients["bias"] * factor)
    rate = build_gate(name, scales="lr", **options).decide(gradients, context(staleness))
    assert rate.lr_factor == pytest.approx(factor)
    assert rate.gradients["bias"] is gradients["bias"]


def test_concurrency_counts_rounds_of_all_ranks() -> None:
    assert build_gate("concurrency").decide(push(), context(4, pushes_per_version=2)).weight == 0.5


def test_drop() -> None:
    gate = build_gate("drop", limit=3)
    assert not gate.decide(push(), context(3)).rejected
    assert gate.decide(push(), context(4)).reason == "staleness 4 is above limit=3"
    default = build_gate("drop")
    assert not default.decide(push(), context(8)).rejected
    assert default.decide(push(), context(9)).rejected


def test_dc_is_the_published_formula() -> None:
    gate = build_gate("dc", strength=2.0, decay=0.95)
    now, then, mean = push(5), push(9), torch.zeros(24)
    for step in range(3):
        g = push(20 + step)
        mean = 0.95 * mean + 0.05 * g["bias"].square()
        expected = g["bias"] + 2.0 / (mean + 1e-7).sqrt() * g["bias"].square() * (now["bias"] - then["bias"])
        assert torch.allclose(gate.decide(g, context()).gradients["bias"], expected, rtol=1e-5)


def test_dc_does_not_send_what_overflows() -> None:
    far = {name: torch.full_like(weight, 1e38) for name, weight in push().items()}
    decision = build_gate("dc").decide({n: g * 1e3 for n, g in push().items()}, context(weights=far))
    assert decision.rejected
    assert "compensated" in decision.reason


def test_cosine_energy_and_weight() -> None:
    gate = build_gate("cosine", beta=1.0, reference_decay=0.5)
    first, second = push(1), push(2)
    assert gate.decide(first, context()).energy == 0.0
    flat = [torch.cat([tensor.flatten() for tensor in g.values()]).double() for g in (first, second)]
    cosine = float(torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0))
    decision = gate.decide(second, context(8))
    assert decision.energy == pytest.approx(4 / 3 * (1 - cosine))
    assert decision.weight == pytest.approx(vacuum_weight(decision.energy * 2.0, [1.0], 1.0))
    assert torch.allclose(decision.gradients["wide"], second["wide"] * decision.weight)
    opposed = build_gate("cosine", reference_decay=0.0)
    opposed.decide(first, context())
    assert opposed.decide({n: -g for n, g in first.items()}, context()).energy == pytest.approx(8 / 3)


def test_zeno_accepts_what_a_held_out_gradient_agrees_with() -> None:
    gate = build_gate("zeno", rho=0.0, epsilon=0.0, refresh=2)
    along = {name: weight.clone() for name, weight in push(5).items()}  # the held-out gradient is the weights
    assert not gate.decide(along, context()).rejected
    elsewhere = context(weights={name: -weight for name, weight in push(5).items()})
    assert not gate.decide(along, elsewhere).rejected  # judged by the held-out gradient of before
    assert gate.decide(along, elsewhere).rejected
    assert build_gate("zeno", rho=1.0, epsilon=0.0).decide(along, context()).rejected  # 0.1|g|² < 1·|g|²
    with pytest.raises(ConfigurationError, match="gate 'zeno' without weights and evaluate"):
        build_gate("zeno").decide(along, GateContext())


def test_ssp_waits_for_the_slowest() -> None:
    gate = build_gate("ssp", bound=2)
    assert [gate.may_begin(lead) for lead in range(4)] == [True, True, True, False]
    assert build_gate("none").may_begin(1000)


def test_dana_is_nesterov_momentum_of_the_rank() -> None:
    torch.manual_seed(0)
    start = torch.randn(24)
    mine, theirs = start.clone(), torch.nn.Parameter(start.clone())
    gate, optimizer = build_gate("dana", momentum=0.9), torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=True)
    for step in range(4):
        gradient = noise(24, seed=step)
        theirs.grad = gradient.clone()
        optimizer.step()
        mine -= 0.1 * gate.decide({"w": gradient}, context()).gradients["w"]
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_predict_extrapolates_the_steps_of_the_server() -> None:
    gate = build_gate("predict", decay=0.0)
    weights = {"w": torch.zeros(3)}
    assert gate.look_ahead(weights, 0) is weights
    gate.decide({"w": torch.ones(3)}, context(5))
    ahead = gate.look_ahead({"w": torch.full((3,), 4.0)}, 2)  # two units a version, five versions ahead
    assert ahead["w"].tolist() == [14.0, 14.0, 14.0]


def test_energy_only_looks_at_no_age() -> None:
    young, old = (build_gate("g2_energy_only", scale="unit", beta=1.0).decide(push(), context(t)) for t in (1, 99))
    assert young.block_weight == old.block_weight
    assert young.block_weight["wide"] == pytest.approx(local_weight(young.block_energy["wide"], 1.0))


def test_shuffled_energies_are_those_of_other_pushes() -> None:
    gate, plain = build_gate("g2_shuffled", scale="unit"), build_gate("g2", scale="unit")
    own, drawn = [], []
    for step in range(30):
        gradients = push(3 * step)
        drawn.append(gate.decide(gradients, context()).block_energy["wide"])
        own.append(plain.decide(gradients, context()).block_energy["wide"])
    assert drawn[0] == own[0]
    assert set(drawn) <= set(own)
    assert all(drawn[i] in own[:i] for i in range(1, 30))


@pytest.mark.parametrize("block", ["wide", "tall"])
def test_a_random_subspace_takes_out_as_much_as_the_ridge(block: str) -> None:
    options = {"weight_rule": "constant", "constant": 0.25, "beta": 1.0}
    plain, control = build_gate("g2", **options), build_gate("g2_random_subspace", **options)
    for step in range(3):
        gradients = push(step, torch.float64)
        removed = [gradients[block] - gate.decide(gradients, context()).gradients[block] for gate in (plain, control)]
        assert float(removed[1].norm()) == pytest.approx(float(removed[0].norm()), rel=1e-6)
        assert not torch.allclose(removed[0], removed[1], atol=1e-2)


@pytest.mark.parametrize("name", ["predict", "ssp", "zeno"])
def test_rules_that_only_a_simulation_can_run_are_refused_elsewhere(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"gate='{name}': must be a rule that a real run .*simulate"):
        G2RoutingCallback(name)


def test_a_rule_from_outside_that_needs_an_evaluation_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Curious(type(build_gate("none"))):  # type: ignore[misc]
        needs = frozenset({"evaluate"})

    monkeypatch.setitem(registry._GATES, "curious", Curious)
    with pytest.raises(ConfigurationError, match=r"gate='curious': must be a rule .* \(it needs an evaluation\)"):
        G2RoutingCallback("curious")


@pytest.mark.parametrize("name", [n for n in available_gates() if n not in ("predict", "ssp", "zeno")])
def test_all_other_rules_go_into_a_callback(name: str) -> None:
    assert isinstance(G2RoutingCallback(name).gate, Gate)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("polynomial", {"exponent": -1.0}, "exponent=-1.0: must be ≥ 0"),
        ("inverse", {"scales": "step"}, "scales='step': must be one of gradient, lr"),
        ("drop", {"limit": -1}, "limit=-1: must be ≥ 0"),
        ("dc", {"decay": 1.0}, r"decay=1.0: must lie in \[0, 1\)"),
        ("dana", {"momentum": 1.0}, r"momentum=1.0: must lie in \[0, 1\)"),
        ("ssp", {"bound": -1}, "bound=-1: must be ≥ 0"),
        ("zeno", {"refresh": 0}, "refresh=0: must be ≥ 1"),
        ("g2_shuffled", {"gamma": 1.0}, "gamma=1.0: an option of gate 'g2_shuffled' must be one of frame, scale"),
        ("inverse", {"exponent": 1.0}, "exponent=1.0: an option of gate 'inverse' must be one of scales"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_gate(name, **options)
