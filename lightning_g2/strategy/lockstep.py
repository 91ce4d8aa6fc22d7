"""Two collectives that Lightning runs outside sync points, taken out while g2async trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer


class Lockstep:
    """Lightning broadcasts a SIGTERM flag on every batch, which would put ranks in lockstep, and in the signal handler.

    Without them each rank gets the signal from its launcher and stops by itself.

    Args:
        trainer: the trainer that trains.
        kill_children: passes a signal on to the processes that this one has started.
    """

    def __init__(self, trainer: Trainer, kill_children: Callable[[Any], None]) -> None:
        self._connector = trainer._signal_connector
        self._loop = trainer.fit_loop.epoch_loop
        self._kill_children = kill_children

    def defuse(self) -> None:
        """Take both out, before Lightning registers its signal handlers."""
        setattr(self._connector, "_sigterm_notifier_fn", self._on_sigterm)  # noqa: B010 - a method of the class
        setattr(self._loop, "_broadcast_sigterm_tensor", lambda: None)  # noqa: B010

    def restore(self) -> None:
        """Put both back."""
        for owner, name in ((self._connector, "_sigterm_notifier_fn"), (self._loop, "_broadcast_sigterm_tensor")):
            if name in owner.__dict__:
                delattr(owner, name)

    def _on_sigterm(self, signum: Any, frame: Any) -> None:
        if not self._connector.received_sigterm:
            self._kill_children(signum)
        self._connector.received_sigterm = True
