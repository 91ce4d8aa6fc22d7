"""Whose weights a gradient belongs to, against gradients worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_g2.decoupled import DecoupledOptions, DecoupledRunner, GradientUpdate, LocalApply, TurnScheduler

X = torch.tensor([[1.0, -2.0], [0.5, 1.5], [2.0, 1.0]], dtype=torch.float64)
T = torch.tensor([[1.0], [-1.0], [0.5]], dtype=torch.float64)
LR = 0.05


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1, bias=False)).double()


def _cost(which: str, layer: int) -> float:
    """The forward pass of the second batch is over before the first update of the first."""
    return 1.0 if which == "forward" else 10.0


def _run(**options) -> tuple[nn.Sequential, list[GradientUpdate]]:
    net = _net()
    chosen = DecoupledOptions(forward_threads=1, backward_threads=1, max_graphs=2, **options)
    local = LocalApply(torch.optim.SGD(net.parameters(), lr=LR), dict(net.named_parameters()), chosen)
    updates: list[GradientUpdate] = []

    def apply(update: GradientUpdate) -> None:
        updates.append(update)
        local(update)

    def loss(module: nn.Module, n: int) -> Tensor:
        return (module(X[n : n + 1]) - T[n]).square().sum() / 2

    with DecoupledRunner(net, loss, apply, chosen, scheduler=TurnScheduler(_cost)) as runner:
        for n in range(2):
            runner.submit(n)
    return net, updates


def _expected(weights: str, update: str = "layer") -> list[tuple[str, Tensor]]:
    """What the second batch brings: activations of the first weights, backward weights as they are by then."""
    first, second = (p.detach().clone() for p in _net().parameters())
    hidden = [X[n : n + 1] @ first.T for n in range(2)]
    error = [hidden[n] @ second.T - T[n] for n in range(2)]
    moved_second = second - LR * error[0].T @ hidden[0]
    on_the_way_back = second if weights == "stashed" else moved_second
    of_first = [(error[0] @ second).T @ X[0:1], (error[1] @ on_the_way_back).T @ X[1:2]]
    rows = []
    for n in range(2):
        rows += [("1.weight", error[n].T @ hidden[n]), ("0.weight", of_first[n])]
    return rows


@pytest.mark.parametrize("weights", ["current", "stashed"])
def test_gradient_is_the_one_worked_out_by_hand(weights):
    _, updates = _run(weights=weights)
    expected = _expected(weights)
    assert [next(iter(u.gradients)) for u in updates] == [name for name, _ in expected]
    for update, (name, gradient) in zip(updates, expected, strict=True):
        torch.testing.assert_close(update.gradients[name], gradient, rtol=1e-12, atol=1e-12)


def test_current_and_stashed_differ_in_the_first_layer_alone():
    current, stashed = _expected("current"), _expected("stashed")
    assert not torch.allclose(current[3][1], stashed[3][1])
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(current[:3], stashed[:3], strict=True))


def test_update_says_where_it_comes_from():
    _, updates = _run()
    assert [u.layers for u in updates] == [("1",), ("0",), ("1",), ("0",)]
    assert [u.sequence for u in updates] == [0, 1, 2, 3]
    assert [u.batch for u in updates] == [0, 0, 1, 1]
    assert {u.lane for u in updates} == {0}
    assert [tuple(u.base_versions.values()) for u in updates] == [(0,)] * 4
    assert [tuple(u.ages.values()) for u in updates] == [(0,), (0,), (1,), (1,)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_updates_carry_the_stamp_of_their_forward_pass(accumulate):
    """With the order of test_gradient: both forward passes are over before the first update."""
    net, stamps = _net(), iter(range(100))
    updates: list[GradientUpdate] = []
    chosen = DecoupledOptions(backward_threads=1, max_graphs=2, accumulate=accumulate)
    with DecoupledRunner(
        net,
        lambda m, x: m(x).sum(),
        updates.append,
        chosen,
        scheduler=TurnScheduler(_cost),
        stamp=lambda _: next(stamps),
    ) as runner:
        for _ in range(4):
            runner.submit(X)
    assert [u.stamp for u in updates] == ([0, 0, 1, 1, 2, 2, 3, 3] if accumulate == 1 else [0, 0, 1, 1])


def test_block_update_comes_whole():
    net, updates = _run(update="block", weights="stashed")
    assert [u.layers for u in updates] == [("0", "1"), ("0", "1")]
    reference = _net()
    for _, gradient in [row for row in _expected("stashed") if row[0] == "0.weight"]:
        reference[0].weight.data.sub_(LR * gradient)
    torch.testing.assert_close(net[0].weight, reference[0].weight, rtol=1e-12, atol=1e-12)


def test_weights_of_a_forward_pass_may_change_before_its_backward_pass():
    """No version check trips, also with batch normalisation and with a tanh that saves its output."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).double()
    chosen = DecoupledOptions(backward_threads=2, max_graphs=6)
    local = LocalApply(torch.optim.AdamW(net.parameters()), dict(net.named_parameters()), chosen)
    ages: list[int] = []

    def apply(update: GradientUpdate) -> None:
        ages.extend(update.ages.values())
        local(update)

    with DecoupledRunner(
        net, lambda m, x: m(x).square().mean(), apply, chosen, scheduler=TurnScheduler(_cost)
    ) as runner:
        for _ in range(12):
            runner.submit(X)
    assert max(ages) >= 3
    assert net[1].num_batches_tracked == 12
    assert all(p.isfinite().all() for p in net.parameters())


def _reference_of_pipemare() -> tuple[Tensor, Tensor]:
    """The second batch's gradients under PipeMare: drift is (1 - D)·Δw after one update, one version is made good."""
    first, second = (p.detach().clone() for p in _net().parameters())
    hidden = [X[n : n + 1] @ first.T for n in range(2)]
    error = [hidden[n] @ second.T - T[n] for n in range(2)]
    moved = -LR * error[0].T @ hidden[0]
    back = second + moved - 1 * (1 - 0.135) * moved
    return error[1].T @ hidden[1], (error[1] @ back).T @ X[1:2]


def test_pipemare_sets_backward_weights_back_by_their_drift():
    _, updates = _run(correction="pipemare", correction_steps=10)
    of_second, of_first = _reference_of_pipemare()
    torch.testing.assert_close(updates[2].gradients["1.weight"], of_second, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(updates[3].gradients["0.weight"], of_first, rtol=1e-12, atol=1e-12)
    assert all(rate == 1.0 for u in updates for rate in u.rates.values())  # ages up to 1 are no delay


def test_pipemare_lowers_the_rate_of_delayed_layers_at_first():
    net = _net()
    chosen = DecoupledOptions(backward_threads=1, max_graphs=8, correction="pipemare", correction_steps=400)
    rates: list[float] = []
    with DecoupledRunner(
        net,
        lambda m, x: m(x).square().mean(),
        lambda u: rates.extend(u.rates.values()),
        chosen,
        scheduler=TurnScheduler(_cost),
    ) as runner:
        for _ in range(450):
            runner.submit(X)
    assert min(rates) < 0.45  # age 7, power falling
    assert rates[-1] == 1.0
