"""Over which ranks a torchmetrics metric reduces: all where all meet, else this one alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.nn import Module
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

from lightning_g2.strategy.sync_points import SyncPoints

_points: SyncPoints | None = None
_alone = False


def ranks_meet() -> bool:
    """Whether a metric may gather from other ranks: they are all at the same sync point."""
    return not _alone and (_points is None or _points.together) and bool(jit_distributed_available())


def ranks_never_meet() -> bool:
    """For a metric that other ranks do not have."""
    return False


class MetricScope:
    """Keeps the metrics of a trainer's module and callbacks from gathering where other ranks do not.

    A metric of torchmetrics gathers from all ranks whenever there is a process group, without asking the strategy; a
    rank that computes one between sync points, or one that other ranks lack, would wait in it for ever. Metrics ask
    functions of this file instead, which name no strategy, so that a module still copies and pickles.

    Args:
        trainer: the trainer.
        points: tells whether ranks are together.
    """

    def __init__(self, trainer: Trainer, points: SyncPoints) -> None:
        self._trainer = trainer
        self._points = points
        self._warned: set[str] = set()

    def install(self) -> None:
        """Take every metric in.

        Raises:
            MisconfigurationException: training would use a metric that gathers on every step.
        """
        global _points
        for name, metric in self._metrics().items():
            if metric.dist_sync_on_step and self._trainer.state.fn == "fit":
                raise MisconfigurationException(
                    f"metric {name}: {type(metric).__name__}(dist_sync_on_step=True) makes ranks wait for each other "
                    "on every step; leave it out, its state is synchronised at sync points"
                )
        _points = self._points
        self.limit_to(self.names())

    def names(self) -> list[str]:
        """Names of the metrics that this rank has."""
        return list(self._metrics())

    def limit_to(self, everywhere: Collection[str]) -> None:
        """Let metrics gather if all ranks have them; those made since the last call are taken in, too."""
        for name, metric in self._metrics().items():
            if metric.distributed_available_fn in (jit_distributed_available, ranks_meet, ranks_never_meet):
                metric.distributed_available_fn = ranks_meet if name in everywhere else ranks_never_meet

    def forget_values(self) -> None:
        """Where ranks meet: what a metric has computed on this rank alone must not stand for all ranks' value.

        Metrics keep what they have computed until their next update, and a rank that has it does not gather.
        """
        for metric in self._metrics().values():
            metric._computed = None

    def warn_about(self, partial: Collection[str]) -> None:
        """Name metrics that some ranks lack, each once."""
        for name in sorted(set(partial) - self._warned):
            rank_zero_warn(f"metric {name} exists on some ranks only: each of them computes it from its own data alone")
        self._warned |= set(partial)

    def remove(self) -> None:
        """Give metrics their own way back."""
        global _points
        _points = None
        for metric in self._metrics().values():
            if metric.distributed_available_fn in (ranks_meet, ranks_never_meet):
                metric.distributed_available_fn = jit_distributed_available

    def _metrics(self) -> dict[str, Metric]:
        module = self._trainer.lightning_module
        found = dict(_within("", module)) if module is not None else {}
        for number, callback in enumerate(self._trainer.callbacks):  # type: ignore[attr-defined]
            for attribute, value in vars(callback).items():
                found |= _within(f"callbacks.{number}.{type(callback).__name__}.{attribute}", value)
        return found


@contextmanager
def this_rank_alone() -> Iterator[None]:
    """Compute metrics from this rank's state within the block."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def _within(prefix: str, value: Any) -> Iterator[tuple[str, Metric]]:
    if isinstance(value, Module):
        for name, module in value.named_modules():
            if isinstance(module, Metric):
                yield ".".join(filter(None, (prefix, name))), module
    elif isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if isinstance(item, Module):
                yield from _within(f"{prefix}.{key}", item)
