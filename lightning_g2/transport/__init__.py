"""How ranks reach servers: one interface, and the means that carry it."""

from lightning_g2.transport.base import Pending, Transport
from lightning_g2.transport.host import PushReply, ServerHost, SyncReply, Weights
from lightning_g2.transport.local import LocalTransport
from lightning_g2.transport.process import ROLE_VARIABLE, ServerAddress, ServerProcess

__all__ = [
    "ROLE_VARIABLE",
    "LocalTransport",
    "Pending",
    "PushReply",
    "ServerAddress",
    "ServerHost",
    "ServerProcess",
    "SyncReply",
    "Transport",
    "Weights",
]
