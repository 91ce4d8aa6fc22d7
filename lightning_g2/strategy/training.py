"""What one rank has while ``trainer.fit`` runs: its client, the gate's router, the accumulation window under way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from lightning_g2.callbacks.routing import G2RoutingCallback
from lightning_g2.server import inner_optimizers, staleness_cost_of
from lightning_g2.strategy.checkpoint import server_entries
from lightning_g2.strategy.client import RankClient
from lightning_g2.strategy.layerwise import LayerwisePush
from lightning_g2.strategy.local_steps import LocalStep, LocalSteps
from lightning_g2.strategy.loop import ConductedEpochLoop
from lightning_g2.strategy.nonfinite import NonFiniteGradients
from lightning_g2.strategy.optimizer_proxy import OptimizerProxy
from lightning_g2.strategy.optimizer_state import dtype_of, give_state
from lightning_g2.strategy.options import G2AsyncOptions
from lightning_g2.strategy.recording import WindowNotes
from lightning_g2.strategy.router import PushRouter
from lightning_g2.strategy.schedule import ServerClock
from lightning_g2.strategy.stopping import stopping
from lightning_g2.strategy.sync_points import batch_size
from lightning_g2.transport import Transport


class RankTraining:
    """Turns a rank's backwards and optimizer steps into pushes.

    Args:
        options: the strategy's.
        trainer: of this rank.
        module: that it trains.
        transport: this rank's started connection.
        routing: holds the gate.
        optimizers: the module's own, bare.
        rank: this rank.
        ranks: number of ranks.
        prefetch: whether a push is left under way when a step returns.
        lanes: windows that are under way at once.

    Raises:
        ConfigurationError: the gate, or the optimizers, cannot go with the options.
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
        prefetch: bool,
        lanes: int = 1,
    ) -> None:
        self._trainer = trainer
        self._optimizers = list(optimizers)
        self._samples = 0
        self._window_open = False
        self._installed = ExitStack()
        self._notes = None if options.record is None else WindowNotes(os.path.abspath(options.record))
        self.client = RankClient(
            transport,
            rank=rank,
            ranks=ranks,
            named_parameters=module.named_parameters,
            optimizers=optimizers,
            prefetch=prefetch,
            master_dtype=dtype_of(options.master_dtype),
            weight_by_samples=options.weight_by_samples,
            aggregation=options.aggregation(staleness_cost_of(optimizers, routing.gate.staleness_cost)),
            server_device=options.server_device,
            by_tensor=options.by_tensor,
            wire=dtype_of(options.wire_dtype),
            outer=options.outer_step(ranks),
            notes=self._notes,
            lanes=lanes,
        )
        self._clock = ServerClock(trainer) if options.lr_clock == "server" and ranks > 1 else None
        layerwise = options.push == "layerwise"
        nonfinite = NonFiniteGradients(options.on_nonfinite, rank, layerwise=layerwise)
        self._router = PushRouter(routing, self.client, nonfinite, rank=rank, ranks=ranks, lanes=lanes)
        self._layerwise = self._layerwise_push(options, prefetch) if layerwise else None
        self._local: LocalSteps | None = None
        if options.local_steps > 1:
            self.client.local = self._local = LocalSteps(options.local_steps, self._push_difference)

    def _layerwise_push(self, options: G2AsyncOptions, prefetch: bool) -> LayerwisePush:
        clip = self._trainer.gradient_clip_val
        return LayerwisePush(
            self.client,
            route=lambda: partial(self._router.route, 0, self._trainer.global_step),
            samples=lambda: self._samples,
            needs_view=lambda: self._router.gate.needs_view,
            bucket_bytes=options.bucket_bytes,
            clip_value=None if clip is None else float(clip),
            prefetch=prefetch,
        )

    # --- begin and end ------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Put pushes in the place of the optimizers' steps, and the server's count in that of the schedules' own."""
        parts: list[Any] = [part for part in (self._clock, self._layerwise) if part is not None]
        for index, optimizer in enumerate(self._optimizers):
            for inner, stepped in {"": optimizer, **inner_optimizers(optimizer)}.items():
                if self._local is None:
                    parts.append(OptimizerProxy(stepped, partial(self._push, index, inner)))
                else:
                    parts.append(LocalStep(stepped, index, self._local, partial(self._admit, index)))
        for part in parts:
            part.install()
            self._installed.callback(part.remove)

    def remove(self) -> None:
        """Give Lightning's objects back as they were."""
        self._installed.close()

    def begin(self) -> None:
        """Start from the server's weights."""
        with stopping(self._trainer):
            self.client.begin()
        if self._local is not None:
            self._local.restart()
        if self._clock is not None:
            self._clock.restart()
        self._samples, self._window_open = 0, False

    def stop(self) -> None:
        """An error has come: nothing of this rank may go on by itself."""

    def bring_back_state(self) -> dict[str, Any]:
        """Give the optimizers the state that the server has; returns what further entries a checkpoint needs.

        Ranks that step themselves have each kept their optimizers' state.
        """
        self.client.send_edits()
        _, snapshot = self.client.snapshot()
        if self._local is None:
            parts = snapshot.parts(self.client.server_parameters(snapshot.layout))
            for optimizer, own, evolved in zip(self._optimizers, parts, snapshot.evolved, strict=True):
                give_state(optimizer, own, evolved)
        return server_entries(snapshot, outer=self._local is not None)

    # --- one accumulation window --------------------------------------------------------------------------------------

    def begin_batch(self, batch: Any, loop: ConductedEpochLoop | None) -> None:
        """A batch is about to be trained on; at the start of an accumulation window load arrived weights.

        Args:
            batch: from the loader.
            loop: knows the batch's samples, where the server hands them out.
        """
        if not self._window_open:
            self._window_open = True
            self.client.load_if_arrived()
        if self._local is not None:
            self._local.window_open = True
        self._samples += batch_size(batch)
        if self._notes is not None:
            self._notes.begin_batch(None if loop is None else loop.begin_batch())

    def begin_backward(self) -> None:
        """From here on gradients are those of a training step."""
        if self._layerwise is not None:
            self._layerwise.begin_backward()

    def end_backward(self) -> None:
        """Remember which weights the new gradients belong to."""
        if self._layerwise is not None:
            self._layerwise.end_backward()
        self.client.note_gradients()

    def close_window(self) -> None:
        """The window has ended, with or without a push."""
        samples, self._samples, self._window_open = self._samples, 0, False
        if self._local is not None:
            self._local.close_window(samples)
        if self._notes is not None:
            self._notes.forget()

    def advance_schedules(self, steps: int) -> None:
        """Bring step-wise schedules to where the job stands.

        Args:
            steps: optimizer steps of the job.
        """
        if self._clock is not None:
            self._clock.advance_to(steps)

    @property
    def pushes(self) -> int:
        """Pushes sent since the start of the training; the last may be under way."""
        return self.client.pushes

    @property
    def unpushed(self) -> int:
        """Optimizer steps that this rank has made itself and not pushed yet."""
        return 0 if self._local is None else self._local.unpushed

    # --- pushes -------------------------------------------------------------------------------------------------------

    def _push(self, optimizer: int, inner: str = "") -> None:
        if self._layerwise is not None:
            with stopping(self._trainer):
                self._layerwise.step(inner)
            self._samples = 0
            return
        samples, self._samples = self._samples, 0
        with stopping(self._trainer):
            self.client.push(
                optimizer,
                partial(self._router.route, optimizer, self._trainer.global_step),
                samples=samples,
                needs_view=self._router.gate.needs_view,
                inner=inner,
            )

    def _push_difference(self, steps: int, samples: int) -> None:
        with stopping(self._trainer):
            self.client.push_difference(
                partial(self._router.route, 0, self._trainer.global_step),
                steps=steps,
                samples=samples,
                needs_view=self._router.gate.needs_view,
            )

    def _admit(self, optimizer: int) -> bool:
        """Whether the gradients that this rank now holds may go into a step of its own."""
        with stopping(self._trainer):
            agreed = self.client.renew()
        gradients = self.client.by_name(self.client.gradients(optimizer))
        return self._router.admit(gradients, self._trainer.global_step) and agreed
