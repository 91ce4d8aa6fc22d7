"""Collectives that Lightning runs outside sync points, taken out while g2async trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_g2.strategy.departure import Departure
from lightning_g2.strategy.sync_points import SyncPoints


class Lockstep:
    """Lightning broadcasts a SIGTERM flag on every batch, which would put ranks in lockstep, and in the signal handler.

    Without them each rank gets the signal from its launcher and stops by itself; of a signal that comes to one rank
    alone the others learn through the server. A checkpoint that is written within a handler, before a job is queued
    again, must not wait for other ranks either.

    Args:
        trainer: the trainer that trains.
        kill_children: passes a signal on to the processes that this one has started.
        points: the sync points, left for the time of a handler.
        departure: told of a SIGTERM where this rank can leave the job to others.
    """

    def __init__(
        self, trainer: Trainer, kill_children: Callable[[Any], None], points: SyncPoints, departure: Departure
    ) -> None:
        self._connector = trainer._signal_connector
        self._loop = trainer.fit_loop.epoch_loop
        self._kill_children = kill_children
        self._points = points
        self._departure = departure

    def install(self) -> None:
        """Take them out, before Lightning registers its signal handlers."""
        setattr(self._connector, "_slurm_sigusr_handler_fn", self._on_requeue)  # noqa: B010
        setattr(self._connector, "_sigterm_notifier_fn", self._on_sigterm)  # noqa: B010 - a method of the class
        setattr(self._loop, "_broadcast_sigterm_tensor", lambda: None)  # noqa: B010

    def remove(self) -> None:
        """Put them back."""
        for owner, name in (
            (self._connector, "_sigterm_notifier_fn"),
            (self._connector, "_slurm_sigusr_handler_fn"),
            (self._loop, "_broadcast_sigterm_tensor"),
        ):
            if name in owner.__dict__:
                delattr(owner, name)

    def _on_requeue(self, signum: Any, frame: Any) -> None:
        together, self._points.together = self._points.together, False
        try:
            type(self._connector)._slurm_sigusr_handler_fn(self._connector, signum, frame)
        finally:
            self._points.together = together

    def _on_sigterm(self, signum: Any, frame: Any) -> None:
        if self._departure.possible:
            self._departure.notice()
            return
        if not self._connector.received_sigterm:
            self._kill_children(signum)
        self._connector.received_sigterm = True
