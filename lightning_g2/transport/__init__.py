"""How ranks reach servers: one interface, and the means that carry it."""

from lightning_g2.transport.base import Pending, Transport
from lightning_g2.transport.host import PushReply, ServerHost, SyncReply, Weights
from lightning_g2.transport.local import LocalTransport
from lightning_g2.transport.process import ROLE_VARIABLE, ServerAddress, ServerProcess
from lightning_g2.transport.sharded import ShardedTransport
from lightning_g2.transport.versions import Versions

__all__ = [
    "ROLE_VARIABLE",
    "LocalTransport",
    "Pending",
    "PushReply",
    "ServerAddress",
    "ServerHost",
    "ServerProcess",
    "ShardedTransport",
    "SyncReply",
    "Transport",
    "Versions",
    "Weights",
]
