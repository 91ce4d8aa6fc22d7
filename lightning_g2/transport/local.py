"""In-process transport: a rank and its server in one interpreter, for tests and simulation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import torch
from torch import Tensor

from lightning_g2.server import ParameterLayout, ServerSetup, ServerSnapshot
from lightning_g2.transport.base import Pending, Transport
from lightning_g2.transport.host import Gathered, PushReply, ServerHost, SyncReply, Weights
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


class _Reply(Pending[PushReply]):
    def __init__(self, answer: Future[PushReply]) -> None:
        self._answer = answer

    def done(self) -> bool:
        return self._answer.done()

    def wait(self) -> PushReply:
        return self._answer.result()


class LocalTransport(Transport):
    """Calls a :class:`ServerHost` of the same process; several ranks may share it from several threads.

    Args:
        host: the server.
        rank: this rank.
    """

    shares_memory = True

    def __init__(self, host: ServerHost, rank: int) -> None:
        self._host = host
        self._rank = rank
        self._left = threading.Event()

    def start(self) -> None:
        """Nothing to connect."""

    def configure(self, setup: ServerSetup) -> None:
        """See :meth:`Transport.configure`."""
        self._host.configure(setup)

    def layout(self) -> ParameterLayout:
        """See :meth:`Transport.layout`."""
        return self._host.layout()

    def assign(self, layout: ParameterLayout, servers: int, *, anew: bool = False) -> dict[str, int]:
        """See :meth:`Transport.assign`."""
        return self._host.assign(layout, servers, anew)

    def adopt(self, layout: ParameterLayout, values: Tensor) -> ParameterLayout:
        """See :meth:`Transport.adopt`."""
        return self._host.adopt(layout, values)

    def view(self) -> ServerView:
        """See :meth:`Transport.view`."""
        return self._host.view()

    def gradient_buffer(self, size_bytes: int, offset: int = 0) -> Tensor:
        """See :meth:`Transport.gradient_buffer`."""
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def push(self, packet: PushPacket, gradients: Tensor | None) -> Pending[PushReply]:
        """See :meth:`Transport.push`; the reply has arrived when this returns, unless the push waits for its round."""
        with torch.no_grad():
            return _Reply(_asked(lambda settle: self._host.push(packet, gradients, settle)))

    def edit(self, edit: WeightEdit, values: Tensor, before: Tensor) -> None:
        """See :meth:`Transport.edit`."""
        self._host.edit(edit, values, before)

    def pull(self) -> Weights:
        """See :meth:`Transport.pull`."""
        return self._host.pull()

    def sync(self, point: str) -> SyncReply:
        """See :meth:`Transport.sync`."""
        return cast(SyncReply, _awaited(lambda settle: self._host.sync(self._rank, point, settle)))

    def ticket(self, request: TicketRequest) -> Ticket:
        """See :meth:`Transport.ticket`."""
        return cast(Ticket, _awaited(lambda settle: self._host.ticket(self._rank, request, settle)))

    def gather(self, kind: str, share: Tensor | None) -> Gathered:
        """See :meth:`Transport.gather`."""
        return cast(Gathered, _awaited(lambda settle: self._host.gather(self._rank, kind, share, settle)))

    def snapshot(self) -> ServerSnapshot:
        """See :meth:`Transport.snapshot`."""
        return self._host.snapshot()

    def drain(self) -> list[PushRecord]:
        """See :meth:`Transport.drain`."""
        return self._host.drain()

    def totals(self) -> dict[int, RankTotals]:
        """See :meth:`Transport.totals`."""
        return self._host.totals()

    def epoch(self) -> EpochRecord | None:
        """See :meth:`Transport.epoch`."""
        return self._host.epoch()

    def check(self) -> None:
        """See :meth:`Transport.check`."""
        self._host.check()

    def fail(self, rank: int, reason: str, stopped: bool = False) -> None:
        """See :meth:`Transport.fail`."""
        self._host.fail(rank, reason, stopped)

    def drop(self, rank: int, reason: str) -> bool:
        """See :meth:`Transport.drop`."""
        return self._host.drop(rank, reason)

    def dropped(self) -> dict[int, str]:
        """See :meth:`Transport.dropped`."""
        return self._host.dropped()

    def leave(self, *, done: bool = False) -> None:
        """See :meth:`Transport.leave`."""
        self._left.set()
        self._host.leave(self._rank, done)

    def live_ranks(self) -> tuple[int, ...]:
        """See :meth:`Transport.live_ranks`."""
        return self._host.live_ranks()

    def close(self) -> None:
        """Leave, if this rank has not yet."""
        if not self._left.is_set():
            self.leave()


def _awaited(ask: Callable[[Callable[[Any], None]], None]) -> Any:
    """Ask for something that may take any time, and wait for it."""
    return _asked(ask).result()


def _asked(ask: Callable[[Callable[[Any], None]], None]) -> Future[Any]:
    answer: Future[Any] = Future()

    def settle(reply: Any) -> None:
        if isinstance(reply, Exception):
            answer.set_exception(reply)
        else:
            answer.set_result(reply)

    ask(settle)
    return answer
