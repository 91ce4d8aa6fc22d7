"""One fit's connection between ranks and server: the server process and the transport to it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from lightning.fabric.plugins import ClusterEnvironment
from torch.distributed import rpc

from lightning_g2.errors import G2Error, PeerFailedError
from lightning_g2.strategy.options import G2AsyncOptions, TransportName
from lightning_g2.transport import ServerAddress, ServerProcess, Transport


class Session:
    """Starts the server process on rank 0, connects every rank to it, and takes both down.

    Args:
        options: the strategy's options.
        environment: tells where the job's key-value store is.
    """

    def __init__(self, options: G2AsyncOptions, environment: ClusterEnvironment) -> None:
        self._options = options
        self._environment = environment
        self._address: ServerAddress | None = None
        self._server: ServerProcess | None = None
        self._transport: Transport | None = None

    def start_server(self, *, rank: int, ranks: int) -> None:
        """Start the server process, on rank 0; it comes up while Lightning prepares data and module."""
        if rank == 0:
            self._address = self._new_address(ranks)
            self._server = ServerProcess(self._address)
            self._server.start()

    def connect(self, transport: TransportName, *, rank: int, share: Callable[[Any], Any]) -> Transport:
        """Join the session; returns once the server answers.

        Args:
            transport: its kind.
            rank: this rank.
            share: broadcasts an object from rank 0. Ranks may have trained before without each other, so what they
                must agree on is never counted but told.
        """
        from lightning_g2.transport.rpc import RpcTransport  # torch may be built without RPC
        from lightning_g2.transport.shm import ShmTransport

        kind = ShmTransport if transport == "shm" else RpcTransport
        address = share(self._address)
        assert isinstance(address, ServerAddress)
        options = self._options
        self._transport = kind(
            address, rank, server=self._server, timeout_s=options.timeout_s, rounds=options.rounds is not None
        )
        self._transport.start()
        return self._transport

    def close(self, *, limit_s: float | None) -> None:
        """Leave; on rank 0 wait for the others to leave and stop the server.

        Args:
            limit_s: how long to wait for other ranks; None, for a healthy job, waits until they have left.

        Raises:
            PeerFailedError: the job was healthy here, and another rank failed on its way out.
        """
        from lightning_g2.transport.membership import quiet_tensorpipe

        transport, self._transport = self._transport, None
        server, self._server = self._server, None
        failure: PeerFailedError | None = None
        try:
            if transport is not None and server is not None:
                failure = self._await_others(transport, limit_s)
        finally:
            with quiet_tensorpipe():
                if transport is not None:
                    transport.close()
                if server is not None:
                    server.stop()
        if failure is not None and limit_s is None:
            raise failure

    @staticmethod
    def _await_others(transport: Transport, limit_s: float | None) -> PeerFailedError | None:
        deadline = None if limit_s is None else time.monotonic() + limit_s
        try:
            transport.leave()
            while transport.live_ranks() and (deadline is None or time.monotonic() < deadline):
                time.sleep(0.02)
            transport.check()
        except PeerFailedError as failure:
            return failure
        except G2Error:
            pass  # the server is gone: there is nobody to wait for
        return None

    def _new_address(self, ranks: int) -> ServerAddress:
        return ServerAddress(
            store_host=self._environment.main_address,
            store_port=self._environment.main_port,
            session=f"g2-{uuid4().hex[:12]}",  # a restarted job may meet the keys of an earlier one in the store
            ranks=ranks,
            init_counter=rpc._init_counter,
            timeout_s=self._options.start_timeout_s,
            threads=self._options.server_threads,
            secret=secrets.token_hex(16),
        )
