"""Asynchronous training on one core: real gradients, the server's own state machine and gates, simulated time."""

from lightning_g2.simulate.delay import (
    Delays,
    charged,
    layered,
    pareto,
    parse_delays,
    speeds,
    straggler,
    uniform,
)
from lightning_g2.simulate.observation import Observation
from lightning_g2.simulate.result import SimulationResult
from lightning_g2.simulate.simulation import simulate
from lightning_g2.simulate.trace import trace

__all__ = [
    "Delays",
    "Observation",
    "SimulationResult",
    "charged",
    "layered",
    "pareto",
    "parse_delays",
    "simulate",
    "speeds",
    "straggler",
    "trace",
    "uniform",
]
