"""The parameter server as a deterministic state machine: no sockets, no threads, no clock of its own."""

from lightning_g2.server.aggregate import ASYNCHRONOUS, Aggregation
from lightning_g2.server.conductor import Conductor, first_share
from lightning_g2.server.layout import ParameterLayout, ParameterSpec, flatten, flatten_gradients
from lightning_g2.server.optimizer import MASTER_KEY, OptimizerParts, OptimizerSpec, hyper_parameters, inner_optimizers
from lightning_g2.server.parcel import Parcel, pack, unpack
from lightning_g2.server.rendezvous import FINAL_POINT, Rendezvous
from lightning_g2.server.state import ServerSetup, ServerSnapshot, ServerState
from lightning_g2.server.trace import TraceEntry, TraceWriter, read_trace

__all__ = [
    "ASYNCHRONOUS",
    "FINAL_POINT",
    "MASTER_KEY",
    "Aggregation",
    "Conductor",
    "OptimizerParts",
    "OptimizerSpec",
    "ParameterLayout",
    "ParameterSpec",
    "Parcel",
    "Rendezvous",
    "ServerSetup",
    "ServerSnapshot",
    "ServerState",
    "TraceEntry",
    "TraceWriter",
    "first_share",
    "flatten",
    "flatten_gradients",
    "hyper_parameters",
    "inner_optimizers",
    "pack",
    "read_trace",
    "unpack",
]
