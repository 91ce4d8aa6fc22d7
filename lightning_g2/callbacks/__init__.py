"""Callbacks: the gate, what is logged of it, and a straggler on purpose."""

from lightning_g2.callbacks.monitor import G2MonitorCallback
from lightning_g2.callbacks.routing import G2RoutingCallback
from lightning_g2.callbacks.straggler import StragglerCallback

__all__ = ["G2MonitorCallback", "G2RoutingCallback", "StragglerCallback"]
