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


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def batch(callback: StragglerCallback, job: SimpleNamespace, *, compute_s: float = 0.0, wait_s: float = 0.0) -> float:
    """Wall time of one batch that computes, and waits in its backward as under an all-reduce."""
    start = time.perf_counter()
    callback.on_train_batch_start(job, MODULE, None, 0)
    compute(compute_s / 2)
    callback.on_before_backward(job, MODULE, torch.zeros(()))
    compute(compute_s / 2)
    time.sleep(wait_s)
    callback.on_after_backward(job, MODULE)
    return time.perf_counter() - start


def test_a_fixed_sleep():
    callback = StragglerCallback(rank=1, seconds=0.05)
    assert batch(callback, trainer()) >= 0.05
    assert callback.slept_s == pytest.approx(0.05)


def test_a_factor_multiplies_the_compute_time():
    callback = StragglerCallback(rank=1, factor=4)
    batch(callback, trainer(), compute_s=0.02)
    assert callback.slept_s == 0.0
    batch(callback, trainer(), compute_s=0.02)
    assert callback.slept_s == pytest.approx(3 * 0.02, rel=0.2)


def test_waiting_for_others_is_not_multiplied():
    callback = StragglerCallback(rank=1, factor=4)
    for _ in range(2):
        batch(callback, trainer(), compute_s=0.01, wait_s=0.1)
    assert callback.slept_s == pytest.approx(3 * 0.01, rel=0.3)


def test_one_odd_batch_does_not_change_the_sleep():
    callback = StragglerCallback(rank=1, factor=2)
    for compute_s in (0.01, 0.2, 0.01):
        batch(callback, trainer(), compute_s=compute_s)
    assert callback.delay_s() == pytest.approx(0.01, rel=0.3)


def test_other_ranks_are_left_alone():
    callback = StragglerCallback(rank=1, seconds=1.0)
    assert batch(callback, trainer(rank=0)) < 0.5
    assert callback.slept_s == 0.0


def test_it_slows_only_the_named_steps():
    callback = StragglerCallback(rank=1, seconds=0.001, from_step=2, to_step=4)
    slept = []
    for step in range(6):
        before = callback.slept_s
        batch(callback, trainer(step=step))
        slept.append(callback.slept_s > before)
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
