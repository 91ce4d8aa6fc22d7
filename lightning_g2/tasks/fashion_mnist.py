"""Fashion-MNIST (Xiao et al., arXiv 1708.07747) from IDX files, the format of MNIST and its relatives."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_g2.errors import ConfigurationError

DEFAULT_PATH = "/usr/share/datasets/fashion-mnist"
MEAN, DEVIATION = 0.2860, 0.3530
"""Of the training pixels, scaled to 0 to 1."""

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path) -> Tensor:
    """Array of unsigned bytes from an IDX file, gzipped or not.

    Args:
        path: the file; it is read as gzip if its name ends in ``.gz``.

    Returns:
        The array in its own shape, uint8.

    Raises:
        ConfigurationError: the file is not IDX, holds another type than unsigned bytes, or is cut short.
    """
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        content = bytearray(stream.read())
    # Two zero bytes, the type, the number of dimensions; then each extent as a big-endian 32-bit number.
    dimensions = content[3] if len(content) > 3 else 0
    header = 4 + 4 * dimensions
    if len(content) < header or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE or not dimensions:
        raise ConfigurationError(f"path={path}: must be an IDX file of unsigned bytes; its head is {content[:4].hex()}")
    shape = [int.from_bytes(content[start : start + 4], "big") for start in range(4, header, 4)]
    if len(content) - header != math.prod(shape):
        raise ConfigurationError(
            f"path={path}: must hold {math.prod(shape)} bytes after its head, for shape {shape}, but holds "
            f"{len(content) - header}; get the file again"
        )
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).view(shape)


def find_idx(folder: Path, name: str) -> Path:
    """An IDX file by its name, with or without ``.gz``.

    Args:
        folder: where it lies.
        name: its name without ``.gz``.

    Returns:
        Its path.

    Raises:
        ConfigurationError: it is not there.
    """
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    raise ConfigurationError(
        f"path={folder}: holds no {name}[.gz]; on Debian run 'apt-get install dataset-fashion-mnist', which puts it "
        f"into {DEFAULT_PATH}, or name the folder FashionMNIST/raw that torchvision's FashionMNIST(download=True) fills"
    )


class FashionMNISTDataModule(pl.LightningDataModule):
    """60,000 grey images of clothes, 28x28, in 10 classes, and 10,000 held out. Nothing is downloaded.

    Any other set in the same four files (MNIST, KMNIST, EMNIST's digits) can be read as well.

    Args:
        path: folder with the IDX files; Debian's package ``dataset-fashion-mnist`` provides the default.
        batch_size: images in a batch of one rank.
        train_samples: take the first so many of the training images; None takes all.
        val_samples: take the first so many of the held-out images; None takes all.
        num_workers: DataLoader worker processes for training.

    Raises:
        ConfigurationError: an option is out of range, or the data are missing or unreadable.
    """

    def __init__(
        self,
        *,
        path: str = DEFAULT_PATH,
        batch_size: int = 64,
        train_samples: int | None = None,
        val_samples: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        for name, value in {
            "batch_size": batch_size,
            "train_samples": train_samples,
            "val_samples": val_samples,
        }.items():
            if value is not None and value < 1:
                raise ConfigurationError(f"{name}={value}: must be ≥ 1; see FashionMNISTDataModule for the default")
        if num_workers < 0:
            raise ConfigurationError(f"num_workers={num_workers}: must be ≥ 0; 0 loads in the training process")
        self.path, self.batch_size, self.num_workers = Path(path), batch_size, num_workers
        self.train_samples, self.val_samples = train_samples, val_samples
        self._train: TensorDataset | None = None
        self._val: TensorDataset | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read the images once in each process."""
        if self._train is None:
            self._train = self._read("train", self.train_samples)
            self._val = self._read("t10k", self.val_samples)

    def _read(self, part: str, samples: int | None) -> TensorDataset:
        images = read_idx(find_idx(self.path, f"{part}-images-idx3-ubyte"))
        classes = read_idx(find_idx(self.path, f"{part}-labels-idx1-ubyte"))
        if images.dim() != 3 or classes.dim() != 1 or len(images) != len(classes):
            raise ConfigurationError(
                f"path={self.path}: {part} images of shape {tuple(images.shape)} and classes of shape "
                f"{tuple(classes.shape)}, must be (n, height, width) and (n,); get the files again"
            )
        # Bytes until they are needed: a quarter of the memory.
        return TensorDataset(images[:samples].unsqueeze(1), classes[:samples].long())

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled batches of images, shape (batch, 1, 28, 28), uint8, and classes, shape (batch,), int64."""
        self.setup()
        assert self._train is not None
        return DataLoader(self._train, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The same of the held-out images, in order."""
        self.setup()
        assert self._val is not None
        return DataLoader(self._val, 4 * self.batch_size)

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        """Turn bytes into floats of zero mean and unit deviation, on the device that trains.

        Args:
            batch: images, uint8, and classes.
            dataloader_idx: number of the dataloader.

        Returns:
            Images, same shape, float32, and classes.
        """
        images, classes = batch
        return [(images.float() / 255.0 - MEAN) / DEVIATION, classes]
