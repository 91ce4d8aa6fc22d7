"""Classification: cross entropy to train on, accuracy to look at."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from lightning_g2.tasks.recipe import RecipeModule

LabelledBatch = tuple[Tensor, Tensor] | list[Tensor]
"""Inputs, shape (batch, ...), and their classes, shape (batch,), int64."""


class Classifier(RecipeModule):
    """A module whose ``forward`` gives logits of shape (batch, classes).

    Logs ``train_loss`` and ``val_loss`` in nats, and ``val_acc``, the share of right answers, 0 to 1.

    Args:
        **recipe: optimizer, learning rate and schedule, see :class:`~lightning_g2.tasks.recipe.RecipeModule`.
    """

    def __init__(self, **recipe: Any) -> None:
        super().__init__(**recipe)

    def loss(self, batch: LabelledBatch) -> Tensor:
        """Cross entropy of a batch, nats."""
        inputs, classes = batch
        return functional.cross_entropy(self(inputs), classes)

    def validation_step(self, batch: LabelledBatch, batch_idx: int) -> None:
        """Log loss and accuracy of one held-out batch."""
        inputs, classes = batch
        logits = self(inputs)
        accuracy = (logits.argmax(dim=-1) == classes).float().mean()
        values = {"val_loss": functional.cross_entropy(logits, classes), "val_acc": accuracy}
        self.log_dict(values, prog_bar=True, sync_dist=True, batch_size=len(classes))
