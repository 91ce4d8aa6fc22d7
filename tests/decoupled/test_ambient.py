"""Settings of the submitting thread hold in the threads, in both passes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_g2.decoupled import DecoupledOptions, DecoupledRunner, free_threaded


class _Spy(torch.autograd.Function):
    """Notes the settings of the thread that runs each pass."""

    seen: list[tuple[object, ...]] = []  # noqa: RUF012 - shared on purpose

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        _Spy.seen.append(("forward", *_settings()))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        _Spy.seen.append(("backward", *_settings()))
        return gradient


def _settings() -> tuple[object, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_device().type,
        torch.is_anomaly_enabled(),
        torch.is_autocast_cache_enabled(),
    )


def _loss(module: nn.Module, x: Tensor) -> Tensor:
    return _Spy.apply(module(x)).float().sum()


def _run(submit_within=None) -> list[tuple[object, ...]]:
    _Spy.seen.clear()
    with DecoupledRunner(nn.Linear(2, 2), _loss, lambda update: None, DecoupledOptions()) as runner:
        for _ in range(2):
            if submit_within is None:
                runner.submit(torch.ones(2, 2))
            else:
                with submit_within():
                    runner.submit(torch.ones(2, 2, device="cpu"))
    return list(_Spy.seen)


def test_autocast_is_carried_along():
    seen = _run(lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False))
    assert sorted(row[0] for row in seen) == ["backward"] * 2 + ["forward"] * 2
    assert {row[1:3] for row in seen} == {(True, torch.bfloat16)}
    assert {row[5] for row in seen} == {False}
    assert {row[1] for row in _run()} == {False}


def test_default_device_is_carried_along():
    seen = _run(lambda: torch.device("meta"))
    assert {row[3] for row in seen if row[0] == "forward"} == {"meta"}
    with torch.device("meta"):  # torch itself leaves the mode for the length of a backward pass
        _loss(nn.Linear(2, 2), torch.ones(2, 2)).backward()
    assert {row[3] for row in seen if row[0] == "backward"} == {_Spy.seen[-1][3]}
    assert {row[3] for row in _run()} == {"cpu"}


def test_anomaly_mode_is_the_processs():
    with torch.autograd.set_detect_anomaly(True):
        assert {row[4] for row in _run()} == {True}
    assert {row[4] for row in _run()} == {False}


def test_without_gradient_mode_nothing_is_learned():
    updates: list[object] = []
    with (
        torch.no_grad(),
        DecoupledRunner(nn.Linear(2, 2), lambda m, x: m(x).sum(), updates.append, DecoupledOptions()) as runner,
    ):
        runner.submit(torch.ones(2, 2))
    assert updates == []
    assert runner.report.skipped == 1


def test_free_threading_is_reported():
    with DecoupledRunner(nn.Linear(2, 2), _loss, lambda update: None) as runner:
        pass
    assert runner.report.free_threaded is free_threaded()
