"""The 8x8 handwritten digits that come with scikit-learn: real data in a kilobyte a sample, for quick runs."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_g2.errors import ConfigurationError

_HELD_OUT = 5
"""Every fifth image is held out."""


class DigitsDataModule(pl.LightningDataModule):
    """1,797 grey images of digits, 8x8, in 10 classes, of which 359 are held out.

    Args:
        batch_size: images in a batch of one rank.
        num_workers: DataLoader worker processes for training.

    Raises:
        ConfigurationError: an option is out of range, or scikit-learn is not installed.
    """

    def __init__(self, *, batch_size: int = 32, num_workers: int = 0) -> None:
        super().__init__()
        if batch_size < 1:
            raise ConfigurationError(f"batch_size={batch_size}: must be ≥ 1; try 32")
        if num_workers < 0:
            raise ConfigurationError(f"num_workers={num_workers}: must be ≥ 0; 0 loads in the training process")
        self.batch_size, self.num_workers = batch_size, num_workers
        self._train: TensorDataset | None = None
        self._val: TensorDataset | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read and split the images once in each process."""
        if self._train is not None:
            return
        images, classes = _load()
        held_out = torch.arange(len(classes)) % _HELD_OUT == _HELD_OUT - 1
        self._train = TensorDataset(images[~held_out], classes[~held_out])
        self._val = TensorDataset(images[held_out], classes[held_out])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled batches of images, shape (batch, 1, 8, 8), float32, -1 to 1, and classes, shape (batch,), int64."""
        self.setup()
        assert self._train is not None
        return DataLoader(self._train, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The same of the held-out images, in order and in one batch."""
        self.setup()
        assert self._val is not None
        return DataLoader(self._val, len(self._val))


def _load() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigurationError(
            "data=digits: scikit-learn, which brings the images, is not installed; run 'pip install scikit-learn'"
        ) from error
    images, classes = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8.0 - 1.0, torch.tensor(classes).long()
