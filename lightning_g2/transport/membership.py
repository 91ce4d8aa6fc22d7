"""How processes find each other: the job's key-value store, and RPC among servers and ranks."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore, rpc  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler

from lightning_g2.transport.process import ServerAddress
from lightning_g2.transport.seal import seal_rpc, unseal_rpc

_SCHEME = "lightning-g2"
_stores: dict[str, Store] = {}
_joined: dict[str, int] = {}
"""How many connections of this process share the RPC of a session; a process has one RPC at a time."""


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


def ready_key(address: ServerAddress) -> str:
    """Key under which the server gives a sign of life."""
    return f"{address.session}/server{address.server}"


def failure_key(address: ServerAddress) -> str:
    """Key under which whoever started a server says that it did not come up."""
    return f"{address.session}/not-started"


def connect_store(address: ServerAddress) -> Store:
    """The job's key-value store."""
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


def join_rpc(address: ServerAddress, store: Store, name: str, index: int) -> None:
    """Join the session's RPC, once for all connections of this process; returns once all members are here.

    Args:
        address: the session.
        store: the job's key-value store.
        name: this process's RPC name.
        index: its number among the members: ranks in their order, then the servers.
    """
    if address.session not in _joined:
        _init_rpc(address, store, name, index)
    _joined[address.session] = _joined.get(address.session, 0) + 1


def leave_rpc(address: ServerAddress) -> None:
    """Give up one connection's share; with the last one RPC ends in this process."""
    _joined[address.session] -= 1
    if _joined[address.session] == 0:
        del _joined[address.session]
        rpc.shutdown(graceful=False)  # a graceful shutdown would wait for dead peers without end
        unseal_rpc()


def _init_rpc(address: ServerAddress, store: Store, name: str, index: int) -> None:
    _register_scheme()
    seal_rpc(address.secret.encode())
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
                name, rank=index, world_size=address.ranks + address.servers, rpc_backend_options=options
            )
    finally:
        del _stores[address.session]
