"""The ranks that train together: whom collectives reach, and what becomes of a rank that is dropped."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d
from torch.utils.data import DataLoader, DistributedSampler

from lightning_g2.strategy.stopping import log
from lightning_g2.transport.server_group import Exchange, ServerGroup
from lightning_g2.values import SyncRelease


class Members:
    """Keeps collectives among the ranks that are left, and data split among them.

    Args:
        trainer: the trainer.
        exchange: hands shares of a collective around.
        rank: this rank.
        ranks: number of ranks that the job has begun with.
        forgive: called with a rank that was dropped: its end is no failure of the job any more.
    """

    def __init__(
        self, trainer: Trainer, exchange: Exchange, *, rank: int, ranks: int, forgive: Callable[[int], None]
    ) -> None:
        self._trainer = trainer
        self._rank = rank
        self._ranks = ranks
        self._forgive = forgive
        self._group = ServerGroup(exchange, rank, range(ranks))
        self._dropped: set[int] = set()

    def install(self) -> None:
        """From now on collectives go through the server."""
        self._group.install()

    def remove(self) -> None:
        """Give collectives back to the ranks themselves; those that are left form a group without the others."""
        self._group.remove()
        if dist.is_initialized() and len(self._group.members) < self._ranks and self._rank in self._group.members:
            regroup(self._group.members, self._rank)

    def abandon(self) -> None:
        """After a failure: nobody will be met again."""
        self._group.remove()

    def meet(self, release: SyncRelease) -> None:
        """All live ranks are at a sync point: from now on they are the members, and share the data among them."""
        if not release.together or release.participants == self._group.members:
            return
        self._group.meet(release.participants)
        loop = self._trainer.fit_loop
        loop.epoch_loop.val_loop._combined_loader = None  # made anew at the next validation, for fewer ranks
        loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
        for loader in loaders:
            split_anew(loader, rank=self._group.rank(), ranks=self._group.size())

    def note_drop(self, rank: int, reason: str) -> None:
        """A rank was dropped; may be called from any thread, and again."""
        if rank in self._dropped:
            return
        self._dropped.add(rank)
        self._forgive(rank)
        if self._rank == 0:
            log.warning(f"rank {rank} was dropped, and others train on what it had not pushed: {reason}")


def split_anew(loader: Any, *, rank: int, ranks: int) -> None:
    """Let a loader whose sampler splits the data among ranks split it among others, from its next epoch on."""
    sampler = loader.sampler if isinstance(loader, DataLoader) else None
    if not isinstance(sampler, DistributedSampler):
        return
    fresh: DistributedSampler[Any] = DistributedSampler(
        sampler.dataset, num_replicas=ranks, rank=rank, shuffle=sampler.shuffle, drop_last=sampler.drop_last
    )
    for name in ("num_replicas", "rank", "num_samples", "total_size"):
        setattr(sampler, name, getattr(fresh, name))


def regroup(members: tuple[int, ...], rank: int) -> None:
    """Form a new default group of some ranks of the present one, which cannot be used any more."""
    backend, limit = dist.get_backend(), timedelta(minutes=1)
    store = PrefixStore(f"after {len(members)} ranks were left", c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=members.index(rank), world_size=len(members), timeout=limit)
