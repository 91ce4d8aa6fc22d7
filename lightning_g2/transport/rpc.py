"""Transport over torch.distributed.rpc (TensorPipe): the server's end and the ranks' end."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore, rpc  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler

from lightning_g2 import errors
from lightning_g2.errors import G2Error, ServerLostError, ServerStartError
from lightning_g2.server import ParameterLayout, Parcel, ServerSetup, ServerSnapshot, pack, unpack
from lightning_g2.transport import chunks
from lightning_g2.transport.base import Pending, Transport
from lightning_g2.transport.chunks import Depot, Hollow
from lightning_g2.transport.host import PushReply, ServerHost, SyncReply, Weights
from lightning_g2.transport.process import ServerAddress, ServerProcess
from lightning_g2.transport.shm import Segment
from lightning_g2.values import (
    PushPacket,
    PushReceipt,
    PushRecord,
    RankTotals,
    ServerView,
    Ticket,
    TicketRequest,
    WeightEdit,
)

T = TypeVar("T")

_SCHEME = "lightning-g2"
_stores: dict[str, Store] = {}
_host: ServerHost | None = None  # in the server process only: RPC calls functions, not methods
_segments: dict[int, Segment] = {}  # likewise; by rank
_depot = Depot()  # likewise

_CALLS = frozenset({
    "layout", "adopt", "view", "push", "edit", "pull", "snapshot", "drain", "totals", "check", "fail", "leave",
    "live_ranks",
})  # fmt: skip
"""The calls that a server answers at once; any other name is refused."""

_WAITING_CALLS = ("sync", "ticket")
"""The calls whose answer may take any time."""


_KEPT_BUFFERS = 4
"""Gradient buffers that a rank keeps, of different sizes."""


@dataclass(frozen=True)
class _Failed:
    """An error on its way back; RPC itself would flatten its text and lose its type now and then."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> _Failed:
        return cls(type(error).__name__, str(error))

    def raised(self) -> Exception:
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, G2Error):
            return kind(self.message)
        return G2Error(f"the server failed with {self.kind}: {self.message}")


# --- the server's end -------------------------------------------------------------------------------------------------


def serve(address: ServerAddress) -> None:
    """Join the session as its server; returns once all members are connected, and serves from then on."""
    global _host
    torch.set_num_threads(address.threads)
    _warm_up()
    _host = ServerHost(address.ranks)
    store = _connect_store(address)
    store.set(_ready_key(address), "1")
    _init_rpc(address, store, address.server_name, address.ranks)


def _warm_up() -> None:
    # The first step of a process imports torch's compiler lazily, which takes more than a second.
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.0).step()


def _answer(name: str, limit: int, rank: int, *args: Any) -> Any:
    assert _host is not None
    try:
        if name not in _CALLS:
            raise errors.ProtocolError(f"call {name!r}: a server answers only {', '.join(sorted(_CALLS))}")
        with torch.no_grad():
            return _wrapped(getattr(_host, name)(*map(_depot.collect, args)), limit, rank)
    except Exception as error:
        return _Failed.of(error)


def _wrapped(value: Any, limit: int, rank: int) -> Any:
    """An answer that fits a message: where its tensors are too large, they stay here until they are fetched."""
    if not isinstance(value, (PushReply, SyncReply, Weights, ServerSnapshot)):
        return value
    parcel = pack(value, copy=False)
    return parcel if parcel.size_bytes <= limit else _depot.lay_out(parcel, rank)


def _expect(hollow: Hollow) -> None:
    _depot.expect(hollow)


def _take(key: tuple[int, int], start: int, piece: Tensor) -> None:
    _depot.take(key, start, piece)


def _fetch(key: tuple[int, int], start: int, stop: int) -> Tensor:
    return _depot.fetch(key, start, stop)


def _configure(setup: ServerSetup | Hollow | Parcel) -> _Failed | None:
    assert _host is not None
    try:
        whole = unpack(setup) if isinstance(setup, Parcel) else _depot.collect(setup)
        _host.configure(whole)
    except Exception as error:
        return _Failed.of(error)
    return None


def _open_segment(rank: int, least_bytes: int) -> tuple[int, int, int] | _Failed:
    assert _host is not None
    try:
        size_bytes = max(_host.size_bytes(), least_bytes)
        fresh = Segment.create(size_bytes)
        if (outgrown := _segments.pop(rank, None)) is not None:
            os.close(outgrown.descriptor)
        _segments[rank] = fresh
    except Exception as error:
        return _Failed.of(error)
    return fresh.pid, fresh.descriptor, size_bytes


def _push_in_segment(packet: PushPacket, size_bytes: int) -> tuple[PushReceipt, int] | _Failed:
    assert _host is not None
    try:
        segment = _segments[packet.rank]
        gradients = None if packet.rejected else segment.gradients[:size_bytes]
        with torch.no_grad():
            reply = _host.push(packet, gradients, segment.weights)
    except Exception as error:
        return _Failed.of(error)
    return reply.receipt, reply.weights.version


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _wait_for(name: str, limit: int, rank: int, question: Any) -> torch.futures.Future[Any]:
    # Asynchronous: a blocked call would hold one of the server's few threads.
    assert _host is not None
    future: torch.futures.Future[Any] = torch.futures.Future()

    def settle(reply: Any) -> None:
        future.set_result(_Failed.of(reply) if isinstance(reply, Exception) else _wrapped(reply, limit, rank))

    try:
        if name not in _WAITING_CALLS:
            raise errors.ProtocolError(f"call {name!r}: a server lets ranks wait for {', '.join(_WAITING_CALLS)} only")
        getattr(_host, name)(rank, question, settle)
    except Exception as error:
        settle(error)
    return future


# --- the ranks' end ---------------------------------------------------------------------------------------------------


class _Call(Pending[T]):
    def __init__(self, transport: RpcTransport, future: torch.futures.Future[Any]) -> None:
        self._transport = transport
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> T:
        try:
            reply = self._future.wait()
        except RuntimeError as error:
            raise self._transport._lost(error) from error
        if isinstance(reply, _Failed):
            raise reply.raised()
        if isinstance(reply, Hollow):
            reply = self._transport._fetched(reply)
        return cast(T, unpack(reply) if isinstance(reply, Parcel) else reply)


class RpcTransport(Transport):
    """A rank's connection to one server over TensorPipe.

    Args:
        address: the session to join.
        rank: this rank.
        server: the server process, on the rank that has started it.
        timeout_s: limit of one call, seconds; a sync point may take any time.
    """

    def __init__(
        self, address: ServerAddress, rank: int, *, server: ServerProcess | None = None, timeout_s: float = 60.0
    ) -> None:
        self._address = address
        self._rank = rank
        self._server = server
        self._timeout_s = timeout_s
        self._connected = False
        self._left = False
        self._buffers: dict[int, Tensor] = {}
        self._numbers = itertools.count()

    def start(self) -> None:
        """Wait for the server's sign of life, then join the session with all other ranks."""
        store = _connect_store(self._address)
        self._await_server(store)
        try:
            _init_rpc(self._address, store, self._address.rank_name(self._rank), self._rank)
        except RuntimeError as error:
            raise self._not_started(f"RPC could not be initialised: {error}") from error
        self._connected = True

    def configure(self, setup: ServerSetup) -> None:
        """See :meth:`Transport.configure`."""
        parcel = pack(setup, copy=False)
        self._pending(_configure, parcel if parcel.size_bytes <= chunks.CHUNK_BYTES else self._sent(parcel)).wait()

    def layout(self) -> ParameterLayout:
        """See :meth:`Transport.layout`."""
        return cast(ParameterLayout, self._call("layout"))

    def adopt(self, layout: ParameterLayout, values: Tensor) -> ParameterLayout:
        """See :meth:`Transport.adopt`."""
        return cast(ParameterLayout, self._call("adopt", layout, self._shippable(values)))

    def view(self) -> ServerView:
        """See :meth:`Transport.view`."""
        return cast(ServerView, self._call("view"))

    def gradient_buffer(self, size_bytes: int) -> Tensor:
        """See :meth:`Transport.gradient_buffer`."""
        # One for each size, exactly as large: RPC sends a tensor's whole storage. Sizes change from push to push where
        # gradients are sparse or parameters unused, so only a few are kept.
        buffer = self._buffers.pop(size_bytes, None)
        if buffer is None:
            on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            buffer = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._buffers[size_bytes] = buffer
        if len(self._buffers) > _KEPT_BUFFERS:
            del self._buffers[next(iter(self._buffers))]
        return buffer

    def push(self, packet: PushPacket, gradients: Tensor | None) -> Pending[PushReply]:
        """See :meth:`Transport.push`."""
        shipped = None if gradients is None else self._shippable(gradients)
        return self._asked("push", packet, shipped)

    def edit(self, edit: WeightEdit, values: Tensor, before: Tensor) -> None:
        """See :meth:`Transport.edit`."""
        self._call("edit", edit, self._shippable(values), self._shippable(before))

    def pull(self) -> Weights:
        """See :meth:`Transport.pull`."""
        return cast(Weights, self._call("pull"))

    def sync(self, point: str) -> SyncReply:
        """See :meth:`Transport.sync`."""
        return cast(SyncReply, self._awaited("sync", point))

    def ticket(self, request: TicketRequest) -> Ticket:
        """See :meth:`Transport.ticket`."""
        return cast(Ticket, self._awaited("ticket", request))

    def snapshot(self) -> ServerSnapshot:
        """See :meth:`Transport.snapshot`."""
        return cast(ServerSnapshot, self._call("snapshot"))

    def drain(self) -> list[PushRecord]:
        """See :meth:`Transport.drain`."""
        return cast("list[PushRecord]", self._call("drain"))

    def totals(self) -> dict[int, RankTotals]:
        """See :meth:`Transport.totals`."""
        return cast("dict[int, RankTotals]", self._call("totals"))

    def check(self) -> None:
        """See :meth:`Transport.check`."""
        self._call("check")

    def fail(self, rank: int, reason: str, stopped: bool = False) -> None:
        """See :meth:`Transport.fail`."""
        self._call("fail", rank, reason, stopped)

    def leave(self) -> None:
        """See :meth:`Transport.leave`."""
        self._left = True
        self._call("leave", self._rank)

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
        rpc.shutdown(graceful=False)  # a graceful shutdown would wait for dead peers without end

    def _call(self, name: str, *args: Any) -> Any:
        return self._asked(name, *args).wait()

    def _asked(self, name: str, *args: Any) -> _Call[Any]:
        return self._pending(_answer, name, chunks.CHUNK_BYTES, self._rank, *args)

    def _awaited(self, name: str, question: Any) -> Any:
        return self._pending(_wait_for, name, chunks.CHUNK_BYTES, self._rank, question, timeout_s=0.0).wait()

    def _shippable(self, tensor: Tensor) -> Tensor | Hollow:
        """The tensor where it fits a message; else it is sent in pieces, and this names it."""
        return tensor if tensor.nbytes <= chunks.CHUNK_BYTES else self._sent(pack(tensor, copy=False))

    def _sent(self, parcel: Parcel) -> Hollow:
        hollow = Hollow.of(parcel, (self._rank, next(self._numbers)))
        self._pending(_expect, hollow).wait()
        for start, stop in chunks.pieces(parcel.size_bytes):
            self._pending(_take, hollow.key, start, chunks.read_piece(parcel.tensors, start, stop)).wait()
        return hollow

    def _fetched(self, hollow: Hollow) -> Parcel:
        parcel = hollow.allocate()
        for start, stop in chunks.pieces(parcel.size_bytes):
            piece = self._pending(_fetch, hollow.key, start, stop).wait()
            chunks.write_piece(parcel.tensors, start, piece)
        return parcel

    def _pending(self, function: Any, *args: Any, timeout_s: float | None = None) -> _Call[Any]:
        if not self._connected:
            raise ServerLostError(
                "this rank is not connected to a server: the transport is closed or was never started"
            )
        timeout = self._timeout_s if timeout_s is None else timeout_s
        try:
            future = rpc.rpc_async(self._address.server_name, function, args=args, timeout=timeout)
        except RuntimeError as error:
            raise self._lost(error) from error
        return _Call(self, future)

    def _lost(self, error: RuntimeError) -> ServerLostError:
        how = self._server.wait(1.0) if self._server is not None else None
        text = how or f"{self._address.server_name} does not answer ({str(error).splitlines()[0]})"
        return ServerLostError(
            "server 0 was lost, and with it the weights since the last checkpoint; resume with "
            f"trainer.fit(..., ckpt_path=<last checkpoint>). What happened: {text}"
        )

    def _await_server(self, store: Store) -> None:
        deadline = time.monotonic() + self._address.timeout_s
        while not store.check([_ready_key(self._address)]):
            if self._server is not None and (how := self._server.poll()):
                raise self._not_started(how)
            if time.monotonic() > deadline:
                raise self._not_started(f"no sign of life within {self._address.timeout_s:.0f} s")
            time.sleep(0.01)

    def _not_started(self, how: str) -> ServerStartError:
        return ServerStartError(
            f"server 0 of session {self._address.session} did not start: {how}. Check that this Python can import "
            "torch.distributed.rpc, and raise `start_timeout_s` on a slow or busy host"
        )


class _SegmentCall(Pending[PushReply]):
    def __init__(self, call: _Call[tuple[PushReceipt, int]], weights: Tensor) -> None:
        self._call = call
        self._weights = weights

    def done(self) -> bool:
        return self._call.done()

    def wait(self) -> PushReply:
        receipt, version = self._call.wait()
        return PushReply(receipt, Weights(version, self._weights))


class ShmTransport(RpcTransport):
    """RPC for control, shared memory for gradients and weights; for ranks on the server's host.

    See :mod:`lightning_g2.transport.shm` for the segments. Arguments are those of :class:`RpcTransport`.
    """

    _segment: Segment | None = None

    def gradient_buffer(self, size_bytes: int) -> Tensor:
        """See :meth:`Transport.gradient_buffer`; the buffer lies in this rank's segment."""
        return self._opened(size_bytes).gradients[:size_bytes]

    def adopt(self, layout: ParameterLayout, values: Tensor) -> ParameterLayout:
        """See :meth:`Transport.adopt`; the segment is made anew at the next push, as large as the weights then are."""
        grown = super().adopt(layout, values)
        self._segment = None
        return grown

    def push(self, packet: PushPacket, gradients: Tensor | None) -> Pending[PushReply]:
        """See :meth:`Transport.push`; ``gradients`` is where :meth:`gradient_buffer` said."""
        size_bytes = 0 if gradients is None else gradients.numel()
        segment = self._opened()  # a rank's very first push may be a rejected one, which fills no buffer
        return _SegmentCall(self._pending(_push_in_segment, packet, size_bytes), segment.weights)

    def _opened(self, least_bytes: int = 0) -> Segment:
        # Indices make a sparse gradient larger than its parameter, where rows are short.
        if self._segment is None or self._segment.gradients.numel() < least_bytes:
            pid, descriptor, size_bytes = self._pending(_open_segment, self._rank, least_bytes).wait()
            self._segment = Segment.open(pid, descriptor, size_bytes)
        return self._segment


# --- both ends --------------------------------------------------------------------------------------------------------


@contextmanager
def quiet_tensorpipe() -> Iterator[None]:
    """Leave out what TensorPipe writes to standard error about peers that leave, which at the end is all of them.

    Its log level can be set only before torch is loaded. So standard error goes to an unnamed file for the moment, and
    whatever else was written comes out afterwards.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        terminal = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            kept.seek(0)
            for line in kept.read().splitlines(keepends=True):
                if b"tensorpipe" not in line:
                    os.write(2, line)


def _ready_key(address: ServerAddress) -> str:
    return f"{address.session}/server0"


def _connect_store(address: ServerAddress) -> Store:
    return TCPStore(
        address.store_host, address.store_port, is_master=False, timeout=timedelta(seconds=address.timeout_s)
    )


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
    # RPC takes its store only through a rendezvous URL; this one hands it the store that is already open, so that no
    # second port is needed beside the process group's.
    session = url.removeprefix(f"{_SCHEME}://").split("?")[0]
    yield _stores[session], -1, -1


@cache
def _register_scheme() -> None:
    register_rendezvous_handler(_SCHEME, _rendezvous)  # type: ignore[no-untyped-call]


def _init_rpc(address: ServerAddress, store: Store, name: str, index: int) -> None:
    _register_scheme()
    _stores[address.session] = PrefixStore(address.session, store)
    rpc._init_counter = address.init_counter  # part of the keys under which members find each other
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"{_SCHEME}://{address.session}",
        rpc_timeout=address.timeout_s,
        # Each rank has at most a push, a heartbeat and a control call under way.
        num_worker_threads=max(8, 2 * address.ranks + 4),
        # TensorPipe's shared-memory transport polls: it keeps one core of every process busy for nothing.
        _transports=["uv"],
        _channels=["basic"],
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # torch warns of its own use
            rpc.init_rpc(  # type: ignore[no-untyped-call]
                name, rank=index, world_size=address.ranks + 1, rpc_backend_options=options
            )
    finally:
        del _stores[address.session]
