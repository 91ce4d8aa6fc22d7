"""Gloo's all-reduce, which transports are compared with."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch import Tensor


def join(*, rank: int, ranks: int) -> None:
    """Join the ranks that reduce, at MASTER_ADDR and MASTER_PORT of the environment; rank 0 hosts the store there."""
    dist.init_process_group("gloo", rank=rank, world_size=ranks)


def timed_all_reduce(buffer: Tensor) -> float:
    """Sum a buffer over all ranks, which start together; returns the seconds that it takes from there."""
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(buffer)
    return time.perf_counter() - start
