"""Collectives that run where all ranks meet, and nowhere else."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_g2.errors import G2Error
from lightning_g2.strategy.sync_points import SyncPoints
from lightning_g2.transport.interface import choose_interface, stay_on_this_host
from lightning_g2.transport.store import open_store

T = TypeVar("T")


class SyncPointStrategy(DDPStrategy):
    """Lightning's DDP without its wrapper: at a sync point ranks reduce and gather, between them each has its own."""

    _points: SyncPoints

    def setup_distributed(self) -> None:
        """Start the process group; what listens for it does so on loopback, or on the interface between the hosts."""
        environment = self.cluster_environment
        assert environment is not None
        self.set_world_ranks()
        if self.num_nodes == 1:
            stay_on_this_host()
        else:
            choose_interface(environment.main_address, environment.main_port)
        store = None
        if self.global_rank == 0 and not dist.is_initialized():
            store = open_store(environment.main_address, environment.main_port, nodes=self.num_nodes)
        super().setup_distributed()
        del store  # the process group shares it, and closes it at its end

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How samplers split data: among the ranks that are there."""
        if not dist.is_initialized():
            return super().distributed_sampler_kwargs
        return {"num_replicas": dist.get_world_size(), "rank": dist.get_rank()}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over ranks at a sync point; between them the rank's own value."""
        if not self._points.together:
            return tensor
        return self.collective(lambda: super(SyncPointStrategy, self).reduce(tensor, group, reduce_op))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Reduce a decision over ranks at a sync point; between them the rank's own."""
        if not self._points.together:
            return decision
        return super().reduce_boolean_decision(decision, all)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from ranks at a sync point, shape (ranks, ...); between them from this rank alone, shape (1, ...)."""
        if not self._points.together:
            rank_zero_warn("all_gather between sync points sees this rank only; gather in validation hooks")
            return tensor.unsqueeze(0)
        return self.collective(lambda: super(SyncPointStrategy, self).all_gather(tensor, group, sync_grads))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast at a sync point; between them the rank's own object."""
        if not self._points.together:
            return obj
        return self.collective(lambda: super(SyncPointStrategy, self).broadcast(obj, src))

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks at a sync point; between them go on."""
        if self._points.together:
            self.collective(lambda: super(SyncPointStrategy, self).barrier(*args, **kwargs))

    def gather_objects(self, value: Any) -> list[Any]:
        """An object from every rank that is there, in order of rank; at a sync point only."""
        gathered = [None] * dist.get_world_size()
        self.collective(lambda: dist.all_gather_object(gathered, value))
        return gathered

    def collective(self, run: Callable[[], T]) -> T:
        """Run a collective. Where it breaks because a rank has failed, that rank's own error is raised."""
        try:
            return run()
        except G2Error:
            raise
        except RuntimeError:
            # A peer that has died breaks collectives with a message about sockets; the server knows whose error it was.
            self.raise_peer_failure()
            raise

    @abstractmethod
    def raise_peer_failure(self) -> None:
        """Raise the error of the rank that has failed, if there is one."""
