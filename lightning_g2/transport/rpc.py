"""Transport over torch.distributed.rpc (TensorPipe): the ranks' end."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import rpc

from lightning_g2.errors import G2Error, ServerLostError, ServerStartError
from lightning_g2.server import BEATS, ParameterLayout, Parcel, ServerSetup, ServerSnapshot, pack, unpack
from lightning_g2.transport import chunks, serving
from lightning_g2.transport.base import Pending, Transport
from lightning_g2.transport.chunks import Hollow, Room
from lightning_g2.transport.failed import Failed
from lightning_g2.transport.heartbeat import HeartbeatThread, ProcessPlace
from lightning_g2.transport.host import Gathered, PushReply, SyncReply, Weights
from lightning_g2.transport.membership import connect_store, failure_key, join_rpc, leave_rpc, ready_key
from lightning_g2.transport.process import ServerAddress, ServerProcess
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

_KEPT_SIZES = 4
"""Sizes of gradient buffers that a rank keeps at one place."""

_LAST_WORDS_S = 3.0
"""Limit of a call to a server that has been lost once: that this rank fails or leaves, should it still listen."""

_LOOK_S = 5.0
"""A call that may take any time: how often to see whether the server still answers, seconds."""


class _Call(Pending[T]):
    def __init__(
        self, transport: RpcTransport, future: torch.futures.Future[Any], *, limited: bool, room: Room | None
    ) -> None:
        self._transport = transport
        self._room = room
        self._future = future
        self._arrived: threading.Event | None = None
        if not limited:
            self._arrived = arrived = threading.Event()
            future.add_done_callback(lambda _: arrived.set())

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> T:
        # A host that is cut off closes no connection, so that what waits for it would wait without end.
        while self._arrived is not None and not self._arrived.wait(_LOOK_S):
            self._transport.check()
        try:
            reply = self._future.wait()
        except RuntimeError as error:
            raise self._transport._lost(error) from error
        if isinstance(reply, Failed):
            raise reply.raised()
        if isinstance(reply, Hollow):
            reply = self._transport._fetched(reply, self._room)
        return cast(T, unpack(reply) if isinstance(reply, Parcel) else reply)


def _in_flight(calls: Iterable[_Call[T]]) -> Iterator[T]:
    """Answers in the order of the calls; a call is made when the iterable gives it, some ahead of their answers."""
    under_way: deque[_Call[T]] = deque()
    for call in calls:
        under_way.append(call)
        if len(under_way) == chunks.IN_FLIGHT:
            yield under_way.popleft().wait()
    while under_way:
        yield under_way.popleft().wait()


class RpcTransport(Transport):
    """A rank's connection to one server over TensorPipe.

    Args:
        address: the session to join.
        rank: this rank.
        server: the server process, on the rank that has started it.
        timeout_s: limit of one call, seconds; a sync point may take any time.
        rounds: a push waits for its round to end, and may take any time, too.
        on_drop: called from another thread with each rank that was dropped from the job, and the reason.
    """

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
        self._address = address
        self._rank = rank
        self._server = server
        self._timeout_s = timeout_s
        self._push_timeout_s = None if rounds else timeout_s
        self._connected = False
        self._left = False
        self._gone = False
        self._buffers: dict[tuple[int, int], list[Tensor]] = {}
        self._weights = Room()
        self._numbers = itertools.count()
        self._heartbeat: HeartbeatThread | None = None
        if address.server == 0:
            interval_s = address.heartbeat_timeout_s / BEATS
            self._heartbeat = HeartbeatThread(self._beat, interval_s=interval_s, on_drop=on_drop)

    def start(self) -> None:
        """Wait for the server's sign of life, then join the session with all other ranks."""
        self.await_server()
        try:
            store = connect_store(self._address)
            join_rpc(self._address, store, self._address.rank_name(self._rank), self._rank)
        except RuntimeError as error:
            raise self._not_started(f"RPC could not be initialised: {error}") from error
        self._connected = True
        if self._heartbeat is not None:
            self._heartbeat.start()

    def configure(self, setup: ServerSetup) -> None:
        """See :meth:`Transport.configure`."""
        parcel = pack(setup, copy=False)
        self._pending(
            serving.configure, parcel if parcel.size_bytes <= chunks.CHUNK_BYTES else self._sent(parcel)
        ).wait()

    def layout(self) -> ParameterLayout:
        """See :meth:`Transport.layout`."""
        return cast(ParameterLayout, self._call("layout"))

    def assign(self, layout: ParameterLayout, servers: int, *, anew: bool = False) -> dict[str, int]:
        """See :meth:`Transport.assign`."""
        return cast("dict[str, int]", self._call("assign", layout, servers, anew))

    def adopt(self, layout: ParameterLayout, values: Tensor) -> ParameterLayout:
        """See :meth:`Transport.adopt`."""
        return cast(ParameterLayout, self._call("adopt", layout, self._shippable(values)))

    def view(self) -> ServerView:
        """See :meth:`Transport.view`."""
        return cast(ServerView, self._call("view"))

    def gradient_buffer(self, size_bytes: int, offset: int = 0) -> Tensor:
        """See :meth:`Transport.gradient_buffer`; the one before may still be under way."""
        # Exactly as large: RPC sends a tensor's whole storage. Two in turn, so that one can be filled while the other
        # is being sent. Sizes change from push to push where gradients are sparse or parameters unused, so only a few
        # are kept of each place.
        key = offset, size_bytes
        pair = self._buffers.pop(key, [])
        if len(pair) < 2:
            on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            pair.append(torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=on_gpu))
        else:
            pair.reverse()
        self._buffers[key] = pair
        here = [other for other in self._buffers if other[0] == offset]
        if len(here) > _KEPT_SIZES:
            del self._buffers[here[0]]
        return pair[-1]

    def push(self, packet: PushPacket, gradients: Tensor | None) -> Pending[PushReply]:
        """See :meth:`Transport.push`."""
        shipped = None if gradients is None else self._shippable(gradients)
        timeout_s = self._push_timeout_s or 0.0
        return self._pending(serving.push, chunks.CHUNK_BYTES, packet, shipped, timeout_s=timeout_s, room=self._weights)

    def edit(self, edit: WeightEdit, values: Tensor, before: Tensor) -> None:
        """See :meth:`Transport.edit`."""
        self._call("edit", edit, self._shippable(values), self._shippable(before))

    def pull(self) -> Weights:
        """See :meth:`Transport.pull`."""
        return cast(Weights, self._call("pull"))

    def sync(self, point: str) -> SyncReply:
        """See :meth:`Transport.sync`."""
        return cast(SyncReply, self._waited("sync", self._rank, point).wait())

    def ticket(self, request: TicketRequest) -> Ticket:
        """See :meth:`Transport.ticket`."""
        return cast(Ticket, self._waited("ticket", self._rank, request).wait())

    def gather(self, kind: str, share: Tensor | None) -> Gathered:
        """See :meth:`Transport.gather`."""
        shipped = None if share is None else self._shippable(share)
        return cast(Gathered, self._waited("gather", self._rank, kind, shipped).wait())

    def snapshot(self) -> ServerSnapshot:
        """See :meth:`Transport.snapshot`."""
        return cast(ServerSnapshot, self._call("snapshot"))

    def drain(self) -> list[PushRecord]:
        """See :meth:`Transport.drain`."""
        return cast("list[PushRecord]", self._call("drain"))

    def totals(self) -> dict[int, RankTotals]:
        """See :meth:`Transport.totals`."""
        return cast("dict[int, RankTotals]", self._call("totals"))

    def epoch(self) -> EpochRecord | None:
        """See :meth:`Transport.epoch`."""
        return cast("EpochRecord | None", self._call("epoch"))

    def check(self) -> None:
        """See :meth:`Transport.check`."""
        self._call("check")

    def fail(self, rank: int, reason: str, stopped: bool = False) -> None:
        """See :meth:`Transport.fail`."""
        self._call("fail", rank, reason, stopped)

    def drop(self, rank: int, reason: str) -> bool:
        """See :meth:`Transport.drop`."""
        return cast(bool, self._call("drop", rank, reason))

    def dropped(self) -> dict[int, str]:
        """See :meth:`Transport.dropped`."""
        return cast("dict[int, str]", self._call("dropped"))

    def leave(self, *, done: bool = False) -> None:
        """See :meth:`Transport.leave`."""
        self._left = True
        self._call("leave", self._rank, done)

    def live_ranks(self) -> tuple[int, ...]:
        """See :meth:`Transport.live_ranks`."""
        return cast("tuple[int, ...]", self._call("live_ranks"))

    def close(self) -> None:
        """Leave, and end RPC in this process without waiting for any peer."""
        if not self._connected:
            return
        if not self._left:
            with suppress(G2Error):  # where the server is gone or the job has failed, nobody is left to tell
                self.leave()
        self._connected = False
        if self._heartbeat is not None:
            self._heartbeat.stop()
        leave_rpc(self._address)

    def _beat(self) -> dict[int, str]:
        arguments = self._rank, ProcessPlace.own()
        timeout_s = self._address.heartbeat_timeout_s
        dropped = rpc.rpc_sync(self._address.server_name, serving.beat, args=arguments, timeout=timeout_s)
        return cast("dict[int, str]", dropped)

    def _call(self, name: str, *args: Any) -> Any:
        return self._asked(name, *args).wait()

    def _asked(self, name: str, *args: Any) -> _Call[Any]:
        return self._pending(serving.answer, name, chunks.CHUNK_BYTES, self._rank, *args)

    def _waited(self, name: str, *args: Any, timeout_s: float = 0.0) -> _Call[Any]:
        return self._pending(serving.wait_for, name, chunks.CHUNK_BYTES, self._rank, *args, timeout_s=timeout_s)

    def _shippable(self, tensor: Tensor) -> Tensor | Hollow:
        """The tensor where it fits a message; else it is sent in pieces, and this names it."""
        return tensor if tensor.nbytes <= chunks.CHUNK_BYTES else self._sent(pack(tensor, copy=False))

    def _sent(self, parcel: Parcel) -> Hollow:
        hollow = Hollow.of(parcel, (self._rank, next(self._numbers)))
        self._pending(serving.expect, hollow).wait()
        pieces = chunks.pieces(parcel.size_bytes)
        read = (chunks.read_piece(parcel.tensors, start, stop) for start, stop in pieces)
        calls = (self._pending(serving.take, hollow.key, at[0], piece) for at, piece in zip(pieces, read, strict=True))
        for _ in _in_flight(calls):
            pass
        return hollow

    def _fetched(self, hollow: Hollow, room: Room | None) -> Parcel:
        parcel = hollow.allocate() if room is None else room.take(hollow)
        pieces = chunks.pieces(parcel.size_bytes)
        calls = (self._pending(serving.fetch, hollow.key, start, stop) for start, stop in pieces)
        for (start, _), piece in zip(pieces, _in_flight(calls), strict=True):
            chunks.write_piece(parcel.tensors, start, piece)
        return parcel

    def _pending(
        self, function: Any, *args: Any, timeout_s: float | None = None, room: Room | None = None
    ) -> _Call[Any]:
        if not self._connected:
            raise ServerLostError(
                "this rank is not connected to a server: the transport is closed or was never started"
            )
        timeout = self._timeout_s if timeout_s is None else timeout_s
        if self._gone:
            timeout = min(_LAST_WORDS_S, timeout or _LAST_WORDS_S)
        try:
            future = rpc.rpc_async(self._address.server_name, function, args=args, timeout=timeout)
        except RuntimeError as error:
            raise self._lost(error) from error
        return _Call(self, future, limited=timeout > 0, room=room)

    def _lost(self, error: Exception) -> ServerLostError:
        how = self._server.wait(1.0) if self._server is not None else None
        why = str(error).partition("\n")[0] or type(error).__name__
        text = how or f"{self._address.server_name} does not answer ({why})"
        self._gone = True
        return ServerLostError(
            f"server {self._address.server} was lost, and with it the weights since the last checkpoint; resume with "
            f"trainer.fit(..., ckpt_path=<last checkpoint>). What happened: {text}"
        )

    def await_server(self) -> None:
        """See :meth:`Transport.await_server`; where it does not come up, all ranks learn that from the store."""
        store = connect_store(self._address)
        failure = failure_key(self._address)
        deadline = time.monotonic() + self._address.timeout_s
        while not store.check([ready_key(self._address)]):
            if self._server is not None and (how := self._server.poll()):
                error = self._not_started(how)
                store.set(failure, str(error))
                raise error
            if store.check([failure]):
                raise ServerStartError(store.get(failure).decode())
            if time.monotonic() > deadline:
                raise self._not_started(f"no sign of life within {self._address.timeout_s:.0f} s")
            time.sleep(0.01)

    def _not_started(self, how: str) -> ServerStartError:
        return ServerStartError(
            f"server {self._address.server} of session {self._address.session} did not start: {how}. Check "
            "that this Python can import torch.distributed.rpc, and raise `start_timeout_s` on a slow or busy host"
        )
