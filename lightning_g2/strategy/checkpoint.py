"""Checkpoints of one server version, and one choice of checkpoint for all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_g2.errors import ServerLostError
from lightning_g2.server import ServerSnapshot, outer_state, to_cpu, unpack
from lightning_g2.strategy.client import RankClient
from lightning_g2.strategy.local_steps import OUTER_KEY
from lightning_g2.strategy.loop import ConductedEpochLoop
from lightning_g2.strategy.optimizer_state import borrowed_state
from lightning_g2.strategy.patches import Patches

CADENCE_KEY = "lightning_g2_rounds"
"""Entry of a checkpoint: what ``rounds="auto"`` has measured and chosen."""

_log = logging.getLogger("lightning.pytorch.g2async")


def server_entries(snapshot: ServerSnapshot, *, outer: bool) -> dict[str, Any]:
    """Entries of a checkpoint that are the server's own: its outer optimizer, and what it knows of arrivals.

    Args:
        snapshot: of the server.
        outer: whether it has an outer optimizer.
    """
    entries: dict[str, Any] = {OUTER_KEY: outer_state(snapshot)} if outer else {}
    return entries if snapshot.cadence is None else {**entries, CADENCE_KEY: dict(snapshot.cadence)}


class CheckpointSource:
    """Rank 0's checkpoints while it trains: weights and moments come from the server, both of one version.

    Other ranks push all the while. What a checkpoint holds is therefore one answer of the server, taken when Lightning
    begins to put the checkpoint together and dropped when it is done; schedules by the job's steps are brought to that
    moment. All tensors that training changes are copies, on the CPU: later pushes, and a writer that works in the
    background, do not meet. The gate's state is not kept: it is one rank's memory of its last ten pushes or so.

    Args:
        trainer: the trainer that trains.
        client: this rank's end of the protocol.
        optimizers: the module's optimizers, in the client's order.
        advance_schedules: brings schedules that follow the job to a number of its optimizer steps.
        loop: knows the job's counts; None where this rank is alone.
    """

    def __init__(
        self,
        trainer: Trainer,
        client: RankClient,
        optimizers: Sequence[Optimizer],
        advance_schedules: Callable[[int], None],
        loop: ConductedEpochLoop | None,
    ) -> None:
        self._trainer = trainer
        self._connector = trainer._checkpoint_connector
        self._client = client
        self._loop = loop
        self._optimizers = list(optimizers)
        self._advance_schedules = advance_schedules
        self._weights: dict[str, Tensor] | None = None
        self._snapshot: ServerSnapshot | None = None
        self._patches = Patches()

    def install(self) -> None:
        """Stand where Lightning puts checkpoints together; on rank 0 only, other ranks write none."""
        original = self._connector.dump_checkpoint

        def dump_checkpoint(weights_only: bool | None = None) -> dict[str, Any]:
            with self._one_version():
                checkpoint: dict[str, Any] = original(weights_only)
                if self._loop is not None and self._snapshot is not None:
                    self._loop.put_job_counts(checkpoint, self._snapshot.cursor, buffered=self._snapshot.buffered)
                if self._snapshot is not None and "optimizer_states" in checkpoint:
                    checkpoint.update(server_entries(self._snapshot, outer=self._client.local is not None))
                return checkpoint

        self._patches.put(self._connector, "dump_checkpoint", dump_checkpoint)

    def remove(self) -> None:
        """Leave checkpoints to Lightning again."""
        self._patches.remove()

    def module_state(self, module: LightningModule, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The module's state dict with the server's weights; outside a checkpoint what the module has.

        Args:
            module: the module.
            read: makes the state dict. It runs with the server's weights in the module's parameters, so that a state
                dict of the user's own making is of that version, too.
        """
        if self._weights is None:
            return read()
        with _values_in_place(self._client.named_parameters(), self._weights):
            state = read()
        live = {buffer.data_ptr() for buffer in module.buffers()}
        return {key: _copied(value) if _lies_in(value, live) else value for key, value in state.items()}

    def optimizer_state(self, optimizer: Optimizer, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """An optimizer's state dict with the server's moments; outside a checkpoint what the optimizer has."""
        if self._client.local is not None:  # it has stepped here
            return read() if self._weights is None else to_cpu(read())
        index = next((i for i, other in enumerate(self._optimizers) if other is optimizer), None)
        snapshot = self._snapshot
        if snapshot is None or index is None:
            return read()
        parts = unpack(snapshot.optimizers[index], self._client.server_parameters(snapshot.layout))
        with borrowed_state(optimizer, parts, snapshot.evolved[index]):
            return read()

    def _take(self) -> None:
        if self._trainer.training and self._trainer.state.status == "running":
            self._send_own()  # not in a validation, for which a callback may have swapped others in
        # The snapshot's tensors share one buffer, which torch.save refuses for mixed dtypes: each gets its own.
        weights, self._snapshot = self._client.snapshot()
        self._weights = {name: weight.clone() for name, weight in weights.items()}
        if self._loop is not None:
            self._advance_schedules(self._loop.steps_at(self._snapshot.steps))

    def _send_own(self) -> None:
        """Send what this rank has done to the weights; its own steps only between windows, since new weights come."""
        local = self._client.local
        if local is None or local.window_open or not local.flush():
            self._client.send_edits()

    @contextmanager
    def _one_version(self) -> Iterator[None]:
        if not self._client.configured or self._weights is not None:
            yield
            return
        try:
            self._take()
        except ServerLostError as error:
            _log.warning(f"checkpoint: this rank's own weights, without optimizer state: {error}")
        try:
            yield
        finally:
            self._weights = self._snapshot = None


class ResumeChoice:
    """Which checkpoint is loaded: what rank 0 has chosen, on every rank.

    Each rank resolves ``ckpt_path="last"`` by itself, and finds another file, or none, where it sees other directories.

    Args:
        trainer: the trainer that is about to run.
        broadcast: gives rank 0's object to every rank; called when the process group is up.
    """

    def __init__(self, trainer: Trainer, broadcast: Callable[[Any], Any]) -> None:
        self._connector = trainer._checkpoint_connector
        self._broadcast = broadcast
        self._patches = Patches()

    def install(self) -> None:
        """Share rank 0's path where Lightning is about to load from it."""
        original = self._connector.resume_start

        def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
            chosen = self._broadcast(checkpoint_path)
            if chosen != checkpoint_path:
                _log.warning(f"checkpoint {checkpoint_path} is this rank's choice; rank 0's is loaded: {chosen}")
            original(chosen, weights_only)

        self._patches.put(self._connector, "resume_start", resume_start)

    def remove(self) -> None:
        """Leave the choice to each rank again."""
        self._patches.remove()


def without_moments(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint whose optimizer states hold hyper-parameters only: the server, fed by rank 0, has the moments."""
    states = [{**state, "state": {}} if "state" in state else state for state in checkpoint["optimizer_states"]]
    return {**checkpoint, "optimizer_states": states}


@contextmanager
def _values_in_place(parameters: Mapping[str, torch.nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Let parameters point to other values; no data moves and autograd sees no change."""
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = values[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]


def _lies_in(value: Any, addresses: set[int]) -> bool:
    return isinstance(value, Tensor) and value.data_ptr() in addresses


def _copied(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)
