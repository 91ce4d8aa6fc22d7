from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from lightning_g2.callbacks.straggler import StragglerCallback
from lightning_g2.errors import ConfigurationError

MODULE = SimpleNamespace(device=torch.device("cpu"))


def trainer(*, rank: int = 1, step: int = 0, world_size: int = 2) -> SimpleNamespace:
    return SimpleNamespace(global_rank=rank, global_step=step, world_size=world_size)


class Clock:
    """CPU time that passes only when told, and a sleep that takes none of it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def thread_time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lightning_g2.callbacks.straggler.time", clock)
    return clock


def batch(callback: StragglerCallback, job: SimpleNamespace, clock: Clock, *, forward_s=0.0, backward_s=0.0) -> None:
    callback.on_train_batch_start(job, MODULE, None, 0)
    clock.now += forward_s
    callback.on_before_backward(job, MODULE, torch.zeros(()))
    clock.now += backward_s
    callback.on_after_backward(job, MODULE)
    clock.now += 100.0  # optimizer, logging: not counted


def test_a_fixed_sleep(clock):
    callback = StragglerCallback(rank=1, seconds=0.05)
    batch(callback, trainer(), clock)
    assert clock.slept == [0.05]
    assert callback.slept_s == 0.05


def test_a_factor_multiplies_the_compute_time_from_the_second_batch_on(clock):
    callback = StragglerCallback(rank=1, factor=4)
    for _ in range(2):
        batch(callback, trainer(), clock, forward_s=1.0, backward_s=2.0)
    assert clock.slept == [0.0, pytest.approx(9.0)]


def test_one_odd_batch_does_not_change_the_sleep(clock):
    callback = StragglerCallback(rank=1, factor=2)
    for backward_s in (1.0, 50.0, 1.0):
        batch(callback, trainer(), clock, backward_s=backward_s)
    assert callback.delay_s() == pytest.approx(1.0)


def test_waiting_for_others_is_not_multiplied():
    callback = StragglerCallback(rank=1, factor=4)
    callback.on_train_batch_start(trainer(), MODULE, None, 0)
    callback.on_before_backward(trainer(), MODULE, torch.zeros(()))
    time.sleep(0.2)  # as in an all-reduce
    callback.on_after_backward(trainer(), MODULE)
    assert callback.delay_s() < 0.1


def test_other_ranks_are_left_alone(clock):
    callback = StragglerCallback(rank=1, seconds=1.0)
    batch(callback, trainer(rank=0), clock)
    assert clock.slept == []


def test_it_slows_only_the_named_steps(clock):
    callback = StragglerCallback(rank=1, seconds=0.001, from_step=2, to_step=4)
    slept = []
    for step in range(6):
        before = len(clock.slept)
        batch(callback, trainer(step=step), clock)
        slept.append(len(clock.slept) > before)
    assert slept == [False, False, True, True, False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"factor=None, seconds=None: exactly one"),
        ({"factor": 2.0, "seconds": 1.0}, r"factor=2.0, seconds=1.0: exactly one"),
        ({"factor": 0.5}, r"factor=0.5: must be ≥ 1"),
        ({"factor": float("inf")}, r"factor=inf: must be ≥ 1"),
        ({"seconds": -1.0}, r"seconds=-1.0: must be ≥ 0"),
        ({"rank": -1, "factor": 2.0}, r"rank=-1: must be ≥ 0"),
        ({"factor": 2.0, "from_step": -1}, r"from_step=-1: must be ≥ 0"),
        ({"factor": 2.0, "from_step": 3, "to_step": 3}, r"to_step=3: must be > from_step=3"),
    ],
)
def test_a_bad_option_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        StragglerCallback(**options)


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(ConfigurationError, match=r"rank=2: must be < 2, the number of ranks"):
        StragglerCallback(rank=2, factor=2.0).setup(trainer(world_size=2), MODULE, "fit")


def test_a_job_of_one_rank_has_no_straggler():
    StragglerCallback(rank=1, factor=2.0).setup(trainer(rank=0, world_size=1), MODULE, "fit")
