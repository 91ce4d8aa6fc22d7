"""A map-style dataset's batches, handed out to the ranks one by one instead of split among them beforehand."""

from __future__ import annotations

import copy
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler


class BatchOrder(Sequence[Any]):
    """The batches of one epoch, by number: what the user's own sampler drew, in its order.

    Lists of integers, which is nearly always what a sampler draws, are kept as one tensor: eight bytes a sample.

    Args:
        drawn: a batch of indices, or a single index where the loader does not collate.
    """

    def __init__(self, drawn: list[Any]) -> None:
        self._drawn: list[Any] | None = drawn
        try:
            flat = list(itertools.chain.from_iterable(drawn))
        except TypeError:
            return  # single indices
        if all(type(index) is int for index in flat):
            self._drawn = None
            self._flat = torch.tensor(flat, dtype=torch.int64)
            self._ends = torch.tensor([0, *itertools.accumulate(map(len, drawn))])

    def __len__(self) -> int:
        return len(self._ends) - 1 if self._drawn is None else len(self._drawn)

    def __getitem__(self, number: Any) -> Any:
        if self._drawn is not None:
            return self._drawn[number]
        flat: Tensor = self._flat[self._ends[number] : self._ends[number + 1]]
        return flat.tolist()


class DispatchedBatches(Sampler[Any]):
    """Yields the batches that the server has handed out to this rank.

    It stops when it has none, and goes on when it has been given more: a DataLoader with workers asks for batches ahead
    of time and, told that there are none, asks again after the next batch.

    Args:
        batches: the user's own batch sampler (or sampler, where the loader does not collate).
        share: gives rank 0's object to every rank; called by all of them at the same point.
    """

    def __init__(self, batches: Any, share: Callable[[Any], Any]) -> None:
        self.sampler = getattr(batches, "sampler", batches)  # Lightning tells it the epoch
        self._batches = batches
        self._share = share
        self._order: BatchOrder | None = None
        self._given: deque[int] = deque()
        self._untrained: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._given:
            raise StopIteration
        assert self._order is not None
        return self._order[self._given.popleft()]

    def samples(self, batches: int) -> int | None:
        """Samples in so many batches; None where a sampler of the user's own decides."""
        sizes, length = self._batches, sized_len(self.sampler)
        if type(sizes) is not BatchSampler or length is None:
            return None
        return min(batches * sizes.batch_size, length)

    def draw(self, seed: int, epoch: int) -> None:
        """Draw the epoch's batches, alike on all ranks and in every run with this seed; forgets those handed out."""
        self._given.clear()
        self._untrained.clear()
        self._order = None
        with isolate_rng():
            _seed((seed + epoch) % 2**32)
            drawn = BatchOrder(list(itertools.islice(self._batches, len(self)))) if self._is_first() else None
        self._order = self._share(drawn)

    def give(self, numbers: Sequence[int]) -> None:
        """The server has handed out these batches to this rank."""
        self._given.extend(numbers)
        self._untrained.extend(numbers)

    def begin(self) -> Any | None:
        """Indices of the batch that this rank is about to train on; None if it was handed out to nobody."""
        if not self._untrained or self._order is None:
            return None
        return self._order[self._untrained.popleft()]

    @staticmethod
    def _is_first() -> bool:
        return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def reason_against(dataloader: object) -> str | None:
    """Why a training loader's batches cannot be handed out one by one; None if they can."""
    if not isinstance(dataloader, DataLoader):
        return f"it is a {type(dataloader).__name__}, not a torch DataLoader"
    if has_iterable_dataset(dataloader):
        return "its dataset is iterable: samples have no numbers to hand out"
    if isinstance(dataloader.sampler, DistributedSampler):
        return "its sampler splits the data among the ranks already"
    if sized_len(dataloader._index_sampler) is None:
        return "its sampler has no length"
    return None


def dispatched(dataloader: DataLoader[Any], share: Callable[[Any], Any]) -> DataLoader[Any]:
    """The same loader over the batches that are handed out to this rank; the given one is left as it is.

    Each loading worker works ahead on one batch at most, so that a slow rank does not sit on batches that a fast one
    could take.
    """
    batches = DispatchedBatches(dataloader._index_sampler, share)
    new = copy.copy(dataloader)
    # DataLoader forbids assigning these; its subclasses may have constructors that nobody knows how to call.
    vars(new)["sampler" if dataloader.batch_sampler is None else "batch_sampler"] = batches
    vars(new)["_iterator"] = None
    if new.num_workers:
        new.prefetch_factor = 1
    return new


def batches_of(dataloader: object) -> DispatchedBatches | None:
    """The batches handed out to a loader made by :func:`dispatched`; None for any other."""
    sampler = dataloader._index_sampler if isinstance(dataloader, DataLoader) else None
    return sampler if isinstance(sampler, DispatchedBatches) else None


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
