"""One fit's connection between ranks and server: the server process and the transport to it."""

from __future__ import annotations

import itertools
import time

from lightning.fabric.plugins import ClusterEnvironment
from torch.distributed import rpc

from lightning_g2.errors import G2Error
from lightning_g2.strategy.options import G2AsyncOptions, TransportName
from lightning_g2.transport import ServerAddress, ServerProcess, Transport
from lightning_g2.transport.rpc import RpcTransport, ShmTransport, quiet_tensorpipe

_sessions = itertools.count()
"""Every process of a job fits equally often, so this count names a session alike everywhere."""


class Session:
    """Starts the server process on rank 0, connects every rank to it, and takes both down.

    Args:
        options: the strategy's options.
        environment: tells where the job's key-value store is.
    """

    def __init__(self, options: G2AsyncOptions, environment: ClusterEnvironment) -> None:
        self._options = options
        self._environment = environment
        self._name = f"g2-{next(_sessions)}"
        self._server: ServerProcess | None = None
        self._transport: Transport | None = None

    def start_server(self, *, rank: int, ranks: int) -> None:
        """Start the server process, on rank 0; it comes up while Lightning prepares data and module."""
        if rank == 0:
            self._server = ServerProcess(self._address(ranks))
            self._server.start()

    def connect(self, transport: TransportName, *, rank: int, ranks: int) -> Transport:
        """Join the session; returns once the server answers."""
        kind = ShmTransport if transport == "shm" else RpcTransport
        self._transport = kind(self._address(ranks), rank, server=self._server, timeout_s=self._options.timeout_s)
        self._transport.start()
        return self._transport

    def close(self, *, limit_s: float | None) -> None:
        """Leave; on rank 0 wait for the others to leave and stop the server.

        Args:
            limit_s: how long to wait for other ranks; None waits until they have left or one has failed.
        """
        with quiet_tensorpipe():
            transport, self._transport = self._transport, None
            if transport is not None:
                if self._server is not None:
                    self._await_others(transport, limit_s)
                transport.close()
            if self._server is not None:
                self._server.stop()
                self._server = None

    def _await_others(self, transport: Transport, limit_s: float | None) -> None:
        deadline = None if limit_s is None else time.monotonic() + limit_s
        try:
            transport.leave()
            while transport.live_ranks() and (deadline is None or time.monotonic() < deadline):
                if deadline is None:
                    transport.check()
                time.sleep(0.02)
        except G2Error:
            pass  # the server is gone or a rank has failed: there is nobody to wait for

    def _address(self, ranks: int) -> ServerAddress:
        return ServerAddress(
            store_host=self._environment.main_address,
            store_port=self._environment.main_port,
            session=self._name,
            ranks=ranks,
            init_counter=rpc._init_counter,
            timeout_s=self._options.start_timeout_s,
            threads=self._options.server_threads,
        )
