"""DDP, the strategy that g2async is compared with, with a meter for how long a rank waits for the others."""

import time
from collections import deque
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


class AllReduceIdleMeter:
    """Adds up the time between a rank's last local gradient and the end of its all-reduce.

    A communication hook marks the moment when a bucket's local gradient is ready and then does what DDP does without
    a hook. What passes after the last mark until the backward returns is spent waiting for slower ranks and for the
    transfer itself. On CUDA both moments are events on the compute stream, read without stalling it.

    Args:
        model: the wrapped module; it must not have a communication hook yet.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._on_cuda = model.device_type == "cuda"
        self._mark: float | torch.cuda.Event | None = None
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0
        model.register_comm_hook(None, self._hook)

    # DDP compares these annotations with the classes themselves, hence no postponed annotations in this file.
    def _hook(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self._mark = self._now()  # later buckets overwrite it: the last one counts
        return allreduce_hook(state, bucket)

    def backward_ended(self) -> None:
        """Call when the backward has returned; without an all-reduce (accumulation) it adds nothing."""
        mark, self._mark = self._mark, None
        if isinstance(mark, float):
            self._seconds += time.perf_counter() - mark
        elif mark is not None:
            end = self._now()
            assert isinstance(end, torch.cuda.Event)
            self._pending.append((mark, end))
            self._collect(wait=False)

    def seconds(self) -> float:
        """Time waited so far, in seconds."""
        self._collect(wait=True)
        return self._seconds

    def _collect(self, *, wait: bool) -> None:
        while self._pending and (wait or self._pending[0][1].query()):  # type: ignore[no-untyped-call]
            start, end = self._pending.popleft()
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1e3

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class MeteredDDPStrategy(DDPStrategy):
    """Lightning's DDP; ``wait_s`` tells how long the rank has waited in all-reduce."""

    _meter: AllReduceIdleMeter | None = None

    @property
    def wait_s(self) -> float:
        """Seconds that this rank has waited since the start of the fit."""
        return 0.0 if self._meter is None else self._meter.seconds()

    def configure_ddp(self) -> None:
        """Wrap the module, and hang the meter into its all-reduce unless the user has a hook there."""
        super().configure_ddp()
        if isinstance(self.model, DistributedDataParallel) and self._ddp_comm_hook is None:
            self._meter = AllReduceIdleMeter(self.model)

    def post_backward(self, closure_loss: Tensor) -> None:
        """The backward has returned, and with it the all-reduce."""
        super().post_backward(closure_loss)
        if self._meter is not None:
            self._meter.backward_ended()
