"""The parameter server as a deterministic state machine: no sockets, no threads, no clock of its own."""

from lightning_g2.server.aggregate import ASYNCHRONOUS, Aggregation
from lightning_g2.server.cadence import Criterion, staleness_cost_of
from lightning_g2.server.conductor import Conductor, first_share
from lightning_g2.server.gathering import Gathering
from lightning_g2.server.heartbeats import BEATS, Heartbeats
from lightning_g2.server.layout import ParameterLayout, ParameterSpec, flatten, flatten_gradients
from lightning_g2.server.ledger import fate_of
from lightning_g2.server.optimizer import (
    MASTER_KEY,
    OptimizerParts,
    OptimizerSpec,
    hyper_parameters,
    inner_optimizers,
    to_cpu,
)
from lightning_g2.server.outer import OuterName, OuterStep, outer_state, served_optimizers
from lightning_g2.server.parcel import Parcel, pack, unpack
from lightning_g2.server.rendezvous import FINAL_POINT, Rendezvous
from lightning_g2.server.shard import Balance, Shards
from lightning_g2.server.state import ServerSetup, ServerSnapshot, ServerState
from lightning_g2.server.trace import TraceEntry, TraceWriter, read_trace
from lightning_g2.server.wire import power_of_two, travel_dtype, widened

__all__ = [
    "ASYNCHRONOUS",
    "BEATS",
    "FINAL_POINT",
    "MASTER_KEY",
    "Aggregation",
    "Balance",
    "Conductor",
    "Criterion",
    "Gathering",
    "Heartbeats",
    "OptimizerParts",
    "OptimizerSpec",
    "OuterName",
    "OuterStep",
    "ParameterLayout",
    "ParameterSpec",
    "Parcel",
    "Rendezvous",
    "ServerSetup",
    "ServerSnapshot",
    "ServerState",
    "Shards",
    "TraceEntry",
    "TraceWriter",
    "fate_of",
    "first_share",
    "flatten",
    "flatten_gradients",
    "hyper_parameters",
    "inner_optimizers",
    "outer_state",
    "pack",
    "power_of_two",
    "read_trace",
    "served_optimizers",
    "staleness_cost_of",
    "to_cpu",
    "travel_dtype",
    "unpack",
    "widened",
]
