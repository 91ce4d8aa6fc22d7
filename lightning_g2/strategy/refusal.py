"""What g2async cannot do, refused by name before training."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from torch.optim import LBFGS, Optimizer


def refuse_environment(accelerator: Accelerator | None, *, sync_batchnorm: bool) -> None:
    """Refuse builds, devices and plugins that cannot work.

    Raises:
        MisconfigurationException: RPC is missing from torch, the accelerator is neither CPU nor CUDA, or SyncBatchNorm
            was asked for.
    """
    if not dist.is_available() or not dist.rpc.is_available():
        raise MisconfigurationException(
            "strategy='g2async' needs torch.distributed.rpc, which this build of torch does not have; install a Linux "
            "build of torch with distributed support, or use another strategy"
        )
    if not isinstance(accelerator, (CPUAccelerator, CUDAAccelerator)):
        raise MisconfigurationException(
            f"accelerator={type(accelerator).__name__}: g2async runs on CPU and CUDA devices; "
            "pass accelerator='cpu' or 'cuda'"
        )
    if sync_batchnorm:
        raise MisconfigurationException(
            "sync_batchnorm=True: SyncBatchNorm makes ranks wait for each other in every forward; leave it out, "
            "g2async averages BatchNorm statistics at sync points"
        )


def refuse_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that cannot be stepped by a server.

    Raises:
        MisconfigurationException: an optimizer evaluates its closure more than once.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise MisconfigurationException(
                "optimizer LBFGS: it evaluates its closure several times a step, on weights that only the server has; "
                "use an optimizer that steps once for each gradient"
            )
