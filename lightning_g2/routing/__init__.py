"""Routing of gradient pushes: from a gradient to its friction, from friction to a weight, from that to what is sent."""

from lightning_g2.routing.gate import Gate, GateContext
from lightning_g2.routing.mge import mge_weights
from lightning_g2.routing.registry import available_gates, build_gate
from lightning_g2.routing.ridge import RidgeFrame
from lightning_g2.routing.sketch import G2Sketch
from lightning_g2.values import GateDecision

__all__ = [
    "G2Sketch",
    "Gate",
    "GateContext",
    "GateDecision",
    "RidgeFrame",
    "available_gates",
    "build_gate",
    "mge_weights",
]
