"""Transport over torch.distributed.rpc (TensorPipe): the server's end and the ranks' end."""

from __future__ import annotations

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

import cloudpickle
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore, rpc  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler

from lightning_g2 import errors
from lightning_g2.errors import ConfigurationError, G2Error, ServerLostError, ServerStartError
from lightning_g2.server import ServerSetup, ServerSnapshot
from lightning_g2.transport.base import Pending, Transport
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

_CALLS = frozenset(
    {"view", "push", "edit", "pull", "snapshot", "drain", "totals", "check", "fail", "leave", "live_ranks"}
)
"""The calls that a server answers at once; any other name is refused."""

_WAITING_CALLS = ("sync", "ticket")
"""The calls whose answer may take any time."""


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


def _answer(name: str, *args: Any) -> Any:
    assert _host is not None
    try:
        if name not in _CALLS:
            raise errors.ProtocolError(f"call {name!r}: a server answers only {', '.join(sorted(_CALLS))}")
        with torch.no_grad():
            return getattr(_host, name)(*args)
    except Exception as error:
        return _Failed.of(error)


def _configure(pickled: bytes, weights: Tensor) -> _Failed | None:
    assert _host is not None
    try:
        layout, optimizers, ranks = cloudpickle.loads(pickled)
        _host.configure(ServerSetup(layout=layout, weights=weights, optimizers=optimizers, ranks=ranks))
    except Exception as error:
        return _Failed.of(error)
    return None


def _open_segment(rank: int) -> tuple[int, int, int] | _Failed:
    assert _host is not None
    try:
        size_bytes = _host.size_bytes()
        _segments[rank] = Segment.create(size_bytes)
    except Exception as error:
        return _Failed.of(error)
    return _segments[rank].pid, _segments[rank].descriptor, size_bytes


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
def _wait_for(name: str, rank: int, question: Any) -> torch.futures.Future[Any]:
    # Asynchronous: a blocked call would hold one of the server's few threads.
    assert _host is not None
    future: torch.futures.Future[Any] = torch.futures.Future()

    def settle(reply: Any) -> None:
        future.set_result(_Failed.of(reply) if isinstance(reply, Exception) else reply)

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
        return cast(T, reply)


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
        """See :meth:`Transport.configure`.

        Raises:
            ConfigurationError: an optimizer cannot be pickled.
        """
        try:
            pickled = cloudpickle.dumps((setup.layout, setup.optimizers, setup.ranks))
        except Exception as error:
            names = ", ".join(spec.cls.__qualname__ for spec in setup.optimizers)
            raise ConfigurationError(
                f"optimizer {names}: cannot be sent to the server ({error}); its attributes and hyper-parameters must "
                "be picklable: keep locks, handles and generators out of it"
            ) from error
        self._pending(_configure, pickled, setup.weights).wait()

    def view(self) -> ServerView:
        """See :meth:`Transport.view`."""
        return cast(ServerView, self._call("view"))

    def gradient_buffer(self, size_bytes: int) -> Tensor:
        """See :meth:`Transport.gradient_buffer`."""
        # One for each size, exactly as large: RPC sends a tensor's whole storage.
        if size_bytes not in self._buffers:
            on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            self._buffers[size_bytes] = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        return self._buffers[size_bytes]

    def push(self, packet: PushPacket, gradients: Tensor | None) -> Pending[PushReply]:
        """See :meth:`Transport.push`."""
        return self._pending(_answer, "push", packet, gradients)

    def edit(self, edit: WeightEdit, values: Tensor, before: Tensor) -> None:
        """See :meth:`Transport.edit`."""
        self._call("edit", edit, values, before)

    def pull(self) -> Weights:
        """See :meth:`Transport.pull`."""
        return cast(Weights, self._call("pull"))

    def sync(self, point: str) -> SyncReply:
        """See :meth:`Transport.sync`."""
        return cast(SyncReply, self._pending(_wait_for, "sync", self._rank, point, timeout_s=0.0).wait())

    def ticket(self, request: TicketRequest) -> Ticket:
        """See :meth:`Transport.ticket`."""
        return cast(Ticket, self._pending(_wait_for, "ticket", self._rank, request, timeout_s=0.0).wait())

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
        return self._pending(_answer, name, *args).wait()

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
        return self._opened().gradients[:size_bytes]

    def push(self, packet: PushPacket, gradients: Tensor | None) -> Pending[PushReply]:
        """See :meth:`Transport.push`; ``gradients`` is where :meth:`gradient_buffer` said."""
        size_bytes = 0 if gradients is None else gradients.numel()
        segment = self._opened()  # a rank's very first push may be a rejected one, which fills no buffer
        return _SegmentCall(self._pending(_push_in_segment, packet, size_bytes), segment.weights)

    def _opened(self) -> Segment:
        if self._segment is None:
            pid, descriptor, size_bytes = self._pending(_open_segment, self._rank).wait()
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
