from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_g2.strategy.ddp import AllReduceIdleMeter


@pytest.fixture
def model():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    yield DistributedDataParallel(torch.nn.Linear(3, 2))
    dist.destroy_process_group()


def backward(model: torch.nn.Module) -> None:
    model(torch.ones(4, 3)).square().sum().backward()


def test_the_gradient_is_what_it_is_without_the_meter(model):
    AllReduceIdleMeter(model)
    backward(model)
    measured = model.module.weight.grad.clone()
    model.module.zero_grad()
    backward(model.module)
    torch.testing.assert_close(measured, model.module.weight.grad)


def test_time_counts_from_the_last_gradient_to_the_end_of_the_backward(model):
    meter = AllReduceIdleMeter(model)
    time.sleep(0.05)  # before the gradients: computing
    start = time.perf_counter()
    backward(model)
    time.sleep(0.02)  # as if the all-reduce took so long
    meter.backward_ended()
    assert 0.02 <= meter.seconds() <= time.perf_counter() - start


def test_a_backward_without_all_reduce_adds_nothing(model):
    meter = AllReduceIdleMeter(model)
    with model.no_sync():
        backward(model)
    meter.backward_ended()
    assert meter.seconds() == 0.0
