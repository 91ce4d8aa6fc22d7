"""Stability limits on the delayed quadratic, as the simulator runs it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_g2.simulate.stability import delayed_sgd_limit, is_stable, largest_stable_rate

MARGIN = 0.01


@pytest.mark.parametrize(("delay", "limit"), [(0, 2.0), (1, 1.0), (2, 0.618), (4, 0.3473), (8, 0.18454), (16, 0.09516)])
def test_plain_sgd_is_stable_up_to_the_exact_limit(delay: int, limit: float) -> None:
    assert delayed_sgd_limit(delay) == pytest.approx(limit, rel=1e-3)
    exact = delayed_sgd_limit(delay)
    assert is_stable(exact * (1 - MARGIN), delay=delay)
    assert not is_stable(exact * (1 + MARGIN), delay=delay)


def test_the_limit_is_found_by_bisection() -> None:
    found = largest_stable_rate(delay=2, eigenvalues=(4.0,), tolerance=MARGIN)
    assert found == pytest.approx(delayed_sgd_limit(2) / 4, rel=MARGIN)
    refusing = ("zeno", {"rho": 1e9, "epsilon": 0.0})
    assert largest_stable_rate(delay=2, gate=refusing) == math.inf  # nothing is ever sent


def dana_matrix(rate: float, delay: int, momentum: float) -> Tensor:
    """One push of DANA-Slim on ½w²: the state is w now and before, then the ranks' velocities, latest first."""
    ranks = delay + 1
    matrix = torch.zeros(2 * ranks, 2 * ranks, dtype=torch.float64)
    matrix[0, 0] = 1.0
    matrix[0, delay] -= rate * (1 + momentum)
    matrix[0, 2 * ranks - 1] = -rate * momentum**2
    matrix[ranks, delay] = 1.0
    matrix[ranks, 2 * ranks - 1] = momentum
    for i in range(1, ranks):
        matrix[i, i - 1] = matrix[ranks + i, ranks + i - 1] = 1.0
    return matrix


def predict_matrix(rate: float, delay: int, decay: float) -> Tensor:
    """One push on predicted weights: the state is w now and before, then the ranks' mean steps at their reads."""
    ranks, size = delay + 1, 2 * (delay + 1)
    matrix = torch.zeros(2 * size, 2 * size, dtype=torch.float64)
    matrix[0, 0] = 1.0
    matrix[0, delay] -= rate
    matrix[0, size + delay] = -rate * delay
    # The mean step of the read after this push looks back to the same rank's read, a round ago.
    matrix[size] += (1 - decay) / ranks * matrix[0]
    matrix[size, ranks - 1] -= (1 - decay) / ranks
    matrix[size, size + ranks - 1] += decay
    for i in range(1, size):
        matrix[i, i - 1] = matrix[size + i, size + i - 1] = 1.0
    return matrix


def exact(matrix: Callable[[float], Tensor]) -> float:
    low, high = 0.0, 4.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        radius = float(torch.linalg.eigvals(matrix(middle)).abs().max())
        low, high = (middle, high) if radius <= 1.0 else (low, middle)
    return low


DELAY = 4
PLAIN = delayed_sgd_limit(DELAY)


@pytest.mark.parametrize(
    ("gate", "limit"),
    [
        ("inverse", PLAIN * DELAY),
        ("concurrency", PLAIN),
        (("polynomial", {"exponent": 0.5}), PLAIN * (1 + DELAY) ** 0.5),
        (("drop", {"limit": DELAY}), PLAIN),
        (("drop", {"limit": 1}), delayed_sgd_limit(1)),  # two of the ranks are left, and take turns
        (("ssp", {"bound": 1}), PLAIN),
        (("dana", {"momentum": 0.5}), exact(lambda rate: dana_matrix(rate, DELAY, 0.5))),
        (("predict", {"decay": 0.5}), exact(lambda rate: predict_matrix(rate, DELAY, 0.5))),
    ],
)
def test_linear_rules_are_stable_up_to_their_exact_limits(gate: Any, limit: float) -> None:
    assert is_stable(limit * (1 - MARGIN), delay=DELAY, gate=gate)
    assert not is_stable(limit * (1 + MARGIN), delay=DELAY, gate=gate)


def test_the_g2_gate_is_stable_where_plain_sgd_is_not() -> None:
    options: dict[str, Any] = {"delay": DELAY, "eigenvalues": [2.0**-i for i in range(8)], "columns": 8}
    assert not is_stable(1.7 * PLAIN, **options)
    assert is_stable(1.7 * PLAIN, gate="g2", **options)
