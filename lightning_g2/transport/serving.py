"""The server's end: what a server process does when ranks call it."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

from lightning_g2 import errors
from lightning_g2.server import Parcel, ServerSetup, ServerSnapshot, pack, unpack
from lightning_g2.transport.channel import ChannelServer, Settle
from lightning_g2.transport.chunks import Depot, Hollow
from lightning_g2.transport.failed import Failed
from lightning_g2.transport.heartbeat import ProcessPlace, Watch
from lightning_g2.transport.host import Gathered, PushReply, ServerHost, SyncReply, Weights
from lightning_g2.transport.membership import connect_store, join_rpc, ready_key
from lightning_g2.transport.process import ServerAddress
from lightning_g2.transport.segment import Segment
from lightning_g2.values import PushPacket

# RPC calls functions, not methods, so what a server serves stands here; in other processes it stays empty.
_host: ServerHost | None = None
_watch: Watch | None = None  # on server 0
_others: tuple[str, ...] = ()  # names of the other servers, on server 0
_segments: dict[int, Segment] = {}
_outgoing: dict[int, Tensor] = {}  # weights on their way to ranks of other hosts
_depot = Depot()

_CALLS = frozenset({
    "layout", "assign", "adopt", "view", "edit", "pull", "snapshot", "drain", "totals", "check", "fail", "leave",
    "live_ranks", "drop", "dropped", "epoch",
})  # fmt: skip
"""The calls that a server answers at once; any other name is refused."""

_ALWAYS = frozenset({"check", "fail", "leave", "dropped"})
"""Those of them that a rank may still make after it was dropped."""

_WAITING_CALLS = ("sync", "ticket", "gather")
"""The calls whose answer may take any time."""


def serve(address: ServerAddress) -> None:
    """Join the session as its server; returns once all members are connected, and serves from then on."""
    global _host, _watch, _others
    torch.set_num_threads(address.threads)
    _warm_up()
    _host = ServerHost(address.ranks)
    ChannelServer(address.server_name, address.secret.encode(), answer_in_channel).start()
    store = connect_store(address)
    store.set(ready_key(address), "1")
    if address.server == 0:
        _others = tuple(address.name_of(server) for server in range(1, address.servers))
        _watch = Watch(address.heartbeat_timeout_s, drop)
    join_rpc(address, store, address.server_name, address.ranks + address.server)
    if _watch is not None:
        _watch.start()


def beat(rank: int, place: ProcessPlace) -> dict[int, str]:
    """A rank gives server 0 a sign of life; returns the ranks that were dropped, each with what was seen of it."""
    assert _host is not None
    assert _watch is not None
    dropped = _host.dropped()
    if rank in _host.live_ranks():
        _watch.beat(rank, place)
    return dropped


def drop(rank: int, reason: str) -> bool:
    """Go on without a rank; where that cannot be, the job fails. Returns whether it goes on."""
    assert _host is not None
    goes_on = _host.drop(rank, reason)
    for name in _others:
        with suppress(RuntimeError):  # a server that is lost ends the job by itself
            rpc.rpc_async(name, drop, args=(rank, reason))
    return goes_on


def _warm_up() -> None:
    # The first step of a process imports torch's compiler lazily, which takes more than a second.
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.0).step()


def answer(name: str, limit: int, rank: int, *args: Any) -> Any:
    """Answer one of the calls that need no waiting."""
    assert _host is not None
    try:
        if name not in _CALLS:
            raise errors.ProtocolError(f"call {name!r}: a server answers only {', '.join(sorted(_CALLS))}")
        if name not in _ALWAYS:
            _host.admit(rank)
        if name == "drop":
            return drop(*args)
        if name == "leave" and _watch is not None:
            _watch.forget(rank)
        with torch.no_grad():
            return _wrapped(getattr(_host, name)(*map(_depot.collect, args)), limit, rank)
    except Exception as error:
        return Failed.of(error)


def _wrapped(value: Any, limit: int, rank: int) -> Any:
    """An answer that fits a message: where its tensors are too large, they stay here until they are fetched."""
    if not isinstance(value, (PushReply, SyncReply, Gathered, Weights, ServerSnapshot)):
        return value
    parcel = pack(value, copy=False)
    return parcel if parcel.size_bytes <= limit else _depot.lay_out(parcel, rank)


def expect(hollow: Hollow) -> None:
    """Make room for a value that comes in pieces."""
    _depot.expect(hollow)


def take(key: tuple[int, int], start: int, piece: Tensor) -> None:
    """Take in a piece."""
    _depot.take(key, start, piece)


def fetch(key: tuple[int, int], start: int, stop: int) -> Tensor:
    """Hand out a piece."""
    return _depot.fetch(key, start, stop)


def configure(setup: ServerSetup | Hollow | Parcel) -> Failed | None:
    """Take parameters and optimizers over."""
    assert _host is not None
    try:
        _host.configure(unpack(setup) if isinstance(setup, Parcel) else _depot.collect(setup))
        _give_memory_back()
    except Exception as error:
        return Failed.of(error)
    return None


def _give_memory_back() -> None:
    # The C library keeps, for each thread, the pieces that the parameters have come in; glibc can be asked not to.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def open_segment(rank: int, least_bytes: int) -> tuple[int, int, int] | Failed:
    """Make a segment for a rank of this host: this process's id, the segment's descriptor here, its size in bytes."""
    assert _host is not None
    try:
        size_bytes = max(_host.size_bytes(), least_bytes)
        fresh = Segment.create(size_bytes)
        if (outgrown := _segments.pop(rank, None)) is not None:
            os.close(outgrown.descriptor)
        _segments[rank] = fresh
    except Exception as error:
        return Failed.of(error)
    return fresh.pid, fresh.descriptor, size_bytes


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push(limit: int, packet: PushPacket, gradients: Tensor | Hollow | None) -> torch.futures.Future[Any]:
    """Take a packet of a push in; it may have to wait for its round to end."""
    future, settle = _awaited(limit, packet.rank)
    assert _host is not None
    host = _host
    try:
        with torch.no_grad():
            into = _outgoing.get(packet.rank)
            if into is None or into.numel() != host.size_bytes():
                into = _outgoing[packet.rank] = torch.empty(host.size_bytes(), dtype=torch.uint8)
            _depot.borrow(gradients, lambda whole: host.push(packet, whole, settle, into))
    except Exception as error:
        settle(error)
    return future


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def wait_for(name: str, limit: int, rank: int, *args: Any) -> torch.futures.Future[Any]:
    """Answer one of the calls that may take any time: a blocked call would hold one of the server's few threads."""
    future, settle = _awaited(limit, rank)
    try:
        if name not in _WAITING_CALLS:
            raise errors.ProtocolError(f"call {name!r}: a server lets ranks wait for {', '.join(_WAITING_CALLS)} only")
        assert _host is not None
        with torch.no_grad():
            getattr(_host, name)(*map(_depot.collect, args), settle)
    except Exception as error:
        settle(error)
    return future


def _awaited(limit: int, rank: int) -> tuple[torch.futures.Future[Any], Settle]:
    """An answer to come, and what takes it."""
    future: torch.futures.Future[Any] = torch.futures.Future()

    def settle(reply: Any) -> None:
        future.set_result(Failed.of(reply) if isinstance(reply, Exception) else _wrapped(reply, limit, rank))

    return future, settle


def answer_in_channel(name: str, arguments: Any, settle: Settle) -> None:
    """Answer one of the small calls of every step, which ranks of this host make over a socket."""
    assert _host is not None
    try:
        with torch.no_grad():
            match name:
                case "view":
                    settle(_host.view())
                case "ticket":
                    rank, request = arguments
                    _host.ticket(rank, request, settle)
                case "push":
                    packet, start, size_bytes = arguments
                    _push_in_segment(packet, start, size_bytes, settle)
                case _:
                    raise errors.ProtocolError(f"call {name!r}: a channel carries view, ticket and push only")
    except Exception as error:
        settle(error)


def _push_in_segment(packet: PushPacket, start: int, size_bytes: int, settle: Settle) -> None:
    assert _host is not None
    segment = _segments[packet.rank]

    def settle_without_weights(reply: PushReply | Exception) -> None:  # they lie in the segment
        if isinstance(reply, Exception):
            settle(reply)
        else:
            settle((reply.receipt, None if reply.weights is None else reply.weights.version))

    gradients = None if packet.rejected else segment.gradients[start : start + size_bytes]
    _host.push(packet, gradients, settle_without_weights, segment.weights)
