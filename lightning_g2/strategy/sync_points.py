"""Where ranks meet: collectives run at sync points only; between them every rank goes its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from lightning_g2.server import FINAL_POINT


class SyncPoints:
    """Whether this rank is at a sync point, together with every other rank.

    Before training starts, and when it is not about training at all, ranks run in step as in any Lightning strategy.

    Args:
        arrive: waits at a named point for the other ranks; returns whether all ranks of the job came.
    """

    def __init__(self, arrive: Callable[[str], bool]) -> None:
        self._arrive = arrive
        self.together = True

    def enter(self, point: str) -> None:
        """Wait for the other ranks at a point, unless they have been together since the last one."""
        if not self.together:
            self.together = self._arrive(point)

    def leave(self) -> None:
        """Go on alone."""
        self.together = False

    def end(self) -> None:
        """Training is over: from now on ranks run in step again."""
        self.together = True


class SyncPointCallback(Callback):
    """Enters sync points on the hooks that come first in Lightning's order; the strategy puts it before all others.

    Args:
        points: the sync points.
        close_window: called when an accumulation window has ended.
        on_error: called with an error before any other callback, which could fail over it.
    """

    def __init__(
        self, points: SyncPoints, close_window: Callable[[], None], on_error: Callable[[BaseException], None]
    ) -> None:
        self._points = points
        self._on_error = on_error
        self._close_window = close_window

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Note the end of an accumulation window."""
        if not trainer.fit_loop._should_accumulate():
            self._close_window()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Meet before a validation within training; the sanity check comes before training and is in step anyway."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._points.enter("validation")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Meet before epoch-end metrics are reduced and checkpoints written."""
        self._points.enter("epoch_end")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Meet once more: afterwards no rank pushes."""
        self._points.enter(FINAL_POINT)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """No collective can succeed any more; a checkpoint that another callback writes now must not wait for one."""
        self._points.leave()
        self._on_error(exception)


def average_buffers(module: torch.nn.Module) -> None:
    """Make buffers equal on all ranks: floating ones are averaged, others taken from rank 0.

    Statistics that are means over all batches so far (BatchNorm with ``momentum=None``) count by the batches that a
    rank has had. A collective; shapes must agree. Averages are taken in float64: equal buffers stay bit-identical.
    """
    batches = _batches_behind(module)
    weighted: dict[torch.device, list[tuple[Tensor, Tensor | None]]] = {}
    for buffer in module.buffers():
        if buffer.is_floating_point():
            weighted.setdefault(buffer.device, []).append((buffer, batches.get(id(buffer))))
    for pairs in weighted.values():
        _average(pairs)
    for buffer in module.buffers():
        if not buffer.is_floating_point() and buffer.numel():
            dist.broadcast(buffer, src=0)


def _batches_behind(module: torch.nn.Module) -> dict[int, Tensor]:
    """Batches behind each buffer that is a mean over batches, by ``id(buffer)``."""
    return {
        id(buffer): norm.num_batches_tracked
        for norm in module.modules()
        if isinstance(norm, _NormBase) and norm.momentum is None and norm.num_batches_tracked is not None
        for buffer in (norm.running_mean, norm.running_var)
    }


def _average(pairs: list[tuple[Tensor, Tensor | None]]) -> None:
    buffers = [buffer for buffer, _ in pairs]
    weights = torch.stack([torch.ones((), device=b.device) if w is None else w.float() for b, w in pairs]).double()
    if any(w is not None for _, w in pairs):
        total = weights.clone()
        dist.all_reduce(total)
        # Where no rank has had a batch, all hold the same.
        weights = torch.where(total > 0, weights * dist.get_world_size() / total.clamp(min=1), 1.0)
    flat = torch.cat([b.detach().double().flatten() * w for b, w in zip(buffers, weights, strict=True)])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    with torch.no_grad():
        means = torch.split(flat, [b.numel() for b in buffers])
        for buffer, mean in zip(buffers, means, strict=True):
            buffer.copy_(mean.view_as(buffer))


def batch_size(batch: Any) -> int:
    """Samples in a batch: the first extent of the first tensor found in it, 1 where there is none."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    for item in items:
        if isinstance(item, (Tensor, dict, list, tuple)):
            return batch_size(item)
    return 1
