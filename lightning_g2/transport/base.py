"""What a rank can ask of its servers, whatever carries the question."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from lightning_g2.server import ParameterLayout, ServerSetup, ServerSnapshot
from lightning_g2.transport.host import Gathered, PushReply, SyncReply, Weights
from lightning_g2.values import (
    EpochRecord,
    PushPacket,
    PushRecord,
    RankTotals,
    ServerView,
    Ticket,
    TicketRequest,
    WeightEdit,
)

T = TypeVar("T")


class Pending(ABC, Generic[T]):
    """A reply on its way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the reply, or its error, has arrived."""

    @abstractmethod
    def wait(self) -> T:
        """The reply; raises the server's error, or :class:`~lightning_g2.errors.ServerLostError`."""


class Transport(ABC):
    """One rank's connection to the servers of its job.

    The constructor stores, :meth:`start` connects, :meth:`close` may be called any number of times. Every call may
    raise :class:`~lightning_g2.errors.ServerLostError` and, once a rank has failed,
    :class:`~lightning_g2.errors.PeerFailedError`. Pushes come from one thread at a time; a view, a ticket or telemetry
    may be asked for by another meanwhile.

    Class attributes:
        shares_memory: asking for the new weights of a few parameters (``PushPacket.fresh``) moves no others.
    """

    shares_memory: ClassVar[bool] = False

    def await_server(self) -> None:  # noqa: B027 - there may be nothing to wait for
        """Wait for the server's sign of life, before anything connects to it."""

    @abstractmethod
    def start(self) -> None:
        """Connect; returns once the server answers."""

    @abstractmethod
    def configure(self, setup: ServerSetup) -> None:
        """Hand parameters and optimizers over to the server (rank 0, once)."""

    @abstractmethod
    def layout(self) -> ParameterLayout:
        """The parameters that the server owns."""

    @abstractmethod
    def assign(self, layout: ParameterLayout, servers: int, *, anew: bool = False) -> dict[str, int]:
        """Ask server 0 which server shall own each parameter; what it has said once stays, for all ranks.

        Args:
            layout: the parameters.
            servers: number of servers.
            anew: forget what was said before.

        Returns:
            The server by the parameter's name.
        """

    @abstractmethod
    def adopt(self, layout: ParameterLayout, values: Tensor) -> ParameterLayout:
        """Hand further parameters over; no push of this rank may be under way.

        Args:
            layout: the parameters; those that the server has already keep the server's values.
            values: their values, one flat buffer of that layout.

        Returns:
            All parameters that the server owns: what it had, in its order, then the new ones.
        """

    @abstractmethod
    def view(self) -> ServerView:
        """Version, window and scales."""

    @abstractmethod
    def gradient_buffer(self, size_bytes: int, offset: int = 0) -> Tensor:
        """The buffer to fill with the gradients of the next packet: ``uint8``, shape (size_bytes,), on the CPU.

        It must not be written to while a packet is under way that it overlaps.

        Args:
            size_bytes: its size.
            offset: where it begins in this rank's buffer for gradients, bytes; packets that are under way at the same
                time need parts of it that do not overlap.
        """

    @abstractmethod
    def push(self, packet: PushPacket, gradients: Tensor | None) -> Pending[PushReply]:
        """Send a packet of a push; the reply to the last one brings the weights after it.

        Several packets may be under way; they are taken in by their sequence numbers.

        Args:
            packet: the control part.
            gradients: the filled :meth:`gradient_buffer`; None for a rejected packet.
        """

    @abstractmethod
    def edit(self, edit: WeightEdit, values: Tensor, before: Tensor) -> None:
        """Send weights that the rank's own code has changed.

        Args:
            edit: which ones, and the version they were loaded at.
            values: their values, one flat buffer of the layout.
            before: the values they were loaded with, likewise.
        """

    @abstractmethod
    def pull(self) -> Weights:
        """The current weights."""

    @abstractmethod
    def sync(self, point: str) -> SyncReply:
        """Wait at a sync point for the other live ranks; no push of this rank may be outstanding."""

    @abstractmethod
    def ticket(self, request: TicketRequest) -> Ticket:
        """Ask for the next window; waits while there is neither a window for this rank nor a sync point."""

    @abstractmethod
    def gather(self, kind: str, share: Tensor | None) -> Gathered:
        """Take part in a collective of the ranks that meet; see :class:`~lightning_g2.server.Gathering`.

        Args:
            kind: what collective it is.
            share: what this rank brings: ``uint8``, shape (bytes,), on the CPU; None for nothing.
        """

    @abstractmethod
    def snapshot(self) -> ServerSnapshot:
        """Weights and optimizer states of one version."""

    @abstractmethod
    def drain(self) -> list[PushRecord]:
        """Push records of all ranks since the last call."""

    @abstractmethod
    def totals(self) -> dict[int, RankTotals]:
        """Totals by rank since the start of the fit."""

    @abstractmethod
    def epoch(self) -> EpochRecord | None:
        """What of the epoch under way has been trained on so far, as server 0 saw it; None before the first."""

    @abstractmethod
    def check(self) -> None:
        """Raise the job's failure, if there is one."""

    @abstractmethod
    def fail(self, rank: int, reason: str, stopped: bool = False) -> None:
        """Tell the server that a rank (this one, or a dead child) has failed, or was told to stop."""

    @abstractmethod
    def drop(self, rank: int, reason: str) -> bool:
        """Tell the server that another rank's process has ended; returns whether the job goes on without that rank."""

    @abstractmethod
    def dropped(self) -> dict[int, str]:
        """Ranks that were dropped from the job, each with what was seen of it."""

    @abstractmethod
    def leave(self, *, done: bool = False) -> None:
        """Take no further part; the server no longer waits for this rank.

        Args:
            done: this rank has trained on all of its window, and pushed what it gave.
        """

    @abstractmethod
    def live_ranks(self) -> tuple[int, ...]:
        """Ranks that have not left."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect. Never raises for a server that is already gone."""
