"""Staleness, throughput and memory under the deterministic scheduler: the same threads, in modelled time."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from lightning_g2.decoupled import DecoupledOptions, DecoupledRunner, LocalApply, RunReport, TurnScheduler
from lightning_g2.errors import G2Error

BETA = 2.0


def _cost(layers: int, spread: float = 0.5, seed: int = 0):
    """A forward pass takes about one second, a backward pass β; spread mixes the threads' phases."""
    draw = random.Random(seed)
    return lambda which, layer: draw.uniform(1 - spread, 1 + spread) * (1 if which == "forward" else BETA) / layers


def _run(layers: int, batches: int, *, spread: float = 0.5, **options) -> RunReport:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(1, 1) for _ in range(layers)])
    chosen = DecoupledOptions(**options)
    apply = LocalApply(torch.optim.SGD(net.parameters(), lr=1e-3), dict(net.named_parameters()), chosen)
    scheduler = TurnScheduler(_cost(layers, spread))
    with DecoupledRunner(net, _loss, apply, chosen, scheduler=scheduler) as runner:
        for _ in range(batches):
            runner.submit(torch.ones(1, 1))
    return runner.report


def _loss(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


@pytest.mark.parametrize("layers", [2, 4, 8, 16])
def test_layerwise_over_block_staleness(layers):
    """(M-1)/(2M) within 10%: what lies in the backward pass, with equal threads."""
    threads = {"forward_threads": 3, "backward_threads": 4}
    layerwise = _run(layers, 250, update="layer", **threads)
    block = _run(layers, 120, update="block", **threads)
    assert block.lag_mean == pytest.approx(3.0, rel=0.05)  # each other thread once
    assert layerwise.lag_mean / block.lag_mean == pytest.approx((layers - 1) / (2 * layers), rel=0.1)
    assert layerwise.age_mean > layerwise.lag_mean
    lags = [sum(k * n for k, n in lag.items()) / sum(lag.values()) for lag in layerwise.lags().values()]
    assert lags[-1] == 0.0  # the last layer is the first to be reached
    assert lags[0] == max(lags)


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1)])
def test_throughput_is_what_the_threads_allow(forward, backward):
    report = _run(4, 60, forward_threads=forward, backward_threads=backward)
    serial = 60 * (1 + BETA)
    ideal = (1 + BETA) / max(1 / forward, BETA / backward)
    assert serial / report.elapsed_s >= 0.9 * ideal
    assert report.peak_graphs <= forward + backward + (backward >= 2 * forward)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_surplus_forwards_wait_and_none_is_dropped(limit):
    report = _run(2, 30, forward_threads=3, backward_threads=1, max_graphs=limit)
    assert report.batches == 30
    assert report.peak_graphs == limit


def test_a_run_is_the_same_every_time():
    one, other = (_run(3, 40, forward_threads=2, backward_threads=3) for _ in range(2))
    assert one.ages() == other.ages()
    assert one.elapsed_s == other.elapsed_s
    assert 0.0 < one.mixed_reads <= 1.0


def test_forwards_read_one_version_when_they_take_turns():
    report = _run(3, 10, forward_threads=1, backward_threads=1, max_graphs=1)
    assert report.mixed_reads == 0.0
    assert report.age_mean == 0.0
    assert report.utilisation("forward") + report.utilisation("backward") == pytest.approx(1.0)


def test_hogwild_walks_back_in_the_forward_threads():
    report = _run(2, 40, forward_threads=4, backward_threads=0, update="block")
    assert report.peak_graphs == 4
    # Three others update in a cycle of three seconds; a layer is read half a second or a second after its start.
    assert report.age_mean == pytest.approx(2.25, rel=0.15)
    assert report.utilisation("forward") + report.utilisation("backward") == pytest.approx(1.0, abs=0.1)


def test_threads_that_all_wait_are_an_error():
    scheduler = TurnScheduler(lambda which, layer: 1.0)
    with pytest.raises(G2Error, match="none can go on"):
        scheduler.wait_for(lambda: False)
