"""The server's state machine behind a lock: what a server process serves, and what the local transport calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_g2.errors import DroppedError, PeerFailedError, PeerStoppedError, ProtocolError
from lightning_g2.server import (
    Balance,
    Conductor,
    Gathering,
    ParameterLayout,
    Rendezvous,
    ServerSetup,
    ServerSnapshot,
    ServerState,
    TraceWriter,
    fate_of,
)
from lightning_g2.transport.handout import copy_by_tensor
from lightning_g2.transport.turns import Turns
from lightning_g2.values import (
    EpochRecord,
    PushKey,
    PushPacket,
    PushReceipt,
    PushRecord,
    RankTotals,
    ServerView,
    SyncRelease,
    Ticket,
    TicketRequest,
    WeightEdit,
)


@dataclass(frozen=True)
class Weights:
    """Weights of one version.

    Attributes:
        version: the version.
        buffer: begins with a flat buffer of the layout that the rank knows; the server leaves it alone until the last
            packet of this rank's next push.
    """

    version: int
    buffer: Tensor


@dataclass(frozen=True)
class PushReply:
    """Answer to a packet of a push: its receipt and, to the last one, the weights after the push.

    To an earlier packet that asks for it, the weights of its own parameters.
    """

    receipt: PushReceipt
    weights: Weights | None


@dataclass(frozen=True)
class SyncReply:
    """Answer to a rank that waited at a sync point: with whom it was released, and the weights all of them see."""

    release: SyncRelease
    weights: Weights


@dataclass(frozen=True)
class Gathered:
    """What the members of a collective have brought: flat ``uint8`` tensors by rank, without those of nothing."""

    shares: dict[int, Tensor]


Waiter = Callable[[SyncReply | Exception], None]
"""Called once, with the reply or with the error that ended the wait."""

PushWaiter = Callable[[PushReply | Exception], None]
"""Likewise, for a rank that has pushed: at once, unless the push waits for its round to end."""

TicketWaiter = Callable[[Ticket | Exception], None]
"""Likewise, for a rank that asks for its next window."""

GatherWaiter = Callable[[Gathered | Exception], None]
"""Likewise, for a rank in a collective."""

_Due = list[tuple[Callable[[Any], None], Any]]
"""Waiters that are to be called, with what."""


class ServerHost:
    """One server: a :class:`ServerState`, the ranks that wait for something, and the first failure of the job.

    Calls come from many threads; each holds the lock while it touches the state, so pushes are applied in the order
    in which they take it; packets of one rank by their sequence numbers. Waiters are called without it.
    """

    def __init__(self, ranks: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ranks = ranks
        self._clock = clock
        self._lock = threading.Lock()
        self._turns = Turns()
        self._state: ServerState | None = None
        self._by_tensor = False
        self._rendezvous = Rendezvous(range(ranks))
        self._waiters: dict[int, Waiter] = {}
        self._conductor = Conductor(range(ranks))
        self._ticket_waiters: dict[int, TicketWaiter] = {}
        self._push_waiters: dict[PushKey, list[tuple[PushWaiter, Tensor | None]]] = {}
        self._balance = Balance()
        self._gathering: Gathering[Tensor | None] = Gathering(range(ranks))
        self._gather_waiters: dict[int, GatherWaiter] = {}
        self._dropped: dict[int, str] = {}
        self._failure: PeerFailedError | None = None
        self._writer: TraceWriter | None = None

    def configure(self, setup: ServerSetup) -> None:
        """Take parameters and optimizers over from rank 0."""
        with self._lock, torch.no_grad():
            self._state, self._turns, self._by_tensor = ServerState(setup), Turns(), setup.by_tensor
            if self._writer is not None:
                self._writer.close()
            self._writer = None if setup.record is None else TraceWriter(setup.record, self._ranks)
            for gone in set(range(self._ranks)) - self._rendezvous.live:
                self._state.drop(gone, time_s=self._clock())
            self._conductor = Conductor(self._rendezvous.live)

    def layout(self) -> ParameterLayout:
        """The parameters that the server owns."""
        with self._lock:
            return self._live_state().layout

    def assign(self, layout: ParameterLayout, servers: int, anew: bool = False) -> dict[str, int]:
        """The servers of parameters, on the server that coordinates; see :class:`Balance`."""
        with self._lock:
            if anew:
                self._balance = Balance()
            return self._balance.assign(layout.specs, servers)

    def adopt(self, layout: ParameterLayout, values: Tensor) -> ParameterLayout:
        """Take further parameters over, from whichever rank brings them first."""
        with self._lock, torch.no_grad():
            return self._live_state().adopt(layout, values)

    def view(self) -> ServerView:
        """Version, window and scales."""
        with self._lock:
            return self._live_state().view()

    def push(
        self, packet: PushPacket, gradients: Tensor | None, settle: PushWaiter, into: Tensor | None = None
    ) -> None:
        """Take in one packet of a push; ``settle`` is called once, to the last one with the weights after the push.

        That is before this returns, unless the push waits for its round to end: then from whichever thread ends it.

        Args:
            packet: the control part.
            gradients: flat buffer of the gradients; None for a rejected packet. Read before this returns, never later.
            settle: takes the reply, or what went wrong.
            into: buffer for the weights, written just before ``settle`` is called; None hands out one that never
                changes.
        """
        due: _Due = []
        by_tensor: PushReceipt | None = None
        with self._turns.turn(packet), self._lock:
            try:
                self.admit(packet.rank)
                state = self._live_state()
                known = state.knows(packet)
                start_s = self._clock()
                receipt = state.push(packet, gradients, time_s=start_s)
                state.telemetry.applied(packet.rank, self._clock() - start_s)
                if self._writer is not None and not known:
                    self._writer.take(packet, receipt, start_s)
                if packet.last and not known:
                    tickets = self._conductor.pushed(
                        packet.key,
                        buffered=receipt.buffered,
                        steps=packet.steps,
                        fate=fate_of(packet, receipt),
                        samples=packet.samples,
                        window=packet.window,
                    )
                    due += self._issued(tickets)
                if receipt.waits:
                    self._push_waiters.setdefault(packet.key, []).append((settle, into))
                elif not packet.last:
                    due.append((settle, PushReply(receipt, self._part(packet, into) if packet.fresh else None)))
                elif self._by_tensor:
                    by_tensor = receipt
                else:
                    due.append((settle, self._reply(receipt, into)))
            except Exception as error:
                due.append((settle, error))
            due += self._settled()
        _call(due)
        if by_tensor is not None:
            settle(PushReply(by_tensor, Weights(*copy_by_tensor(state, self._lock, into))))

    def edit(self, edit: WeightEdit, values: Tensor, before: Tensor) -> None:
        """Take in weights that a rank's own code has changed; see :meth:`ServerState.edit`."""
        with self._lock:
            self.admit(edit.rank)
            self._live_state().edit(edit, values, before)

    def size_bytes(self) -> int:
        """Bytes of one buffer with all weights."""
        with self._lock:
            return self._configured().size_bytes

    def pull(self) -> Weights:
        """The current weights."""
        with self._lock:
            return Weights(*self._live_state().weights())

    def snapshot(self) -> ServerSnapshot:
        """Weights and optimizer states of one version; allowed after a failure, so that a checkpoint can be written."""
        with self._lock:
            conductor = self._conductor
            return replace(self._configured().snapshot(), cursor=conductor.cursor(), steps=conductor.brought)

    def drain(self) -> list[PushRecord]:
        """Push records since the last call."""
        with self._lock:
            return self._configured().telemetry.drain()

    def totals(self) -> dict[int, RankTotals]:
        """Totals by rank since the start."""
        with self._lock:
            return self._configured().telemetry.totals()

    def epoch(self) -> EpochRecord | None:
        """What of the epoch has been trained on so far; None before the first."""
        with self._lock:
            return self._conductor.record()

    def sync(self, rank: int, point: str, waiter: Waiter) -> None:
        """A rank waits at a sync point; ``waiter`` is called when it is released, or when the job has failed."""
        with self._lock:
            self.admit(rank)
            if self._failure is not None:
                due: _Due = [(waiter, self._failure)]
            else:
                self._waiters[rank] = waiter
                due = self._released(self._rendezvous.arrive(rank, point))
                due += self._issued(self._conductor.rest(rank))
                due += self._settled()
        _call(due)

    def ticket(self, rank: int, request: TicketRequest, waiter: TicketWaiter) -> None:
        """A rank asks for its next window; ``waiter`` is called with it, with a sync point, or with the failure."""
        with self._lock:
            self.admit(rank)
            if self._failure is not None:
                due: _Due = [(waiter, self._failure)]
            else:
                self._ticket_waiters[rank] = waiter
                tickets = self._conductor.request(rank, request)
                if self._state is not None and not self._conductor.pushing(rank):
                    self._state.pause(rank)
                due = self._issued(tickets)
                due += self._settled()
        _call(due)

    def gather(self, rank: int, kind: str, share: Tensor | None, waiter: GatherWaiter) -> None:
        """A rank is in a collective; ``waiter`` is called with the shares of all members that have not left.

        Args:
            rank: the rank.
            kind: what collective it is.
            share: what it brings: ``uint8``, shape (bytes,); None for nothing.
            waiter: takes the shares, or the failure.
        """
        with self._lock:
            self.admit(rank)
            if self._failure is not None:
                due: _Due = [(waiter, self._failure)]
            else:
                brought = self._gathering.bring(rank, kind, share)
                self._gather_waiters[rank] = waiter
                due = self._gathered(brought)
        _call(due)

    def leave(self, rank: int, done: bool = False) -> None:
        """A rank takes no further part; it may have done all of its window."""
        with self._lock:
            if done:
                self._conductor.finish(rank)
            due = self._left(rank)
        _call(due)

    def drop(self, rank: int, reason: str) -> bool:
        """Go on without a rank that has died or is silent; its late calls are refused.

        Args:
            rank: the rank.
            reason: what was seen of it.

        Returns:
            Whether the job goes on. It does not without rank 0, nor where training has not begun.
        """
        with self._lock:
            goes_on = self._failure is None
            if rank not in self._rendezvous.live:
                return goes_on
            if goes_on and rank != 0 and self._state is not None:
                self._dropped[rank] = reason
                refusal = DroppedError(self._refusal(rank))
                waiting = (self._waiters, self._ticket_waiters, self._gather_waiters)
                due: _Due = [(waiters[rank], refusal) for waiters in waiting if rank in waiters]  # it may be but frozen
                due += self._left(rank)
        if not goes_on or rank not in self._dropped:
            self.fail(rank, reason)
            return False
        _call(due)
        return True

    def dropped(self) -> dict[int, str]:
        """Ranks that were dropped, each with what was seen of it."""
        with self._lock:
            return dict(self._dropped)

    def admit(self, rank: int) -> None:
        """Raise an error if a rank was dropped."""
        if rank in self._dropped:
            raise DroppedError(self._refusal(rank))

    def _refusal(self, rank: int) -> str:
        return (
            f"rank {rank} was dropped from the job, which goes on without it: {self._dropped[rank]}; the rank stops, "
            "what it had not pushed is trained on by others"
        )

    def _left(self, rank: int) -> _Due:
        for waiters in (self._waiters, self._ticket_waiters, self._gather_waiters):
            waiters.pop(rank, None)
        partly: list[bool] = []
        due = self._advanced(lambda state: partly.append(state.drop(rank, time_s=self._clock())))
        due += self._issued(self._conductor.leave(rank, partly=any(partly)))
        due += self._released(self._rendezvous.leave(rank))
        due += self._gathered(self._gathering.leave(rank))
        due += self._settled()
        return due

    def fail(self, rank: int, reason: str, stopped: bool = False) -> None:
        """A rank has failed, or was told to stop: everyone who waits, and every later call, gets an error that says so.

        Args:
            rank: the rank.
            reason: its error.
            stopped: it was told to stop, so that every other rank shall stop, too; not a fault.
        """
        with self._lock:
            if rank in self._dropped:
                return  # the job goes on without it
            if self._failure is None and stopped:
                self._failure = PeerStoppedError(f"rank {rank} was told to stop, so the job stops: {reason}")
            elif self._failure is None:
                self._failure = PeerFailedError(f"rank {rank} failed, so the job ends: {reason}")
            self._rendezvous.leave(rank)
            due = self._abandoned()
        _call(due)

    def live_ranks(self) -> tuple[int, ...]:
        """Ranks that have not left."""
        with self._lock:
            return tuple(sorted(self._rendezvous.live))

    def check(self) -> None:
        """Raise the job's failure, if there is one."""
        with self._lock:
            if self._failure is not None:
                raise self._failure

    def _released(self, released: dict[int, tuple[int, ...]]) -> _Due:
        if not released:
            return []
        due = self._advanced(lambda state: state.flush(time_s=self._clock()))
        if self._failure is not None:
            return due
        weights = Weights(*self._configured().weights())
        for rank, ranks in released.items():
            together = self._rendezvous.live == set(ranks)
            if together and self._gathering.members != set(ranks):
                self._gathering = Gathering(ranks)
            release = SyncRelease(weights.version, ranks, self._conductor.steps, together=together)
            due.append((self._waiters.pop(rank), SyncReply(release, weights)))
        return due

    def _gathered(self, brought: dict[int, Tensor | None] | None) -> _Due:
        if brought is None:
            return []
        gathered = Gathered({rank: share for rank, share in brought.items() if share is not None})
        return [(self._gather_waiters.pop(rank), gathered) for rank in brought]

    def _issued(self, tickets: dict[int, Ticket]) -> _Due:
        for rank, ticket in tickets.items():
            if self._state is not None and ticket.batches and not self._conductor.pushing(rank):
                self._state.begin(rank, time_s=self._clock())
        return [(self._ticket_waiters.pop(rank), ticket) for rank, ticket in tickets.items()]

    def _settled(self) -> _Due:
        """Answers to pushes that waited: their round has ended, or nobody is left who could join it."""
        idle = {*self._waiters, *self._conductor.idle()}
        return self._advanced(lambda state: state.close_rounds(idle, time_s=self._clock()))

    def _advanced(self, step: Callable[[ServerState], None]) -> _Due:
        """Let the state take a step by which buffered pushes may be applied; an error in it is the whole job's."""
        if self._state is None:
            return []
        try:
            step(self._state)
        except Exception as error:
            if self._failure is None:
                self._failure = PeerFailedError(
                    f"the server could not apply the pushes of several ranks, so the job ends: {error}"
                )
            return self._abandoned()
        due: _Due = []
        for key, receipt in self._state.settled().items():
            self._conductor.applied(key)
            for settle, into in self._push_waiters.pop(key, ()):
                due.append((settle, self._reply(receipt, into)))
        return due

    def _abandoned(self) -> _Due:
        """Nobody will get what it waits for."""
        pushes = [settle for waiters in self._push_waiters.values() for settle, _ in waiters]
        waiters = [*self._waiters.values(), *self._ticket_waiters.values(), *self._gather_waiters.values(), *pushes]
        self._waiters.clear()
        self._ticket_waiters.clear()
        self._gather_waiters.clear()
        self._push_waiters.clear()
        return [(waiter, self._failure) for waiter in waiters]

    def _reply(self, receipt: PushReceipt, into: Tensor | None) -> PushReply:
        state = self._configured()
        weights = Weights(*state.weights()) if into is None else Weights(state.copy_weights(into), into)
        return PushReply(receipt, weights)

    def _part(self, packet: PushPacket, into: Tensor | None) -> Weights:
        """The weights that a packet has moved; the rest of the buffer stays as it is."""
        state = self._configured()
        if into is None:
            return Weights(*state.weights())
        spans = state.layout.spans()
        for index in packet.present:
            state.copy_span(into, *spans[index])
        return Weights(state.version, into)

    def _configured(self) -> ServerState:
        if self._state is None:
            raise ProtocolError("the server has no parameters yet: rank 0 must configure it before any other call")
        return self._state

    def _live_state(self) -> ServerState:
        if self._failure is not None:
            raise self._failure
        return self._configured()


def _call(due: Sequence[tuple[Callable[[Any], None], Any]]) -> None:
    # Outside the lock: a waiter may send a large answer.
    for waiter, reply in due:
        waiter(reply)
