"""Bias and stationary law on a quadratic: f(w) = α w²/2, gradients α w + ξ, one delay for all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from lightning_g2.decoupled import DecoupledOptions, DecoupledRunner, GradientUpdate, LocalApply, TurnScheduler


class Quadratic(nn.Module):
    """Linear in the weights, so that a late gradient is one of the forward pass's weights."""

    def __init__(self, size: int, curvature: float, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), start, dtype=torch.float64))
        self.root = math.sqrt(curvature)

    def forward(self, noise: Tensor) -> Tensor:
        y = self.weight * self.root
        return (y.square() / 2 + y * noise / self.root).sum()


def _train(model: Quadratic, rate: float, delay: int, noises: list[Tensor], watch=None) -> list[Tensor]:
    """Weights before each update, at a delay of ``delay`` versions once the pipe is full."""
    options = DecoupledOptions(forward_threads=1, backward_threads=1, max_graphs=delay + 1)
    local = LocalApply(torch.optim.SGD(model.parameters(), lr=rate), dict(model.named_parameters()), options)
    path: list[Tensor] = []

    def apply(update: GradientUpdate) -> None:
        path.append(model.weight.detach().clone())
        if watch is not None:
            watch(update, path[-1])
        local(update)

    scheduler = TurnScheduler(lambda which, layer: 0.01 if which == "forward" else 1.0)
    with DecoupledRunner(model, lambda m, x: m(x), apply, options, scheduler=scheduler) as runner:
        for noise in noises:
            runner.submit(noise)
    return [*path, model.weight.detach().clone()]


def _noises(size: int, steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(size, dtype=torch.float64, generator=generator) for _ in range(steps)]


@pytest.mark.parametrize("delay", [1, 3, 7])
@pytest.mark.parametrize("product", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("curvature", [0.5, 4.0])
def test_bias_stays_below_its_bound(curvature, product, delay):
    """|b| ≤ G·αητ/(1-αητ) with G the largest gradient and τ the largest age that were seen."""
    rate = product / (curvature * delay)
    noises = _noises(1, 40)
    largest = {"bias": 0.0, "gradient": 0.0, "age": 0}

    def watch(update: GradientUpdate, now: Tensor) -> None:
        noise = noises[update.batch]
        bias = update.gradients["weight"] - noise - curvature * now
        for name, value in (("bias", bias), ("gradient", curvature * now + noise)):
            largest[name] = max(largest[name], float(value.abs().max()))
        largest["age"] = max(largest["age"], *update.ages.values())

    _train(Quadratic(1, curvature, 3.0), rate, delay, noises, watch)
    assert largest["age"] == delay
    share = curvature * rate * largest["age"]
    assert share == pytest.approx(product)
    bound = largest["gradient"] * share / (1 - share)
    assert 0.02 * bound < largest["bias"] <= bound


def _variance(curvature: float, rate: float, delay: int) -> float:
    """Stationary variance of w' = w - η(α w_τ + ξ), ξ ~ N(0, 1): the Lyapunov equation of its companion matrix."""
    size = delay + 1
    step = torch.zeros(size, size, dtype=torch.float64)
    step[0, 0] = 1.0
    step[0, delay] -= rate * curvature
    for row in range(1, size):
        step[row, row - 1] = 1.0
    noise = torch.zeros(size, size, dtype=torch.float64)
    noise[0, 0] = rate**2
    system = torch.eye(size * size, dtype=torch.float64) - torch.kron(step, step)
    return float(torch.linalg.solve(system, noise.flatten())[0])


def _divergence(rate: float, delay: int) -> float:
    """KL of the delayed stationary law from plain SGD's; both are centred Gaussians."""
    ratio = _variance(1.0, rate, delay) / _variance(1.0, rate, 0)
    return (ratio - 1 - math.log(ratio)) / 2


def _exponent(xs: Sequence[float], ys: list[float]) -> float:
    x, y = (torch.tensor(v, dtype=torch.float64).log() for v in (xs, ys))
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum())


def test_divergence_of_the_stationary_law_scales_as_the_square_of_rate_and_delay():
    rates = [0.001, 0.002, 0.004, 0.008]
    assert _exponent(rates, [_divergence(rate, 4) for rate in rates]) == pytest.approx(2.0, abs=0.15)
    delays = [2, 4, 8, 16]
    assert _exponent(delays, [_divergence(0.002, delay) for delay in delays]) == pytest.approx(2.0, abs=0.15)
    assert _variance(1.0, 0.1, 0) == pytest.approx(0.1 / (2 - 0.1))  # SGD's, in closed form


@pytest.mark.parametrize("delay", [0, 4])
def test_the_threads_have_that_stationary_law(delay):
    rate, size = 0.1, 4000
    path = _train(Quadratic(size, 1.0, 0.0), rate, delay, _noises(size, 160))
    measured = torch.stack(path[60::10]).square().mean()
    assert float(measured) == pytest.approx(_variance(1.0, rate, delay), rel=0.03)


def test_the_threads_make_exactly_the_delayed_recursion():
    curvature, rate, delay = 2.0, 0.05, 3
    noises = _noises(2, 25)
    path = _train(Quadratic(2, curvature, 1.0), rate, delay, noises)
    weights = [torch.full((2,), 1.0, dtype=torch.float64)]
    for step, noise in enumerate(noises):
        weights.append(weights[-1] - rate * (curvature * weights[max(0, step - delay)] + noise))
    torch.testing.assert_close(torch.stack(path), torch.stack(weights), rtol=1e-12, atol=1e-12)
