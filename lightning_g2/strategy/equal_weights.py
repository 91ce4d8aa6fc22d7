"""Callbacks that put weights of their own into the module, and how all ranks get the same ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.parameter import is_lazy


class EqualWeightsCallback(Callback):
    """Comes after all other callbacks; the strategy adds it.

    An averaging callback (EMA, SWA) averages what its own rank pulls, so ranks would validate, and end with, different
    models. Where a callback has changed weights at a point at which all ranks meet, all take rank 0's.

    Args:
        publish: sends what callbacks have changed in the weights to the server, and loads what it then has.
        equalise: makes the weights of all ranks rank 0's, if any rank's were changed.
    """

    def __init__(self, publish: Callable[[], None], equalise: Callable[[], None]) -> None:
        self._publish = publish
        self._equalise = equalise

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Weights set at an epoch's start are those of the whole epoch, on every rank."""
        self._publish()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Weights swapped in for a validation are one model's."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._equalise()


class WeightNorms:
    """Notices parameters that change although no server moves them, such as those of a target network.

    Args:
        parameters: the parameters that no optimizer has; lazy ones without a shape are left out.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = [p for p in parameters if p.is_floating_point() and not is_lazy(p)]
        self._before = self._norms()

    def changed(self) -> list[Tensor]:
        """Parameters whose norm is another than at the start."""
        pairs = zip(self._parameters, self._before, self._norms(), strict=True)
        return [parameter for parameter, before, now in pairs if before != now]

    def _norms(self) -> list[float]:
        with torch.no_grad():
            return [float(torch.linalg.vector_norm(p)) for p in self._parameters]


def take_from_rank_0(tensors: list[Tensor], changed: list[bool], buffers: list[Tensor]) -> None:
    """A collective: tensors that any rank has changed, and then the buffers too, become those of rank 0.

    Args:
        tensors: alike on all ranks in number and shapes; lazy ones without a shape are never among the changed.
        changed: which of them this rank has changed.
        buffers: taken along where anything was changed, since averaging callbacks average them too.
    """
    if not tensors:
        return
    flags = torch.tensor(changed, dtype=torch.uint8, device=tensors[0].device)  # fixed in number: the module's own
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    chosen = [tensor for tensor, flag in zip(tensors, flags.tolist(), strict=True) if flag]
    for tensor in [*chosen, *(b for b in buffers if chosen and b.numel())]:
        data = tensor.detach().contiguous()
        dist.broadcast(data, src=0)
        with torch.no_grad():
            tensor.detach().copy_(data)
