"""One fit's connection between ranks and servers: the server processes and the transport to them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

from lightning.fabric.plugins import ClusterEnvironment
from torch.distributed import rpc

from lightning_g2.errors import G2Error, PeerFailedError
from lightning_g2.strategy.options import G2AsyncOptions, TransportName
from lightning_g2.transport import ServerAddress, ServerProcess, ShardedTransport, Transport


class Session:
    """Starts the server processes, connects this rank to all of them, and takes them down.

    Args:
        options: the strategy's options.
        environment: tells where the job's key-value store is.
        nodes: number of nodes; server k runs on node k mod nodes.

    Attributes:
        transport: this rank's connection, once there is one.
    """

    def __init__(self, options: G2AsyncOptions, environment: ClusterEnvironment, *, nodes: int = 1) -> None:
        self._options = options
        self._environment = environment
        self._nodes = nodes
        self._address: ServerAddress | None = None
        self._processes: dict[int, ServerProcess] = {}
        self.transport: Transport | None = None

    @property
    def servers(self) -> int:
        """Number of servers."""
        return self._options.server_count(self._nodes)

    @property
    def hosts_servers(self) -> bool:
        """Whether server processes run under this rank."""
        return bool(self._processes)

    def transports(self, node: int) -> list[TransportName]:
        """What connects ranks of a node to each server: shared memory on one host unless another is asked for."""
        here = [server % self._nodes == node for server in range(self.servers)]
        return [self._options.transport or ("shm" if same else "rpc") for same in here]

    def start_servers(self, *, rank: int, ranks: int, local_rank: int, node: int, share: Callable[[Any], Any]) -> None:
        """Start this node's servers, on its first rank; they come up while Lightning prepares data and module.

        Args:
            rank: this rank.
            ranks: number of ranks.
            local_rank: number of this rank on its node.
            node: number of the node.
            share: broadcasts an object from rank 0. Ranks may have trained before without each other, so what they
                must agree on is never counted but told.
        """
        self._address = share(self._new_address(ranks) if rank == 0 else None)
        assert isinstance(self._address, ServerAddress)
        for server in range(node, self.servers, self._nodes) if local_rank == 0 else ():
            process = ServerProcess(replace(self._address, server=server), device=self._options.server_device)
            self._processes[server] = process
            process.start()

    def connect(
        self, *, rank: int, node: int, on_drop: Callable[[int, str], None] = lambda rank, reason: None
    ) -> Transport:
        """Join the session; returns once all servers answer.

        Args:
            rank: this rank.
            node: number of its node.
            on_drop: called from another thread with each rank that was dropped from the job, and the reason.
        """
        from lightning_g2.transport.rpc import RpcTransport  # torch may be built without RPC
        from lightning_g2.transport.shm import ShmTransport

        assert self._address is not None
        children: list[Transport] = []
        for server, name in enumerate(self.transports(node)):
            kind = ShmTransport if name == "shm" else RpcTransport
            address, process = replace(self._address, server=server), self._processes.get(server)
            children.append(
                kind(
                    address,
                    rank,
                    server=process,
                    timeout_s=self._options.timeout_s,
                    rounds=self._options.rounds is not None,
                    on_drop=on_drop,
                )
            )
        self.transport = children[0] if len(children) == 1 else ShardedTransport(children)
        self.transport.start()
        return self.transport

    def close(self, *, limit_s: float | None) -> None:
        """Leave; on a rank that has started servers wait for the others to leave and stop them.

        Args:
            limit_s: how long to wait for other ranks; None, for a healthy job, waits until they have left.

        Raises:
            PeerFailedError: the job was healthy here, and another rank failed on its way out.
        """
        from lightning_g2.transport.membership import quiet_tensorpipe

        transport, self.transport = self.transport, None
        processes, self._processes = list(self._processes.values()), {}
        failure: PeerFailedError | None = None
        try:
            if transport is not None and processes:
                failure = self._await_others(transport, limit_s)
        finally:
            with quiet_tensorpipe():
                if transport is not None:
                    transport.close()
                for process in processes:
                    process.stop()
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
            servers=self.servers,
            secret=secrets.token_hex(16),
            heartbeat_timeout_s=self._options.heartbeat_timeout_s,
        )
