"""The parameter server as a deterministic state machine: no sockets, no threads, no clock of its own."""

from lightning_g2.server.conductor import Conductor, first_share
from lightning_g2.server.layout import ParameterLayout, ParameterSpec
from lightning_g2.server.optimizer import OptimizerSpec, hyper_parameters
from lightning_g2.server.rendezvous import FINAL_POINT, Rendezvous
from lightning_g2.server.state import ServerSetup, ServerSnapshot, ServerState, flatten

__all__ = [
    "FINAL_POINT",
    "Conductor",
    "OptimizerSpec",
    "ParameterLayout",
    "ParameterSpec",
    "Rendezvous",
    "ServerSetup",
    "ServerSnapshot",
    "ServerState",
    "first_share",
    "flatten",
    "hyper_parameters",
]
