"""A multi-layer perceptron for small images."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.classifier import Classifier


class MLP(Classifier):
    """Fully connected layers with ReLU between them.

    Logs ``train_loss`` and ``val_loss`` in nats, and ``val_acc``, the share of right answers, 0 to 1.

    Args:
        inputs: numbers in a sample: 64 for digits, 784 for Fashion-MNIST.
        classes: number of classes.
        width: of the hidden layers.
        layers: number of hidden layers.
        **recipe: optimizer, learning rate and schedule, see :class:`~lightning_g2.tasks.recipe.RecipeModule`.

    Raises:
        ConfigurationError: a hyper-parameter is out of range.
    """

    def __init__(
        self, *, inputs: int = 64, classes: int = 10, width: int = 128, layers: int = 2, **recipe: Any
    ) -> None:
        super().__init__(**recipe)
        self.save_hyperparameters()
        for name, value in {"inputs": inputs, "classes": classes, "width": width, "layers": layers}.items():
            if value < 1:
                raise ConfigurationError(f"{name}={value}: must be ≥ 1; see MLP for the default")
        widths = [inputs] + [width] * layers
        hidden = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
        self.layers = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images.

        Args:
            images: shape (batch, ...) with ``inputs`` numbers a sample, floating.

        Returns:
            Logits, shape (batch, classes).
        """
        logits: Tensor = self.layers(images)
        return logits
