"""Bytes of text files as training data; by default the standard library's own sources, so nothing to install."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_g2.errors import ConfigurationError

SEGMENT_BYTES = 65_536
"""A single big file is cut into pieces of this size, which then count as files."""

_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def source_files(folder: Path) -> list[Path]:
    """Python sources below a folder, without tests and installed packages, in an order that is the same everywhere.

    Args:
        folder: where to look, recursively.

    Returns:
        Paths sorted by their relative POSIX name.
    """
    found = (path for path in folder.rglob("*.py") if path.is_file())
    kept = (path for path in found if not _SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts[:-1]))
    return sorted(kept, key=lambda path: path.relative_to(folder).as_posix())


def read_documents(path: Path, *, max_bytes: int | None = None) -> list[bytes]:
    """Contents of the sources below a folder, or the segments of one file.

    Args:
        path: a folder or a file.
        max_bytes: stop after this many bytes; None reads everything.

    Returns:
        Non-empty documents in a deterministic order.

    Raises:
        ConfigurationError: there is nothing to read at ``path``.
    """
    documents: list[bytes] = []
    left = max_bytes
    for content in _contents(path):
        if left is not None:
            content = content[:left]
            left -= len(content)
        if content:
            documents.append(content)
        if left == 0:
            break
    if not documents:
        raise ConfigurationError(f"path={path}: holds no text; {_remedy()}")
    return documents


def _contents(path: Path) -> Iterator[bytes]:
    if path.is_dir():
        yield from (file.read_bytes() for file in source_files(path))
        return
    with path.open("rb") as stream:
        while segment := stream.read(SEGMENT_BYTES):
            yield segment


def split_documents(documents: Sequence[bytes], *, val_fraction: float) -> tuple[list[bytes], list[bytes]]:
    """Hold out every k-th document, k = 1 / val_fraction, whatever the seed; at least one of them.

    Args:
        documents: contents in a deterministic order.
        val_fraction: share of documents to hold out, > 0 and ≤ 0.5.

    Returns:
        Training documents and validation documents.
    """
    # With few documents a larger share is held out, so that there is something to validate on.
    period = min(round(1.0 / val_fraction), len(documents))
    train = [document for index, document in enumerate(documents) if index % period != period - 1]
    val = [document for index, document in enumerate(documents) if index % period == period - 1]
    return train, val


class EndlessCrops(IterableDataset[Tensor]):
    """Batches of random crops of a byte string, without end and without epochs.

    Args:
        data: bytes, shape (n,), uint8, n > ``block_size``.
        block_size: length of the model's input, in bytes; a crop is one byte longer.
        batch_size: crops in a batch.
        seed: seed of the job.
        rank: this rank; together with the DataLoader worker it selects an independent random stream.
    """

    def __init__(self, data: Tensor, *, block_size: int, batch_size: int, seed: int, rank: int) -> None:
        self.data, self.block_size, self.batch_size = data, block_size, batch_size
        self.seed, self.rank = seed, rank

    def __iter__(self) -> Iterator[Tensor]:
        """Yield batches, shape (batch_size, block_size + 1), int64."""
        info = get_worker_info()
        worker = 0 if info is None else info.id
        generator = torch.Generator().manual_seed(_stream_seed(self.seed, self.rank, worker))
        while True:
            starts = torch.randint(len(self.data) - self.block_size, (self.batch_size,), generator=generator)
            yield take_crops(self.data, starts, block_size=self.block_size)


class FixedCrops(IterableDataset[Tensor]):
    """Evenly spaced crops of a byte string: the same for every seed, strategy and number of ranks.

    It is iterable, not map-style, so that Lightning does not shard it: every rank evaluates the whole set. The mean
    over ranks is then exact, and stays so when a rank has dropped out; it costs no time, ranks work side by side.
    It has no length, as Lightning warns about iterable data with one.

    Args:
        data: bytes, shape (n,), uint8, n > ``block_size``.
        block_size: length of the model's input, in bytes; a crop is one byte longer.
        batch_size: crops in a batch.
        batches: number of batches.
    """

    def __init__(self, data: Tensor, *, block_size: int, batch_size: int, batches: int) -> None:
        self.data, self.block_size, self.batch_size, self.batches = data, block_size, batch_size, batches

    def __iter__(self) -> Iterator[Tensor]:
        """Yield batches, shape (batch_size, block_size + 1), int64."""
        last = len(self.data) - self.block_size - 1
        count = self.batches * self.batch_size
        starts = torch.arange(count) * last // max(count - 1, 1)
        for chosen in starts.view(self.batches, self.batch_size):
            yield take_crops(self.data, chosen, block_size=self.block_size)


def take_crops(data: Tensor, starts: Tensor, *, block_size: int) -> Tensor:
    """Crops of ``block_size + 1`` bytes.

    Args:
        data: bytes, shape (n,), uint8.
        starts: first index of each crop, shape (batch,), int64, ≤ n - block_size - 1.
        block_size: length of the model's input, in bytes.

    Returns:
        Crops, shape (batch, block_size + 1), int64.
    """
    return data[starts[:, None] + torch.arange(block_size + 1)].long()


def _stream_seed(seed: int, rank: int, worker: int) -> int:
    # The CPU generator looks at 32 bits only, so the three numbers are hashed together, not packed side by side.
    return random.Random(f"{seed}/{rank}/{worker}").getrandbits(32)


class ByteTextDataModule(pl.LightningDataModule):
    """Random byte crops of text files, with held-out files for validation. Nothing is downloaded.

    The standard library differs between versions of Python: compare losses under one version only.

    Args:
        path: a folder with Python sources or one file of any text; None reads the standard library's sources.
        block_size: length of the model's input, in bytes.
        batch_size: crops in a batch, on each rank.
        seed: seed of the training crops; ranks and workers draw different ones. Validation does not depend on it.
        val_fraction: share of files held out, > 0 and ≤ 0.5.
        val_batches: batches in a validation; every rank evaluates all of them.
        num_workers: DataLoader worker processes for training.
        max_bytes: read at most this much text; None reads everything.

    Raises:
        ConfigurationError: an option is out of range, or there is no (or too little) text.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        block_size: int = 64,
        batch_size: int = 12,
        seed: int = 1,
        val_fraction: float = 0.05,
        val_batches: int = 64,
        num_workers: int = 0,
        max_bytes: int | None = None,
    ) -> None:
        super().__init__()
        _check_options(
            block_size=block_size, batch_size=batch_size, val_batches=val_batches, num_workers=num_workers,
            seed=seed, max_bytes=max_bytes, val_fraction=val_fraction,
        )  # fmt: skip
        self.path = Path(sysconfig.get_paths()["stdlib"] if path is None else path)
        if not self.path.exists():
            raise ConfigurationError(f"path={self.path}: does not exist; {_remedy()}")
        self.block_size, self.batch_size, self.seed = block_size, batch_size, seed
        self.val_fraction, self.val_batches = val_fraction, val_batches
        self.num_workers, self.max_bytes = num_workers, max_bytes
        self._train: Tensor | None = None
        self._val: Tensor | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read and split the text once in each process."""
        if self._train is not None:
            return
        documents = read_documents(self.path, max_bytes=self.max_bytes)
        train, val = split_documents(documents, val_fraction=self.val_fraction)
        self._train = self._join(train, "training")
        self._val = self._join(val, "validation")

    def _join(self, documents: Sequence[bytes], purpose: str) -> Tensor:
        text = b"\n".join(documents)
        if len(text) <= self.block_size:
            raise ConfigurationError(
                f"path={self.path}: {len(text)} bytes for {purpose}, must be more than block_size={self.block_size}; "
                "give more text, raise max_bytes or change val_fraction"
            )
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Endless batches, shape (batch_size, block_size + 1), int64."""
        self.setup()
        assert self._train is not None
        rank = 0 if self.trainer is None else self.trainer.global_rank
        crops = EndlessCrops(
            self._train, block_size=self.block_size, batch_size=self.batch_size, seed=self.seed, rank=rank
        )
        return DataLoader(crops, batch_size=None, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """``val_batches`` batches, shape (batch_size, block_size + 1), int64, the same on every rank."""
        self.setup()
        assert self._val is not None
        crops = FixedCrops(self._val, block_size=self.block_size, batch_size=self.batch_size, batches=self.val_batches)
        return DataLoader(crops, batch_size=None)


def _remedy() -> str:
    return (
        "leave path empty for the standard library's sources (Debian: package libpython3-stdlib), or name a folder of "
        ".py files or a text file (Debian: dict-gcide, then gunzip gcide.dict.dz)"
    )


def _check_options(*, seed: int, val_fraction: float, max_bytes: int | None, num_workers: int, **sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigurationError(f"{name}={value}: must be ≥ 1; see ByteTextDataModule for the default")
    if not 0.0 < val_fraction <= 0.5:
        raise ConfigurationError(f"val_fraction={val_fraction}: must be > 0 and ≤ 0.5; try 0.05")
    if max_bytes is not None and max_bytes < 1:
        raise ConfigurationError(f"max_bytes={max_bytes}: must be ≥ 1; leave it empty to read everything")
    if num_workers < 0:
        raise ConfigurationError(f"num_workers={num_workers}: must be ≥ 0; 0 loads in the training process")
    if not 0 <= seed < 2**32:
        raise ConfigurationError(f"seed={seed}: must be ≥ 0 and < 2^32, as Lightning wants it; try 1")
