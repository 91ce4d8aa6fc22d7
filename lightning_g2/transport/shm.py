"""Transport for ranks on the server's host: shared memory for gradients and weights, a socket for calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from lightning_g2.server import ParameterLayout
from lightning_g2.transport import serving
from lightning_g2.transport.base import Pending
from lightning_g2.transport.channel import Channel
from lightning_g2.transport.failed import Failed
from lightning_g2.transport.host import PushReply, Weights
from lightning_g2.transport.process import ServerAddress, ServerProcess
from lightning_g2.transport.rpc import RpcTransport
from lightning_g2.transport.segment import Segment
from lightning_g2.values import PushPacket, ServerView, Ticket, TicketRequest


class _SegmentCall(Pending[PushReply]):
    def __init__(self, transport: ShmTransport, number: int, weights: Tensor) -> None:
        self._transport = transport
        self._number = number
        self._weights = weights

    def done(self) -> bool:
        return self._transport._arrived(self._number)

    def wait(self) -> PushReply:
        receipt, version = self._transport._answer(self._number, self._transport._push_timeout_s)
        return PushReply(receipt, None if version is None else Weights(version, self._weights))


class ShmTransport(RpcTransport):
    """Shared memory for gradients and weights, a socket for the calls of every step, RPC for all others.

    See :mod:`lightning_g2.transport.segment` and :mod:`lightning_g2.transport.channel`. Arguments are those of
    :class:`RpcTransport`.
    """

    shares_memory = True

    def __init__(
        self,
        address: ServerAddress,
        rank: int,
        *,
        server: ServerProcess | None = None,
        timeout_s: float = 60.0,
        rounds: bool = False,
        on_drop: Callable[[int, str], None] = lambda rank, reason: None,
    ) -> None:
        super().__init__(address, rank, server=server, timeout_s=timeout_s, rounds=rounds, on_drop=on_drop)
        self._segment: Segment | None = None
        self._channel = Channel(address.server_name, address.secret.encode())

    def start(self) -> None:
        """See :meth:`Transport.start`."""
        super().start()
        self._channel.connect()

    def view(self) -> ServerView:
        """See :meth:`Transport.view`."""
        return cast(ServerView, self._answer(self._ask("view"), self._timeout_s))

    def ticket(self, request: TicketRequest) -> Ticket:
        """See :meth:`Transport.ticket`."""
        return cast(Ticket, self._answer(self._ask("ticket", self._rank, request), None))

    def gradient_buffer(self, size_bytes: int, offset: int = 0) -> Tensor:
        """See :meth:`Transport.gradient_buffer`; the buffer lies in this rank's segment."""
        return self._opened(offset + size_bytes).gradients[offset : offset + size_bytes]

    def layout(self) -> ParameterLayout:
        """See :meth:`Transport.layout`; other ranks may have made it larger than the segment is."""
        known = super().layout()
        self._segment = None
        return known

    def adopt(self, layout: ParameterLayout, values: Tensor) -> ParameterLayout:
        """See :meth:`Transport.adopt`; the segment is made anew at the next push, as large as the weights then are."""
        grown = super().adopt(layout, values)
        self._segment = None
        return grown

    def push(self, packet: PushPacket, gradients: Tensor | None) -> Pending[PushReply]:
        """See :meth:`Transport.push`; ``gradients`` is where :meth:`gradient_buffer` said."""
        segment = self._opened()  # a rank's very first push may be a rejected one, which fills no buffer
        start, size_bytes = 0, 0
        if gradients is not None:
            start, size_bytes = gradients.data_ptr() - segment.gradients.data_ptr(), gradients.numel()
        return _SegmentCall(self, self._ask("push", packet, start, size_bytes), segment.weights)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        super().close()
        self._channel.close()

    def _opened(self, least_bytes: int = 0) -> Segment:
        # Indices make a sparse gradient larger than its parameter, where rows are short.
        if self._segment is None or self._segment.gradients.numel() < least_bytes:
            pid, descriptor, size_bytes = self._pending(serving.open_segment, self._rank, least_bytes).wait()
            self._segment = Segment.open(pid, descriptor, size_bytes)
        return self._segment

    def _ask(self, name: str, *arguments: Any) -> int:
        try:
            return self._channel.ask(name, *arguments)
        except (OSError, EOFError) as error:
            raise self._lost(error) from error

    def _arrived(self, number: int) -> bool:
        try:
            return self._channel.arrived(number)
        except (OSError, EOFError):
            return True  # the error, that is

    def _answer(self, number: int, timeout_s: float | None) -> Any:
        try:
            reply = self._channel.answer(number, timeout_s=timeout_s)
        except (OSError, EOFError) as error:  # a TimeoutError is an OSError
            raise self._lost(error) from error
        if isinstance(reply, Failed):
            raise reply.raised()
        return reply
