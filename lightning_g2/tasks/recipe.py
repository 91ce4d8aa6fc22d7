"""How the shipped models are trained: one optimizer, one learning rate, warm-up and cosine."""

from __future__ import annotations

import math
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.schedule import ElapsedFractionLR, share_done


class RecipeModule(pl.LightningModule):
    """A module that knows its loss and is trained by AdamW or SGD.

    Logs ``train_loss`` and ``val_loss``, in the loss's units.

    Args:
        optimizer: ``"adamw"`` or ``"sgd"``.
        lr: peak learning rate.
        betas: decay rates of AdamW's two moments.
        weight_decay: decay of matrices; vectors (norms, biases) are never decayed.
        momentum: momentum of SGD.
        schedule: ``"cosine"`` warms up, then falls to zero over the share done of the Trainer's ``max_time`` and
            ``max_steps`` (whichever is further), or else of ``max_epochs``; ``"constant"`` keeps ``lr``.
        warmup: share of training spent warming up, 0 ≤ warmup < 1.

    Raises:
        ConfigurationError: a value is out of range; on construction, or for ``schedule="cosine"`` without a limit to
            scale to, before the first step.
    """

    def __init__(
        self,
        *,
        optimizer: Literal["adamw", "sgd"] = "adamw",
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        momentum: float = 0.9,
        schedule: Literal["cosine", "constant"] = "cosine",
        warmup: float = 0.05,
    ) -> None:
        super().__init__()
        _check_optimizer(optimizer, lr=lr, betas=betas, weight_decay=weight_decay, momentum=momentum)
        _check_schedule(schedule, warmup=warmup)
        self.optimizer_name, self.lr, self.betas = optimizer, lr, (betas[0], betas[1])
        self.weight_decay, self.momentum = weight_decay, momentum
        self.schedule, self.warmup = schedule, warmup

    def loss(self, batch: Any) -> Tensor:
        """Mean loss of one batch, shape (); each model has its own."""
        raise NotImplementedError

    def samples(self, batch: Any) -> int:
        """Number of samples in a batch: the first extent of it, or of its first item."""
        first = batch if isinstance(batch, Tensor) else batch[0]
        return int(first.shape[0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Loss of one batch."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, batch_size=self.samples(batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss of one held-out batch."""
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True, batch_size=self.samples(batch))

    def configure_optimizers(self) -> Any:
        """The optimizer, and for ``schedule="cosine"`` a scheduler stepped after every batch."""
        decayed = [p for p in self.parameters() if p.requires_grad and p.dim() >= 2]
        plain = [p for p in self.parameters() if p.requires_grad and p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        optimizer: torch.optim.Optimizer
        if self.optimizer_name == "adamw":
            optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, fused=True)
        else:
            optimizer = torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum)
        if self.schedule == "constant":
            return optimizer
        scheduler = ElapsedFractionLR(optimizer, self._elapsed_fraction, warmup=self.warmup)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _elapsed_fraction(self, scheduler_steps: int) -> float:
        # Not the scheduler's count, which may be that of another clock than the limit's.
        fraction = share_done(self.trainer)
        if fraction is None:
            raise ConfigurationError(
                "schedule='cosine': needs an end to fall towards; set Trainer(max_time=...), Trainer(max_steps=...) "
                "or, on data with an end, Trainer(max_epochs=...); or schedule='constant'"
            )
        return fraction


def _check_optimizer(name: str, *, lr: float, betas: tuple[float, float], weight_decay: float, momentum: float) -> None:
    if name not in ("adamw", "sgd"):
        raise ConfigurationError(f"optimizer={name!r}: must be 'adamw' or 'sgd'")
    if not 0.0 < lr < math.inf:
        raise ConfigurationError(f"lr={lr}: must be > 0 and finite; try 2e-3")
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigurationError(f"betas={betas}: must be two numbers ≥ 0 and < 1; try (0.9, 0.95)")
    if not 0.0 <= weight_decay < math.inf:
        raise ConfigurationError(f"weight_decay={weight_decay}: must be ≥ 0 and finite; 0 turns it off")
    if not 0.0 <= momentum < 1.0:
        raise ConfigurationError(f"momentum={momentum}: must be ≥ 0 and < 1; 0 turns it off")


def _check_schedule(schedule: str, *, warmup: float) -> None:
    if schedule not in ("cosine", "constant"):
        raise ConfigurationError(f"schedule={schedule!r}: must be 'cosine' or 'constant'")
    if not 0.0 <= warmup < 1.0:
        raise ConfigurationError(f"warmup={warmup}: must be ≥ 0 and < 1; 0 starts at the full learning rate")
