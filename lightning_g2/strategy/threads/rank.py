"""What one rank has while ``trainer.fit`` runs with forward and backward threads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from lightning_g2.callbacks.routing import G2RoutingCallback
from lightning_g2.decoupled import LocalApply, RunReport
from lightning_g2.strategy.layerwise_refusal import refuse_gate_of_whole_pushes
from lightning_g2.strategy.loop import ConductedEpochLoop
from lightning_g2.strategy.options import G2AsyncOptions
from lightning_g2.strategy.patches import Patches
from lightning_g2.strategy.stopping import stopping
from lightning_g2.strategy.threads.loop import Threaded
from lightning_g2.strategy.threads.refusal import refuse_stepping, thread_options
from lightning_g2.strategy.threads.training import ThreadedTraining
from lightning_g2.strategy.threads.updates import OwnUpdates, PushedUpdates
from lightning_g2.strategy.training import RankTraining
from lightning_g2.transport import Transport


class _WithThreads:
    """What is asked of a rank that trains in threads, with a server or without."""

    threads: ThreadedTraining

    @property
    def pushes(self) -> int:
        """Windows that the loop has followed and that have brought gradients."""
        return self.threads.pushes

    @property
    def report(self) -> RunReport:
        """What the threads do."""
        return self.threads.report

    def stop(self) -> None:
        """End the threads."""
        self.threads.stop()


class ThreadedRank(_WithThreads, RankTraining):
    """Threads whose updates are pushes.

    Args:
        options: the strategy's.
        trainer: of this rank.
        module: that it trains.
        transport: this rank's started connection.
        routing: holds the gate.
        optimizers: the module's own, bare.
        rank: this rank.
        ranks: number of ranks.

    Raises:
        MisconfigurationException: optimizer, parameters or gate cannot go with threads.
        ConfigurationError: the module cannot be copied.
    """

    def __init__(
        self,
        options: G2AsyncOptions,
        trainer: Trainer,
        module: LightningModule,
        transport: Transport,
        routing: G2RoutingCallback,
        optimizers: Sequence[Optimizer],
        *,
        rank: int,
        ranks: int,
    ) -> None:
        refuse_stepping(list(optimizers), module)
        chosen = thread_options(options, trainer)
        if chosen.update == "layer":
            refuse_gate_of_whole_pushes(routing.gate)
        super().__init__(
            options, trainer, module, transport, routing, optimizers,
            rank=rank, ranks=ranks, prefetch=False, lanes=chosen.graphs,
        )  # fmt: skip
        self._updates = PushedUpdates(self.client, self._router, chosen, lambda: trainer.global_step)
        self.threads = ThreadedTraining(trainer, module, chosen, self._updates, stopping=partial(stopping, trainer))

    def install(self) -> None:
        """Put the threads' loop in the place of Lightning's, and the server's count in that of the schedules' own."""
        for part in (self._clock, Threaded(self._trainer, self.threads)):
            if part is not None:
                part.install()
                self._installed.callback(part.remove)

    def begin(self) -> None:
        """Start from the server's weights, and start the threads."""
        super().begin()
        self._optimizers[0]._opt_called = True  # type: ignore[attr-defined]  # schedules look here
        self._updates.restart()
        self.threads.start()

    def begin_batch(self, batch: Any, loop: ConductedEpochLoop | None) -> None:
        """The loop has all that there is to know."""

    def close_window(self) -> None:
        """The threads have pushed it."""

    def bring_back_state(self) -> dict[str, Any]:
        """See :meth:`RankTraining.bring_back_state`."""
        self.threads.stop()
        return super().bring_back_state()


class ThreadsAlone(_WithThreads):
    """Threads of one rank without a server: they update the module's own weights, lock-free.

    Args:
        options: the strategy's.
        trainer: of the rank.
        module: that it trains.
        routing: names the gate, of which each layer has its own.
        optimizers: the module's own, bare.

    Raises:
        MisconfigurationException: optimizer or parameters cannot go with threads.
        ConfigurationError: the module cannot be copied.
    """

    unpushed = 0

    def __init__(
        self,
        options: G2AsyncOptions,
        trainer: Trainer,
        module: LightningModule,
        routing: G2RoutingCallback,
        optimizers: Sequence[Optimizer],
    ) -> None:
        refuse_stepping(list(optimizers), module)
        chosen = thread_options(options, trainer)
        gate = None if routing.name == "none" else routing.name
        apply = LocalApply(
            optimizers[0], dict(module.named_parameters()), chosen, gate=gate, gate_options=routing.options
        )
        self.updates = OwnUpdates(apply)
        self.threads = ThreadedTraining(trainer, module, chosen, self.updates, stopping=partial(stopping, trainer))
        self._trainer = trainer
        self._installed = ExitStack()

    def install(self) -> None:
        """Put the threads' loop in the place of Lightning's."""
        part = Threaded(self._trainer, self.threads)
        part.install()
        self._installed.callback(part.remove)

    def remove(self) -> None:
        """Give Lightning's objects back as they were."""
        self._installed.close()

    def begin(self) -> None:
        """Start the threads."""
        self.threads.start()

    def bring_back_state(self) -> dict[str, Any]:
        """The optimizer has its state; end the threads."""
        self.threads.stop()
        return {}


class SettledCheckpoints:
    """Lets all batches that have begun come through before a checkpoint is put together.

    Args:
        trainer: the trainer that trains.
        threads: train.
    """

    def __init__(self, trainer: Trainer, threads: ThreadedTraining) -> None:
        self._connector = trainer._checkpoint_connector
        self._threads = threads
        self._patches = Patches()

    def install(self) -> None:
        """Stand before whatever puts checkpoints together now."""
        original = self._connector.dump_checkpoint

        def dump_checkpoint(weights_only: bool | None = None) -> dict[str, Any]:
            if self._threads.running:
                self._threads.settle()
            checkpoint: dict[str, Any] = original(weights_only)
            return checkpoint

        self._patches.put(self._connector, "dump_checkpoint", dump_checkpoint)

    def remove(self) -> None:
        """Leave checkpoints to others again."""
        self._patches.remove()
