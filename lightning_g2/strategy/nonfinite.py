"""Batches that bring NaN or Inf: their gradients are named, their statistics do not stay."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from lightning_g2.errors import NonFiniteGradientError
from lightning_g2.routing.gate import magnitude, to_host
from lightning_g2.strategy.sync_points import batch_size

_NAMED = 5
"""Parameters named in a message; where all gradients are NaN, the first ones tell as much."""


def nonfinite_names(gradients: Mapping[str, Tensor]) -> list[str]:
    """Names of the gradients that hold NaN or Inf.

    Args:
        gradients: gradients by parameter name; any dtype and layout.
    """
    sizes = {name: size for name, gradient in gradients.items() if (size := magnitude(gradient)) is not None}
    return [name for name, size in zip(sizes, to_host(list(sizes.values())), strict=True) if not math.isfinite(size)]


class NonFiniteGradients:
    """Warns of, or stops at, gradients with NaN or Inf, and counts the pushes of this rank that had them.

    Args:
        action: ``"reject"`` warns, once for each set of parameters; ``"stop"`` raises.
        rank: this rank.
        layerwise: pushes go bucket by bucket.
    """

    def __init__(self, action: str, rank: int, *, layerwise: bool = False) -> None:
        self.count = 0
        self._action = action
        self._rank = rank
        fate = "the push was rejected, no weight and no moment moved"
        if layerwise:
            fate = "this bucket and the later ones of the push were rejected, earlier ones have been applied"
        self._consequence = f"{fate}. g2/rejected counts such pushes"
        self._named: set[tuple[str, ...]] = set()

    def judge(self, gradients: Mapping[str, Tensor], step: int, consequence: str = "") -> str:
        """Look for NaN and Inf in gradients that are not used.

        Args:
            gradients: gradients by parameter name.
            step: optimizer steps so far.
            consequence: what becomes of them, for the warning; empty for a rejected push.

        Returns:
            A warning; empty where there is nothing new to say.

        Raises:
            NonFiniteGradientError: there are some, and the action is to stop.
        """
        names = nonfinite_names(gradients)
        if not names:
            return ""
        self.count += 1
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        what = f"rank {self._rank}, step {step}: NaN or Inf in the gradient of {', '.join(names[:_NAMED])}{more}"
        if self._action == "stop":
            raise NonFiniteGradientError(
                f"{what}; on_nonfinite='stop' ends the job: look at this rank's batch and loss, or reject such pushes "
                "with on_nonfinite='reject'"
            )
        if tuple(names) in self._named:
            return ""
        self._named.add(tuple(names))
        return f"{what}; {consequence or self._consequence}"


class FiniteStatistics(Callback):
    """Takes back running statistics that a batch has made NaN or Inf, for they would never become finite again.

    An empty batch does that to BatchNorm, and so does a batch with NaN whose gradient is rejected. Values go back to
    what they were before the batch, one by one, without a wait for the device.
    """

    def __init__(self) -> None:
        self._statistics = RunningStatistics()
        self._before: list[tuple[Tensor, Tensor]] = []
        self._warned = False

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the layers that keep statistics: once, for a walk over a large module takes its time."""
        self._statistics.find(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Remember the statistics; warn of an empty batch."""
        self._before = self._statistics.remember()
        if batch_size(batch) == 0 and not self._warned:
            self._warned = True
            warnings.warn(
                f"rank {trainer.global_rank}: batch {batch_idx} is empty: a mean over it is NaN. Running statistics "
                "keep their values, and its gradient is zero or rejected; leave empty batches out, they cost an update",
                stacklevel=2,
            )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Take back what is not finite."""
        self._statistics.restore(self._before)
        self._before = []


class RunningStatistics:
    """The running statistics of a module's normalisation layers."""

    def __init__(self) -> None:
        self._norms: list[_NormBase] = []

    def find(self, module: torch.nn.Module) -> None:
        """Find the layers that keep statistics."""
        self._norms = [m for m in module.modules() if isinstance(m, _NormBase)]

    def remember(self) -> list[tuple[Tensor, Tensor]]:
        """The statistics that a forward pass would change, each with a copy of its present values."""
        return [(s, s.clone()) for norm in self._norms if norm.training for s in _running(norm)]

    def restore(self, before: list[tuple[Tensor, Tensor]]) -> None:
        """Take back what is not finite.

        Args:
            before: what :meth:`remember` gave.
        """
        with torch.no_grad():
            for statistic, value in before:
                statistic.copy_(torch.where(statistic.isfinite(), statistic, value))


def _running(norm: _NormBase) -> list[Tensor]:
    if not norm.track_running_stats:
        return []
    statistics = (norm.running_mean, norm.running_var)
    return [s for s in statistics if isinstance(s, Tensor) and not isinstance(s, torch.nn.UninitializedBuffer)]
