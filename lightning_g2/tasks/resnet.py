"""ResNet-18 for small grey or colour images (He et al., arXiv 1512.03385)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.classifier import Classifier


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch normalisation, added to the input; a 1x1 convolution fits its shape if needed."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps, shape (batch, inputs, height, width), to (batch, outputs, height / stride, width / stride)."""
        return functional.relu(self.branch(x) + self.shortcut(x))


class ResNet18(Classifier):
    """ResNet-18 with the stem for small images: one 3x3 convolution of stride 1, no pooling before the blocks.

    Logs ``train_loss`` and ``val_loss`` in nats, and ``val_acc``, the share of right answers, 0 to 1.

    Args:
        channels: channels of an image, 1 for grey.
        classes: number of classes.
        width: channels of the first stage; the four stages have 1, 2, 4 and 8 times as many. 64 is the ResNet-18 of
            the paper, 11.2 million parameters; cost and size fall with the square of it.
        **recipe: optimizer, learning rate and schedule, see :class:`~lightning_g2.tasks.recipe.RecipeModule`.

    Raises:
        ConfigurationError: a hyper-parameter is out of range.
    """

    def __init__(self, *, channels: int = 1, classes: int = 10, width: int = 64, **recipe: Any) -> None:
        super().__init__(**recipe)
        self.save_hyperparameters()
        for name, value in {"channels": channels, "classes": classes, "width": width}.items():
            if value < 1:
                raise ConfigurationError(f"{name}={value}: must be ≥ 1; see ResNet18 for the default")
        stem = [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        blocks, inputs = [], width
        for outputs, stride in zip((width, 2 * width, 4 * width, 8 * width), (1, 2, 2, 2), strict=True):
            blocks += [ResidualBlock(inputs, outputs, stride), ResidualBlock(outputs, outputs, 1)]
            inputs = outputs
        self.features = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images.

        Args:
            images: shape (batch, channels, height, width), floating, about zero mean and unit deviation.

        Returns:
            Logits, shape (batch, classes).
        """
        logits: Tensor = self.head(self.features(images))
        return logits
