"""A small convolutional network for grey or colour images, without batch normalisation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.classifier import Classifier


class ConvNet(Classifier):
    """Three 3x3 convolutions of stride 2 with ReLU, then a linear layer: 33,000 parameters for 28x28 at width 16.

    Without running statistics, so that what asynchronous ranks share is weights alone.

    Logs ``train_loss`` and ``val_loss`` in nats, and ``val_acc``, the share of right answers, 0 to 1.

    Args:
        channels: channels of an image, 1 for grey.
        size: height and width of an image.
        classes: number of classes.
        width: channels of the first layer; the next two have twice and four times as many.
        **recipe: optimizer, learning rate and schedule, see :class:`~lightning_g2.tasks.recipe.RecipeModule`.

    Raises:
        ConfigurationError: a hyper-parameter is out of range.
    """

    def __init__(self, *, channels: int = 1, size: int = 28, classes: int = 10, width: int = 16, **recipe: Any) -> None:
        super().__init__(**recipe)
        self.save_hyperparameters()
        for name, value in {"channels": channels, "size": size, "classes": classes, "width": width}.items():
            if value < 1:
                raise ConfigurationError(f"{name}={value}: must be ≥ 1; see ConvNet for the default")
        widths = [channels, width, 2 * width, 4 * width]
        convolutions: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            convolutions += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
            size = (size + 1) // 2
        self.layers = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(widths[-1] * size * size, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images.

        Args:
            images: shape (batch, channels, size, size), floating, about zero mean and unit deviation.

        Returns:
            Logits, shape (batch, classes).
        """
        logits: Tensor = self.layers(images)
        return logits
